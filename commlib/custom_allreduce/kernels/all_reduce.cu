// all_reduce in one hop (every rank gets all tensors) or in two (every rank reduces one slice and
// hands it on). A thread does the same vectors in all steps, so x and out may be the same memory.

#include "values.cuh"

// The reduction of `own` and of what the other ranks have pushed to `from`; false if given up.
template <class T, int Op>
__device__ inline bool reduced(const Call& call, u32 epoch, uint4* const (&from)[kRanks],
                               const uint4& own, uint4& result) {
    uint4 v[kRanks];
    if (!take(call, epoch, others(call), from, v, every_word)) return false;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
        if (r == call.rank) v[r] = own;
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

template <class T, int Op>
__device__ inline void one_shot(const Call& call) {
    OneShot<T> work(call);
    const i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
    const i64 vectors = work.vectors;
    await_predecessor();
    uint4 own = first < vectors ? work.x.get(first) : not_numbers();
    const State state = enter(call);
    work.epoch = state.epoch;
    if (state.fault) {
        report(call, state.fault);
        for (i64 i = first; i < vectors; i += step) work.out.put(i, not_numbers());
        return;
    }
    if (first < vectors) work.push(first, own);
    const Ticket ticket = arrive(call);
    advance(call, ticket, state.epoch);
    for (i64 i = first; i < vectors; i += step) {
        const i64 next = i + step;  // on its way while this one is waited for
        uint4 ahead;
        if (next < vectors) work.push(next, ahead = work.x.get(next));
        work.template finish<Op>(i, own);
        own = ahead;
    }
    leave(call);
}

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
        const bool good = take(call, epoch, wanted, from, v, every_word);
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (wanted >> r & 1) out.put(r * slice + i, good ? unmasked(v[r]) : not_numbers());
        }
    }
};

template <class T, int Op>
__device__ inline void two_shot(const Call& call) {
    TwoShot<T> work(call);
    const i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
    await_predecessor();
    const State state = enter(call);
    work.epoch = state.epoch;
    if (state.fault) {
        report(call, state.fault);
        for (i64 i = first; i < work.vectors; i += step) work.out.put(i, not_numbers());
        return;
    }
    if (first < work.slice) work.scatter(first);
    const Ticket ticket = arrive(call);
    advance(call, ticket, state.epoch);
    // The three steps of one vector lie a turn apart, so that all of them go on at a time.
    for (i64 i = first; i < work.slice + 2 * step; i += step) {
        if (i > first && i < work.slice) work.scatter(i);
        const i64 j = i - step, k = i - 2 * step;
        if (j >= first && j < work.slice) work.template reduce_and_spread<Op>(j);
        if (k >= first && k < work.slice) work.gather(k);
    }
    leave(call);
}

// -- one hop, one slice -------------------------------------------------------------------------------

// reduce_scatter: as in the first hop above, but slices are parts of equal size, given by items.
template <class T, int Op>
__device__ inline void scatter(const Call& call) {
    const View<T> out(call.out, call.items);
    const i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
    const i64 vectors = out.vectors();
    const auto part = [&](int rank) {
        return View<T>(call.x + rank * call.items * sizeof(typename T::Bits), call.items);
    };
    const auto push = [&](u32 epoch, i64 i) {
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
            const int peer = (call.rank + d) % kRanks;
            poke(slot(call, peer, epoch, call.rank * vectors + i), masked(part(peer).get(i)));
        }
    };
    await_predecessor();
    const State state = enter(call);
    if (state.fault) {
        report(call, state.fault);
        for (i64 i = first; i < vectors; i += step) out.put(i, not_numbers());
        return;
    }
    if (first < vectors) push(state.epoch, first);
    const Ticket ticket = arrive(call);
    advance(call, ticket, state.epoch);
    for (i64 i = first; i < vectors; i += step) {
        if (i + step < vectors) push(state.epoch, i + step);
        uint4* from[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            from[r] = slot(call, call.rank, state.epoch, r * vectors + i);
        }
        uint4 result;
        const bool good = reduced<T, Op>(call, state.epoch, from, part(call.rank).get(i), result);
        out.put(i, good ? result : not_numbers());
    }
    leave(call);
}

#define ENTRY(algorithm, name, T, Op)                                   \
    extern "C" __global__ void __launch_bounds__(kThreads)               \
        algorithm##_##name(const __grid_constant__ Call call) {           \
        algorithm<T, Op>(call);                                            \
    }
#define ENTRIES(algorithm, name, T)         \
    ENTRY(algorithm, name##_sum, T, kSum)    \
    ENTRY(algorithm, name##_max, T, kMax)     \
    ENTRY(algorithm, name##_min, T, kMin)
#define DTYPES(algorithm)                      \
    ENTRIES(algorithm, bfloat16, Bfloat16)      \
    ENTRIES(algorithm, float16, Float16)         \
    ENTRIES(algorithm, float32, Float32)

DTYPES(one_shot)
DTYPES(two_shot)
DTYPES(scatter)
