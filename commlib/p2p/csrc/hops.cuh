// The steps of an all_reduce in one hop (every rank gets all tensors) and in two (every rank reduces
// one slice and hands it on). A thread does the same vectors in all steps, so that x and out may be
// the same memory.

#pragma once
#include "values.cuh"

// The reduction of `own` and of what the other ranks have pushed to `from`; false if given up.
template <class T, int Op>
__device__ inline bool reduced(const Call& call, u32 epoch, uint4* const (&from)[kRanks],
                               const uint4& own, uint4& result) {
    uint4 v[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) v[r] = own;  // one stays; by its index it would go to memory
    if (!take(call, epoch, others(call), from, v, every_word)) return false;
    float total[kItems<T>];
    reduce<T, Op>(v, call.option, total);
    result = pack<T>(total);
    return true;
}

// -- one hop -----------------------------------------------------------------------------------------

template <class T>
struct OneShot {
    const Call& call;
    const View<T> x, out;
    const i64 vectors;
    u32 epoch;

    __device__ OneShot(const Call& call)
        : call(call), x(call.x, call.items), out(call.out, call.items), vectors(x.vectors()) {}

    __device__ void push(i64 i, const uint4& own) const {
        const uint4 v = masked(own);
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
            const int peer = (call.rank + d) % kRanks;
            poke(slot(call, peer, epoch, call.rank * vectors + i), v);
        }
    }

    template <int Op>
    __device__ void finish(i64 i, const uint4& own) const {
        uint4* from[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) from[r] = slot(call, call.rank, epoch, r * vectors + i);
        uint4 result;
        out.put(i, reduced<T, Op>(call, epoch, from, own, result) ? result : not_numbers());
    }
};

// -- two hops ----------------------------------------------------------------------------------------

template <class T>
struct TwoShot {
    const Call& call;
    const View<T> x, out;
    const i64 vectors, slice;
    u32 epoch;

    __device__ TwoShot(const Call& call)
        : call(call),
          x(call.x, call.items),
          out(call.out, call.items),
          vectors(x.vectors()),
          slice((vectors + kRanks - 1) / kRanks) {}

    __device__ bool holds(int owner, i64 i) const { return owner * slice + i < vectors; }

    __device__ uint4* scattered(int at, int source, i64 i) const {
        return slot(call, at, epoch, source * slice + i);
    }
    __device__ uint4* gathered(int at, int source, i64 i) const {
        return slot(call, at, epoch, (kRanks + source) * slice + i);
    }

    __device__ void scatter(i64 i) const {
        uint4 v[kRanks];
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
            const int peer = (call.rank + d) % kRanks;
            if (holds(peer, i)) v[d] = x.get(peer * slice + i);
        }
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
            const int peer = (call.rank + d) % kRanks;
            if (holds(peer, i)) poke(scattered(peer, call.rank, i), masked(v[d]));
        }
    }

    template <int Op>
    __device__ void reduce_and_spread(i64 i) const {
        if (!holds(call.rank, i)) return;
        const i64 at = call.rank * slice + i;
        uint4* from[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) from[r] = scattered(call.rank, r, i);
        uint4 result;
        if (!reduced<T, Op>(call, epoch, from, x.get(at), result)) {
            return out.put(at, not_numbers());
        }
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
            poke(gathered((call.rank + d) % kRanks, call.rank, i), masked(result));
        }
        out.put(at, result);
    }

    __device__ void gather(i64 i) const {
        uint4* from[kRanks];
        uint4 v[kRanks];
        u32 wanted = 0;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            from[r] = gathered(call.rank, r, i);
            if (r != call.rank && holds(r, i)) wanted |= 1u << r;
        }
        const bool good = take(call, epoch, wanted, from, v, every_word, 2);
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (wanted >> r & 1) out.put(r * slice + i, good ? unmasked(v[r]) : not_numbers());
        }
    }
};

// -- who does what -----------------------------------------------------------------------------------

__device__ inline i64 first_vector() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline i64 stride() { return i64(gridDim.x) * blockDim.x; }

// After a fault: says so on this rank too, and leaves nothing that could be taken for a result: each
// thread spoils what it would have written, for others may not have seen the fault.
template <class T>
__device__ inline void refuse(const Call& call, const State& state, const View<T>& out) {
    report(call, state.fault);
    for (i64 i = first_vector(); i < out.vectors(); i += stride()) out.put(i, not_numbers());
}

template <class T>
__device__ inline void refuse(const Call& call, const State& state, const TwoShot<T>& work) {
    report(call, state.fault);
    for (i64 i = first_vector(); i < work.slice; i += stride()) {
        for (int r = 0; r < kRanks; ++r) {
            if (work.holds(r, i)) work.out.put(r * work.slice + i, not_numbers());
        }
    }
}
