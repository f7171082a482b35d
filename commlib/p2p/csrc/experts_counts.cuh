// The choices of this rank, counted, and the counts of all ranks.

#pragma once
#include "experts.cuh"

constexpr int kLoads = 8;  // choices of a token that a thread looks up at a time

// Shared memory of a block: counters, in the order of `count`.
__shared__ u32 counters[kCounters];

// The expert of a choice that has a row, or may have one: -1 for none. With `Known`, an earlier
// dispatch has decided.
template <bool Known>
__device__ inline int expert(const Call& call, i64 choice) {
    if (Known) return call.positions[choice] < 0 ? -1 : call.expert_ids[choice];
    const i64 id = call.wide ? static_cast<const i64*>(call.ids)[choice]
                             : static_cast<const int*>(call.ids)[choice];
    return id >= 0 && id < call.experts ? static_cast<int>(id) : -1;
}

// Adds the choices of tokens first..end to the counters; all threads of a block.
template <bool Known>
__device__ __noinline__ void add(const Call& call, u32 live, int first, int end) {
#pragma unroll 1
    for (int begin = first; begin < end; begin += kThreads) {
        const int token = begin + threadIdx.x;
        u32 ranks = 0;
#pragma unroll 1
        for (int k = 0; token < end && k < call.choices; k += kLoads) {
            int held[kLoads];  // on their way at the same time
#pragma unroll
            for (int n = 0; n < kLoads; ++n) {
                const i64 choice = static_cast<i64>(token) * call.choices + k + n;
                held[n] = k + n < call.choices ? expert<Known>(call, choice) : -1;
            }
#pragma unroll
            for (int n = 0; n < kLoads; ++n) {
                const int e = held[n];
                if (e < 0 || !has(live, e / call.local)) continue;
                atomicAdd(&counters[e], 1);
                ranks |= 1u << e / call.local;
            }
        }
#pragma unroll 1
        for (int r = 0; r < call.size; ++r) {
            const u32 lanes = __ballot_sync(kWarp, has(ranks, r));
            if (lanes && threadIdx.x % 32 == 0) atomicAdd(&counters[kExperts + r], __popc(lanes));
        }
    }
    __syncthreads();
}

__device__ inline void clear() {
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kCounters; i += kThreads) counters[i] = 0;
    __syncthreads();
}

// Waits until all ranks have ended the last call with this half of the counts.
__device__ inline bool await_half(const Call& call, const State& state) {
    const Control* mine = control(call, call.rank);
    const u64 last = peek(&mine->last[state.number & 1]);
    const int rank = threadIdx.x;
    bool good = true;
    if (rank < kRanks && has(state.live, rank)) {
        good = await(call, state, [&] { return peek(&mine->begun[rank]) > last ? kReady : rank; });
    }
    return __syncthreads_and(good);
}

// Counts all choices of this rank and sends the counts to all ranks; one block does it first of all.
template <bool Known>
__device__ bool announce(const Call& call, const State& state) {
    add<Known>(call, state.live, 0, call.tokens);
    if (!await_half(call, state)) return false;
#pragma unroll 1
    for (int i = threadIdx.x; i < call.experts + call.size; i += kThreads) {
        const int index = i < call.experts ? i : kExperts + i - call.experts;
        const u64 value = static_cast<u64>(state.number) << 32 | counters[index];
#pragma unroll 1
        for (int r = 0; r < call.size; ++r) {
            if (has(state.live, r)) poke(count(call, state, r, call.rank, index), value);
        }
    }
    clear();
    return true;
}

// The sum of the counts of some ranks at one index; false when a rank was given up.
// A function that is called: it has many registers, and is needed at several places.
__device__ __noinline__ bool sum(const Call& call, State state, u32 ranks, int index, u32& total) {
    u64 words[kRanks] = {};
    const bool good = await(call, state, [&] {
        int missing = kReady;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (has(ranks, r)) words[r] = peek(count(call, state, call.rank, r, index));
        }
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (has(ranks, r) && words[r] >> 32 != state.number) missing = r;
        }
        return missing;
    });
    total = 0;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) total += static_cast<u32>(words[r]);
    return good;
}

// Puts the sums of `ranks` for the experts from `first` on into the counters, from 0 on.
__device__ bool sums(const Call& call, const State& state, u32 ranks, int first, int experts) {
    bool good = true;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < experts; i += kThreads) {
        counters[i] = 0;
        if (first + i < call.experts) {
            good = good && sum(call, state, ranks & state.live, first + i, counters[i]);
        }
    }
    return __syncthreads_and(good);
}

__device__ inline u32 before(int rank) { return (1u << rank) - 1; }
