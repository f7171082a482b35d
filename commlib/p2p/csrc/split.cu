// all_reduce in two kernels: work between them on the stream runs while the data is under way.
// The first reads the epoch and leaves it; the second moves it on.

#include "hops.cuh"

__device__ inline bool begin(const Call& call, u32& epoch) {
    await_predecessor();
    const State state = enter(call);
    epoch = state.epoch;
    if (state.fault) report(call, state.fault);
    if (!state.fault && call.signals && blockIdx.x == 0 && threadIdx.x == 0) signal(call, epoch);
    return !state.fault;
}

// The first thread of a block that releases does so for all of it, also for those that have not even
// read the epoch; later work may move that on.
__device__ inline void release_first_half() {
    __syncthreads();
    release_dependents();
}

template <class T>
__device__ inline void one_shot_begin(const Call& call) {
    OneShot<T> work(call);
    if (!begin(call, work.epoch)) return;
    for (i64 i = first_vector(); i < work.vectors; i += stride()) work.push(i, work.x.get(i));
    release_first_half();
}

template <class T>
__device__ inline void one_shot_end(const Call& call) {
    OneShot<T> work(call);
    await_predecessor();
    const State state = enter(call);
    work.epoch = state.epoch;
    if (state.fault) return refuse(call, state, work.out);
    const Ticket ticket = arrive(call);
    advance(call, ticket, state);
    for (i64 i = first_vector(); i < work.vectors; i += stride()) {
        work.template finish<kSum>(i, work.x.get(i));
    }
    leave(call);
}

template <class T>
__device__ inline void two_shot_begin(const Call& call) {
    TwoShot<T> work(call);
    if (!begin(call, work.epoch)) return;
    for (i64 i = first_vector(); i < work.slice; i += stride()) work.scatter(i);
    release_first_half();
}

template <class T>
__device__ inline void two_shot_end(const Call& call) {
    TwoShot<T> work(call);
    await_predecessor();
    const State state = enter(call);
    work.epoch = state.epoch;
    if (state.fault) return refuse(call, state, work);
    const Ticket ticket = arrive(call);
    advance(call, ticket, state);
    for (i64 i = first_vector(); i < work.slice + stride(); i += stride()) {
        if (i < work.slice) work.template reduce_and_spread<kSum>(i);
        if (i >= stride()) work.gather(i - stride());
    }
    leave(call);
}

#define ENTRY(step, name, T)                            \
    extern "C" __global__ void __launch_bounds__(kThreads) \
        step##_##name(const __grid_constant__ Call call) {  \
        step<T>(call);                                       \
    }
#define STEPS(name, T)              \
    ENTRY(one_shot_begin, name, T)   \
    ENTRY(one_shot_end, name, T)      \
    ENTRY(two_shot_begin, name, T)     \
    ENTRY(two_shot_end, name, T)

STEPS(bfloat16_sum, Bfloat16)
STEPS(float16_sum, Float16)
STEPS(float32_sum, Float32)
