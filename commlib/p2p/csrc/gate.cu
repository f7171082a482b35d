// Waits, with one warp, until every peer has started a call. It is launched before the kernels of a
// call that runs at the same time as compute: while a peer is late, only this warp is on the GPU.
// A large block of another kernel leaves few registers of a multiprocessor free, so the gate has few
// and calls nothing.

#include "channel.cuh"

// option: whether this rank has still to signal that it has started.
extern "C" __global__ void __maxnreg__(32) gate(const __grid_constant__ Call call) {
    await_predecessor();
    const State state = enter(call);
    const int peer = threadIdx.x;
    if (!state.fault && call.option && peer == 0) signal(call, state.epoch);
    if (!state.fault && peer < kRanks && peer != call.rank) {
        const Control* mine = control(call, 0);
        u64 begin = 0;
        for (u32 polls = 1;; ++polls) {
            if (i32(peek(&mine->started[peer]) - (state.epoch + 1)) >= 0) break;
            if (polls % kGatePolls == 0) {
                if (peek(&mine->fault)) break;  // the kernels that follow report it
                if (!begin) begin = now();
                if (now() - begin >= peek(&mine->limit_ns)) {
                    tell_all(call, fault(kLate, call, peer, state.epoch));
                    break;
                }
            }
            __nanosleep(kGateSleepNs);
        }
    }
    __syncwarp();
    release_dependents();
}
