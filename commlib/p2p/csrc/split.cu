// all_reduce in two kernels: work between them on the stream runs while the data is under way.
// The first reads the number of the call; the second counts as the call.

#include "hops.cuh"

// After the first half has entered. False after a fault, which is reported: nothing is to be done.
__device__ inline bool opened(const Call& call, const State& state) {
    if (state.fault) {
        report(call, state.fault);
        return false;
    }
    if (call.signals && blockIdx.x == 0 && threadIdx.x == 0) signal(call, state.epoch);
    return true;
}

template <class T>
struct OneShotBegin {
    template <bool kWhole>
    struct Of {
        __device__ static void run(const Call& call) {
            OneShot<T, kWhole> work(call);
            const Turns turns = turns_of_one_hop();
            begin(call);
            work.enter();
            if (!opened(call, work.state)) return;
            for (u32 i = turns.first; i < work.vectors; i += turns.step) work.push(i, work.x.get(i));
        }
    };
};

template <class T>
struct OneShotEnd {
    template <bool kWhole>
    struct Of {
        __device__ static void run(const Call& call) {
            OneShot<T, kWhole> work(call);
            const Turns turns = turns_of_one_hop();
            begin(call);
            work.enter();
            if (work.state.fault) return work.refuse(turns);
            sign(call, work.state);
            for (u32 i = turns.first; i < work.vectors; i += turns.step) {
                work.template finish<kSum>(i, work.x.get(i));
            }
            leave(call, work.state);
        }
    };
};

template <class T>
struct TwoShotBegin {
    template <bool kWhole>
    struct Of {
        __device__ static void run(const Call& call) {
            TwoShot<T, kWhole> work(call);
            const Turns turns = work.turns();
            begin(call);
            work.enter();
            if (!opened(call, work.state)) return;
            for (u32 i = turns.first; i < work.slice; i += turns.step) work.scatter(i, work.given(i));
        }
    };
};

template <class T>
struct TwoShotEnd {
    template <bool kWhole>
    struct Of {
        __device__ static void run(const Call& call) {
            TwoShot<T, kWhole> work(call);
            const Turns turns = work.turns();
            begin(call);
            work.enter();
            if (work.state.fault) return work.refuse();
            sign(call, work.state);
            for (u32 i = turns.first; i < work.slice + turns.step; i += turns.step) {
                work.template reduce_and_spread<kSum>(i, work.own(i));
                if (i >= turns.step) work.gather(i - turns.step);
            }
            leave(call, work.state);
        }
    };
};

#define ENTRY(step, Kernel, name, T)                     \
    extern "C" __global__ void __launch_bounds__(kThreads) \
        step##_##name(const __grid_constant__ Call call) {  \
        run<T, Kernel<T>::template Of>(call);                \
    }
#define STEPS(name, T)                             \
    ENTRY(one_shot_begin, OneShotBegin, name, T)    \
    ENTRY(one_shot_end, OneShotEnd, name, T)         \
    ENTRY(two_shot_begin, TwoShotBegin, name, T)      \
    ENTRY(two_shot_end, TwoShotEnd, name, T)

STEPS(bfloat16_sum, Bfloat16)
STEPS(float16_sum, Float16)
STEPS(float32_sum, Float32)
