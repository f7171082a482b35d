// What follows from the counts of all ranks: the places of choices, the demand, and the unused rows.

#pragma once
#include "experts_counts.cuh"

constexpr int kPlanned = 256;  // tokens whose choices wait for their places

struct Pushed {  // tokens of a block
    int count, tokens[kPlanned];
};

// Turns the indices of tokens that this block has pushed into places; the counters are lost.
__device__ bool place_choices(const Call& call, const State& state, const Pushed& pushed) {
    clear();
    if (!add_counts(call, state, before(call.rank), 0, call.experts)) return false;
    const int bits = choice_bits(call), k = threadIdx.x & ((1 << bits) - 1);
#pragma unroll 1
    for (int i = threadIdx.x; i < pushed.count << bits && k < call.choices; i += kThreads) {
        const i64 choice = static_cast<i64>(pushed.tokens[i >> bits]) * call.choices + k;
        const int index = call.positions[choice], e = call.expert_ids[choice];
        if (index < 0) continue;
        const int place = counters[e] + index, row = e - owner(call, e) * call.local;
        call.positions[choice] = place < call.capacity ? row * call.capacity + place : -1;
    }
    return true;
}

// One thread reports an expert with too many choices, where no earlier report is left.
__device__ bool report_overflow(const Call& call, const State& state, int expert) {
    Overflow* overflow = call.overflow;
    if (atomicCAS_system(&overflow->state, 0ull, 1ull)) return true;
    overflow->expert = expert;
    overflow->owner = owner(call, expert);
    overflow->capacity = call.capacity;
    bool good = true;
#pragma unroll 1
    for (int r = 0; r < kRanks; ++r) {
        u32 choices = 0;
        if (has(state.live, r)) good = good && await_count(call, state, r, expert, choices);
        overflow->by_rank[r] = choices;
    }
    __threadfence_system();
    poke(&overflow->state, 2ull);
    return good;
}

// One block: the demand for every expert, and the rows of this rank's own.
__device__ bool total(const Call& call, const State& state) {
    __shared__ int worst;
    if (threadIdx.x == 0) worst = kExperts;
    clear();
    if (!add_counts(call, state, state.live, 0, call.experts)) return false;
#pragma unroll 1
    for (int e = threadIdx.x; e < call.experts; e += kThreads) {
        call.demand[e] = counters[e];
        if (counters[e] > static_cast<u32>(call.capacity)) atomicMin(&worst, e);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < call.local; i += kThreads) {
        const int e = call.rank * call.local + i;
        call.counts[i] = e < call.experts ? min(static_cast<int>(counters[e]), call.capacity) : 0;
    }
    __syncthreads();
    if (threadIdx.x || worst == kExperts || !call.overflow) return true;
    return report_overflow(call, state, worst);
}

// Makes unused rows zero, each pusher its share.
template <bool Known, class Way>
__device__ bool clear_unused(const Call& call, const State& state, int pusher) {
    __shared__ int list[kThreads], listed;
    clear();
    const int own = call.rank * call.local;
    if (!Known && !add_counts(call, state, state.live, own, call.local)) return false;
    const int rows = call.local * call.capacity, bytes = Way::bytes(call);
#pragma unroll 1
    for (int first = pusher; first < rows; first += kThreads * call.pushers) {
        if (threadIdx.x == 0) listed = 0;
        __syncthreads();
        const int row = first + threadIdx.x * call.pushers;
        bool unused = row < rows;
        if (unused && Known) {
            const int from = call.sources[row].x;
            unused = from < 0 || !has(state.live, from);
        }
        if (unused && !Known) unused = row % call.capacity >= counters[row / call.capacity];
        if (unused) list[atomicAdd(&listed, 1)] = row;
        if (unused && !Known) {
            call.sources[row] = make_int4(-1, -1, -1, -1);
            call.row_weights[row] = 0;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < listed; ++i) {
            fill(call.out + static_cast<i64>(list[i]) * bytes, bytes, 0);
            if (call.scales) {
                const int groups = bytes / 128;
                fill(call.scales + static_cast<i64>(list[i]) * groups, groups * 4, 0);
            }
        }
        __syncthreads();
    }
    return true;
}
