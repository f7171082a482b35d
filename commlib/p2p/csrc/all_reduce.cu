// all_reduce and reduce_scatter, each in one kernel.

#include "hops.cuh"

template <class T, int Op>
struct OneShotKernel {
    template <bool kWhole>
    struct Of {
        __device__ static void run(const Call& call) {
            OneShot<T, kWhole> work(call);
            const Turns turns = turns_of_one_hop();
            const u32 first = turns.first, vectors = work.vectors;
            begin(call);
            uint4 own = first < vectors ? work.x.get(first) : not_numbers();
            work.enter();
            if (rarely(work.state.fault)) return work.refuse(turns);
            if (first < vectors) work.push(first, own);
            sign(call, work.state);
#pragma unroll 1
            for (u32 i = first; i < vectors; i += turns.step) {
                const u32 next = i + turns.step;  // on its way while this one is waited for
                uint4 ahead;
                if (next < vectors) work.push(next, ahead = work.x.get(next));
                work.template finish<Op>(i, own);
                own = ahead;
            }
            leave(call, work.state);
        }
    };
};

template <class T, int Op>
struct TwoShotKernel {
    template <bool kWhole>
    struct Of {
        __device__ static void run(const Call& call) {
            TwoShot<T, kWhole> work(call);
            const Turns turns = work.turns();
            const u32 first = turns.first, step = turns.step;
            begin(call);
            uint4 own = work.own(first);
            const uint4 given = work.given(first);
            work.enter();
            if (rarely(work.state.fault)) return work.refuse();
            work.scatter(first, given);
            sign(call, work.state);
            if (step >= work.slice) {
                work.template reduce_and_spread<Op>(first, own);
                work.gather(first);
            } else {
                // The three steps of one vector are a turn apart, so that all of them go on at a time.
#pragma unroll 1
                for (u32 i = first; i < work.slice + step; i += step) {
                    work.scatter(i + step, work.given(i + step));
                    const uint4 ahead = work.own(i + step);
                    work.template reduce_and_spread<Op>(i, own);
                    own = ahead;
                    if (i >= step) work.gather(i - step);
                }
            }
            leave(call, work.state);
        }
    };
};

// -- one hop, one slice -------------------------------------------------------------------------------

// reduce_scatter: as in the first hop above, but slices are parts of equal size, given by items.
template <class T, int Op>
struct ScatterKernel {
    template <bool kWhole>
    struct Of {
        __device__ static void run(const Call& call) {
            const View<T, kWhole> out(call.out, call.items);
            const Turns turns = turns_of_one_hop();
            const u32 first = turns.first, step = turns.step, vectors = out.vectors();
            const auto part = [&](int rank) {
                const i64 bytes = call.items * sizeof(typename T::Bits);
                return View<T, kWhole>(call.x + rank * bytes, call.items);
            };
            const auto push = [&](u32 epoch, u32 i) {
#pragma unroll
                for (int d = 1; d < kRanks; ++d) {
                    const uint4 v = part((call.rank + d) % kRanks).get(i);
                    poke(slot(call, d, epoch, call.rank * vectors + i), masked(v));
                }
            };
            begin(call);
            State state = enter(call);
            if (rarely(state.fault)) {
                report(call, state.fault);
                for (u32 i = first; i < vectors; i += step) out.put(i, not_numbers());
                return;
            }
            if (first < vectors) push(state.epoch, first);
            sign(call, state);
            uint4* here = slot(call, 0, state.epoch, 0);
#pragma unroll 1
            for (u32 i = first; i < vectors; i += step) {
                if (i + step < vectors) push(state.epoch, i + step);
                uint4* from[kRanks];
#pragma unroll
                for (int r = 0; r < kRanks; ++r) from[r] = here + (r * vectors + i);
                uint4 result;
                const uint4 own = part(call.rank).get(i);
                out.put(i, reduced<T, Op>(call, state, from, own, result) ? result : not_numbers());
            }
            leave(call, state);
        }
    };
};

#define ENTRY(algorithm, Kernel, name, T, Op)                                \
    extern "C" __global__ void __launch_bounds__(kThreads)                    \
        algorithm##_##name(const __grid_constant__ Call call) {                \
        run<T, Kernel<T, Op>::template Of>(call);                               \
    }
#define ENTRIES(algorithm, Kernel, name, T)          \
    ENTRY(algorithm, Kernel, name##_sum, T, kSum)     \
    ENTRY(algorithm, Kernel, name##_max, T, kMax)      \
    ENTRY(algorithm, Kernel, name##_min, T, kMin)
#define DTYPES(algorithm, Kernel)                      \
    ENTRIES(algorithm, Kernel, bfloat16, Bfloat16)      \
    ENTRIES(algorithm, Kernel, float16, Float16)         \
    ENTRIES(algorithm, Kernel, float32, Float32)

DTYPES(one_shot, OneShotKernel)
DTYPES(two_shot, TwoShotKernel)
DTYPES(scatter, ScatterKernel)
