// all_reduce and reduce_scatter, each in one kernel.

#include "hops.cuh"

template <class T, int Op>
__device__ inline void one_shot(const Call& call) {
    OneShot<T> work(call);
    const i64 first = first_vector(), step = stride();
    const i64 vectors = work.vectors;
    await_predecessor();
    uint4 own = first < vectors ? work.x.get(first) : not_numbers();
    const State state = enter(call);
    work.epoch = state.epoch;
    if (state.fault) return refuse(call, state, work.out);
    if (first < vectors) work.push(first, own);
    const Ticket ticket = arrive(call);
    advance(call, ticket, state);
    for (i64 i = first; i < vectors; i += step) {
        const i64 next = i + step;  // on its way while this one is waited for
        uint4 ahead;
        if (next < vectors) work.push(next, ahead = work.x.get(next));
        work.template finish<Op>(i, own);
        own = ahead;
    }
    leave(call);
}

template <class T, int Op>
__device__ inline void two_shot(const Call& call) {
    TwoShot<T> work(call);
    const i64 first = first_vector(), step = stride();
    await_predecessor();
    const State state = enter(call);
    work.epoch = state.epoch;
    if (state.fault) return refuse(call, state, work);
    if (first < work.slice) work.scatter(first);
    const Ticket ticket = arrive(call);
    advance(call, ticket, state);
    // The three steps of one vector are a turn apart, so that all of them go on at a time.
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
    const i64 first = first_vector(), step = stride();
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
    if (state.fault) return refuse(call, state, out);
    if (first < vectors) push(state.epoch, first);
    const Ticket ticket = arrive(call);
    advance(call, ticket, state);
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
