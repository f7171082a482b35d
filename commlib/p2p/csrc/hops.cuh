// The steps of an all_reduce in one hop (every rank gets all tensors) and in two (every rank reduces
// one slice and hands it on). A thread does the same vectors in all steps, so that x and out may be
// the same memory.

#pragma once
#include "values.cuh"

// The reduction of `own` and of what the other ranks have pushed to `from`; false if given up.
template <class T, int Op>
__device__ inline bool reduced(const Call& call, const State& state, uint4* const (&from)[kRanks],
                               const uint4& own, uint4& result) {
    uint4 v[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) v[r] = own;  // one stays; by its index it would go to memory
    if (!take(call, state, others(call), from, v, every_word)) return false;
    float total[kItems<T>];
    reduce<T, Op>(v, call.option, total);
    result = pack<T>(total);
    return true;
}

// Vectors that a thread does, one after the other.
struct Turns {
    u32 first, step;
};

__device__ inline Turns turns_of_one_hop() {
    return {blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x};
}

// -- one hop -----------------------------------------------------------------------------------------

template <class T, bool kWhole>
struct OneShot {
    const Call& call;
    const View<T, kWhole> x, out;
    const u32 vectors;
    State state;
    uint4* here;  // what the others push to

    __device__ OneShot(const Call& call)
        : call(call), x(call.x, call.items), out(call.out, call.items), vectors(x.vectors()) {}

    __device__ void enter() {
        state = ::enter(call);
        here = slot(call, 0, state.epoch, 0);
    }

    __device__ void push(u32 i, const uint4& own) const {
        const uint4 v = masked(own);
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
            poke(slot(call, d, state.epoch, call.rank * vectors + i), v);
        }
    }

    template <int Op>
    __device__ void finish(u32 i, const uint4& own) const {
        uint4* from[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) from[r] = here + (r * vectors + i);
        uint4 result;
        out.put(i, reduced<T, Op>(call, state, from, own, result) ? result : not_numbers());
    }

    // After a fault: says so on this rank too, and leaves nothing that could be taken for a result:
    // each thread spoils what it would have written, for others may not have seen the fault.
    __device__ void refuse(const Turns& turns) const {
        report(call, state.fault);
        for (u32 i = turns.first; i < vectors; i += turns.step) out.put(i, not_numbers());
    }
};

// -- two hops ----------------------------------------------------------------------------------------

// A part of the threads of each block serves one peer: it pushes to it, and takes from it. The first
// part reduces this rank's slice too.
template <class T, bool kWhole>
struct TwoShot {
    const Call& call;
    const View<T, kWhole> x, out;
    const u32 vectors, slice, width;
    const u32 d;  // the peer is that many ranks after this one
    const u32 peer;
    State state;
    uint4* here;   // what the others push to
    uint4* there;  // what is pushed to the peer

    __device__ TwoShot(const Call& call)
        : call(call),
          x(call.x, call.items),
          out(call.out, call.items),
          vectors(x.vectors()),
          slice((vectors + kRanks - 1) / kRanks),
          width(blockDim.x / (kRanks - 1)),
          d(1 + threadIdx.x / width),
          peer((call.rank + d) % kRanks) {}

    __device__ Turns turns() const {
        return {blockIdx.x * width + threadIdx.x % width, gridDim.x * width};
    }

    __device__ void enter() {
        state = ::enter(call);
        here = slot(call, 0, state.epoch, 0);
        there = slot(call, d % kRanks, state.epoch, 0);
    }

    __device__ bool holds(u32 owner, u32 i) const {
        return i < slice && owner * slice + i < vectors;
    }
    // Threads that are left over serve nobody.
    __device__ bool serves(u32 i) const { return d < kRanks && holds(peer, i); }
    __device__ bool reduces(u32 i) const { return d == 1 && holds(call.rank, i); }

    // What this thread pushes to the peer, and what it adds to what the others push.
    __device__ uint4 given(u32 i) const {
        return serves(i) ? x.get(peer * slice + i) : not_numbers();
    }
    __device__ uint4 own(u32 i) const {
        return reduces(i) ? x.get(call.rank * slice + i) : not_numbers();
    }

    __device__ void scatter(u32 i, const uint4& given) const {
        if (serves(i)) poke(there + (call.rank * slice + i), masked(given));
    }

    template <int Op>
    __device__ void reduce_and_spread(u32 i, const uint4& own) const {
        if (!reduces(i)) return;
        const u32 at = call.rank * slice + i;
        uint4* from[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) from[r] = here + (r * slice + i);
        uint4 result;
        if (!reduced<T, Op>(call, state, from, own, result)) return out.put(at, not_numbers());
        const uint4 v = masked(result);
#pragma unroll
        for (int to = 1; to < kRanks; ++to) {
            poke(slot(call, to, state.epoch, (kRanks + call.rank) * slice + i), v);
        }
        out.put(at, result);
    }

    __device__ void gather(u32 i) const {
        if (!serves(i)) return;
        uint4* from = here + ((kRanks + peer) * slice + i);
        uint4 v;
        u64 begin = 0;
        bool good = true;
        for (u32 polls = 1; good && !every_word(v = peek(from)); ++polls) {
            good = usually(polls % kPolls) || !given_up(call, state, begin, peer, 2);
        }
        if (good) put_zeros(from);
        out.put(peer * slice + i, good ? unmasked(v) : not_numbers());
    }

    __device__ void refuse() const {
        report(call, state.fault);
        const Turns mine = turns();
        for (u32 i = mine.first; i < slice; i += mine.step) {
            if (serves(i)) out.put(peer * slice + i, not_numbers());
            if (reduces(i)) out.put(call.rank * slice + i, not_numbers());
        }
    }
};

// -- whole or not ------------------------------------------------------------------------------------

// Kernel<true> has a fraction of the instructions: fetching them is a part of the time of a small call.
template <class T, template <bool> class Kernel>
__device__ inline void run(const Call& call) {
    if (whole_vectors<T>(call.x, call.items) && whole_vectors<T>(call.out, call.items)) {
        Kernel<true>::run(call);
    } else {
        Kernel<false>::run(call);
    }
}
