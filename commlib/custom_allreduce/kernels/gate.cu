// Waits, with one warp, until every peer has started a call. It is launched before the kernels of a
// call that runs at the same time as compute: while a peer is late, only this warp is on the GPU.

#include "channel.cuh"

// option: whether this rank has still to say that it has started, itself.
extern "C" __global__ void __launch_bounds__(32) gate(const __grid_constant__ Call call) {
    await_predecessor();
    const State state = enter(call);
    const int peer = threadIdx.x;
    if (!state.fault && call.option && peer == 0) signal(call, state.epoch);
    if (!state.fault && peer < kRanks && peer != call.rank) {
        const u32* started = &control(call, call.rank)->started[peer];
        u64 begin = 0;
        for (u32 polls = 1;; ++polls) {
            u32 value;
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(started) : "memory");
            if (i32(value - (state.epoch + 1)) >= 0) break;
            if (polls % kGatePolls == 0 && given_up(call, begin, peer, state.epoch)) break;
            __nanosleep(kGateSleepNs);
        }
    }
    __syncwarp();
    release_dependents();
}
