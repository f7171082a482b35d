// The choices of this rank, counted, and the counts of all ranks.

#pragma once
#include "experts.cuh"

constexpr int kLoads = 4;  // choices that a thread looks up at a time

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

// Threads for the choices of a token, as a power of 2.
__device__ inline int choice_bits(const Call& call) { return 32 - __clz(call.choices - 1); }

// Adds the choices of tokens first..end to the counters; all threads of a block.
template <bool Known>
__device__ void add(const Call& call, u32 live, int first, int end) {
    __shared__ u32 ranks[kThreads];  // of each token, as bits
    const int bits = choice_bits(call), k = threadIdx.x & ((1 << bits) - 1);
#pragma unroll 1
    for (int begin = first; begin < end; begin += kThreads) {
        const int tokens = min(end - begin, kThreads);
        ranks[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < tokens << bits; i += kLoads * kThreads) {
            int held[kLoads];  // on their way at the same time
#pragma unroll
            for (int n = 0; n < kLoads; ++n) {
                const int token = (i + n * kThreads) >> bits;
                const i64 choice = static_cast<i64>(begin + token) * call.choices + k;
                held[n] = token < tokens && k < call.choices ? expert<Known>(call, choice) : -1;
            }
#pragma unroll
            for (int n = 0; n < kLoads; ++n) {
                const int e = held[n], r = owner(call, max(e, 0));
                if (e < 0 || !has(live, r)) continue;
                atomicAdd(&counters[e], 1);
                u32* seen = &ranks[(i + n * kThreads) >> bits];
                if (!has(atomicOr(seen, 1u << r), r)) atomicAdd(&counters[kExperts + r], 1);
            }
        }
        __syncthreads();
    }
}

__device__ inline void clear() {
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kCounters; i += kThreads) counters[i] = 0;
    __syncthreads();
}

// Counts all choices of this rank and sends the counts to all ranks; one block does nothing else before.
template <bool Known>
__device__ bool announce(const Call& call, const State& state) {
    clear();
    add<Known>(call, state.live, 0, call.tokens);
    const int rank = threadIdx.x;
    const bool good = rank >= kRanks || !has(state.live, rank) || await_room(call, state, rank);
    if (!__syncthreads_and(good)) return false;
#pragma unroll 1
    for (int i = threadIdx.x; i < call.experts + call.size; i += kThreads) {
        const int index = i < call.experts ? i : kExperts + i - call.experts;
        const u64 value = static_cast<u64>(state.number()) << 32 | counters[index];
#pragma unroll 1
        for (int r = 0; r < call.size; ++r) {
            if (has(state.live, r)) poke(count(call, state, r, call.rank, index), value);
        }
    }
    return true;
}

// Waits for a count of one rank; false when a rank was given up.
__device__ inline bool await_count(const Call& call, const State& state, int from, int index,
                                   u32& value) {
    const u64* counted = count(call, state, call.rank, from, index);
    u64 word = 0;
    const bool good = await(call, state, [&] {
        word = peek(counted);
        return word >> 32 == state.number() ? kReady : from;
    });
    value = static_cast<u32>(word);
    return good;
}

// Adds the counts of `ranks` for the experts from `first` on to the counters, from 0 on, after clear().
// A function that is called: it is needed at several places.
__device__ __noinline__ bool add_counts(const Call& call, State state, u32 ranks, int first,
                                        int experts) {
    const int end = min(experts, call.experts - first);
    bool good = true;
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < call.size; r += kThreads / 32) {
        if (!has(ranks & state.live, r)) continue;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < end; i += 32) {
            u32 value = 0;
            good = good && await_count(call, state, r, first + i, value);
            atomicAdd(&counters[i], value);
        }
    }
    return __syncthreads_and(good);
}

__device__ inline u32 before(int rank) { return (1u << rank) - 1; }
