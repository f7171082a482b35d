// The channel as a kernel sees it: one piece of memory per rank, mapped on all of them.
//
// After the control words there are two halves that take turns: call e uses half e & 1. Every word
// of a half is zero while nothing is in it. A rank pushes non-zero words into its peers' halves. A
// rank that reads a non-zero word in its own half has the whole word. It then writes zero back.
// So nothing else says that data is ready, and no barrier, fence or registration is needed.
//
// Two halves are enough because every call makes every rank wait for something from every other
// rank: one that has finished call e + 1 knows that all have finished call e, and with the end of
// their kernels all zeros of call e are in place. The layout of a half is therefore each call's own.

#pragma once

#include "memory.cuh"

constexpr int kRanks = RANKS;  // members of the ring, given at compilation
constexpr int kMost = 8;
constexpr int kThreads = 512;  // the most in a block: what a vector of each rank takes of registers
constexpr u32 kPolls = 1024;  // between two looks at the clock
constexpr u32 kGatePolls = 64, kGateSleepNs = 100;  // the same of a gate, which leaves room

enum Reason : u32 { kLate = 1, kTwoAtOnce = 2 };

struct Call {  // as in push_channel.py
    const char* x;
    char* out;
    i64 items;            // elements of the tensor, or of one rank's part
    char* memory[kMost];  // as this rank sees it: [d] is that of rank (rank + d) % kRanks
    u64* error;           // in host memory: 0, or the first fault
    i64 half;             // bytes of a half; the first begins after the control words
    int rank;
    u32 tag;              // number of the stream, from 1 on, and of the launch (kLaunchBits)
    u32 collective;       // index of the name in error texts
    int option;           // divide the sum by the ranks; or send each peer its own part
    int signals;          // whether a gate may wait for this call on another rank
    int early;            // whether the next kernel may start, and wait, while this one runs
};

constexpr i64 kControl = 4096;

struct Control {
    u64 done;      // kCallUnits for each call; one load reads it and the next word
    u64 fault;     // 0, or why no call does anything any more
    u64 last;      // who has signed last: tag of the call, and its number
    u64 limit_ns;  // how long to wait for a peer; a replayed graph reads it too
    u32 started[kMost];  // [r]: 1 + the number of the last call that rank r has started and signalled
};

// What a thread knows of its call.
struct State {
    u32 epoch;   // the number of the call
    u64 fault;
    u64 before;  // in the first thread of a block: the signature that it has replaced
};

// d: how many ranks after this one.
__device__ inline Control* control(const Call& call, int d) {
    return reinterpret_cast<Control*>(call.memory[d]);
}

// Blocks count themselves in `done` when they end, so that a call makes kCallUnits whatever its grid.
// Its number is then what all calls before it have made. No two calls of a ring may run at a time:
// they would read one number. So each block signs with number and tag, and finds who did before it.
constexpr u32 kUnitBits = 13;  // grids have at most 2^13 - 1 blocks
constexpr u64 kCallUnits = 1u << kUnitBits;
constexpr int kLaunchBits = 17;  // of a tag; as in push_channel.py

// -- the order of kernels --------------------------------------------------------------------------

// The next kernel may start. It then waits for the end of this one, and of all before it.
__device__ inline void release_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// -- faults ----------------------------------------------------------------------------------------

// Bits of a fault: reason 61..63, collective 53..60, peer 45..52, what 0..31 (epoch, or both tags).
__device__ inline u64 fault(u32 reason, const Call& call, int peer, u32 what) {
    return u64(reason) << 61 | u64(call.collective) << 53 | u64(peer) << 45 | what;
}

// One thread of those that run together does it: a million writes to the host would take a second.
__device__ inline void report(const Call& call, u64 what) {
    const u32 together = __activemask();
    if (int(threadIdx.x % 32) == __ffs(together) - 1) atomicCAS_system(call.error, 0ull, what);
}

__device__ inline void tell_all(const Call& call, u64 what) {
    report(call, what);
#pragma unroll
    for (int d = 0; d < kRanks; ++d) poke(&control(call, d)->fault, what);
}

// Every rank gets the first fault; a rank that comes later finds it and leaves at once.
__device__ __noinline__ void raise(const Call& call, u64 what) { tell_all(call, what); }

// Raises if another call has the same number. Tag 0 is nobody's: memory after a reset.
__device__ inline void verify(const Call& call, const State& state) {
    const u32 other = state.before >> 32;
    if (other == 0 || other == call.tag || u32(state.before) != state.epoch) return;
    const u32 streams = other >> kLaunchBits << 16 | call.tag >> kLaunchBits;
    raise(call, fault(kTwoAtOnce, call, call.rank, streams));
}

// Asked now and then by a thread that waits for `peer`; `begin` is 0 at first. A second hop has
// twice the time: its owner may itself be waiting for the rank that is missing, and knows which.
__device__ __noinline__ bool given_up(const Call& call, const State state, u64& begin, int peer,
                                      int hop = 1) {
    const Control* mine = control(call, 0);
    verify(call, state);
    const u64 known = peek(&mine->fault);
    if (known) {
        report(call, known);
        return true;
    }
    if (!begin) begin = now();
    if (now() - begin < hop * peek(&mine->limit_ns)) return false;
    raise(call, fault(kLate, call, peer, state.epoch));
    return true;
}

// -- one call --------------------------------------------------------------------------------------

// Waits for the kernels before this one on the stream.
__device__ inline void begin(const Call& call) {
    await_predecessor();
    if (call.early) release_dependents();
}

__device__ inline State enter(const Call& call) {
    const uint4 v = peek(reinterpret_cast<const uint4*>(control(call, 0)));
    const u64 done = u64(v.y) << 32 | v.x;
    return {u32(done >> kUnitBits), u64(v.w) << 32 | v.z, 0};
}

// Says that this rank has started a call; see gate.cu.
__device__ inline void signal(const Call& call, u32 epoch) {
#pragma unroll
    for (int d = 1; d < kRanks; ++d) poke(&control(call, d)->started[call.rank], epoch + 1);
}

// All threads of a block call it after their first pushes. Nobody waits for the answer here.
__device__ inline void sign(const Call& call, State& state) {
    if (threadIdx.x) return;
    state.before = atomicExch(&control(call, 0)->last, u64(call.tag) << 32 | state.epoch);
    if (call.signals && blockIdx.x == 0) signal(call, state.epoch);
}

__device__ inline void leave(const Call& call, const State& state) {
    verify(call, state);
    __syncthreads();
    if (threadIdx.x == 0) {
        const u64 units = blockIdx.x ? 1 : kCallUnits - gridDim.x + 1;
        asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;"
                     ::"l"(&control(call, 0)->done), "l"(units) : "memory");
    }
    if (!call.early) release_dependents();
}

// -- what travels ----------------------------------------------------------------------------------

// Parity goes on alternating where the number wraps: 0 follows 2^32 - 1.
__device__ inline char* half(const Call& call, int d, u32 epoch) {
    return call.memory[d] + kControl + (epoch & 1) * call.half;
}

__device__ inline uint4* slot(const Call& call, int d, u32 epoch, u32 index) {
    return reinterpret_cast<uint4*>(half(call, d, epoch)) + index;
}

constexpr u32 kAll = (1u << kRanks) - 1;
__device__ inline u32 others(const Call& call) { return kAll & ~(1u << call.rank); }

// Waits until the vectors at `from[r]`, of all ranks r in `wanted`, have come, and puts the zeros
// back. All loads are under way at a time: what counts is the last arrival, not their number.
// complete(v) is 0 while words of v are missing.
template <class Complete>
__device__ inline bool take(const Call& call, const State& state, u32 wanted,
                            uint4* const (&from)[kRanks], uint4 (&to)[kRanks], Complete complete,
                            int hop = 1) {
    u64 begin = 0;
    wanted = kept(wanted);
    for (u32 polls = 1;; ++polls) {
        u32 least = ~0u;
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
            if (wanted >> r & 1) to[r] = peek(from[r]);
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
            if (wanted >> r & 1) least = min(least, complete(to[r]));
        if (least) break;
        if (usually(polls % kPolls)) continue;
        int missing = -1;
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
            if ((wanted >> r & 1) && !complete(to[r])) missing = r;
        if (given_up(call, state, begin, missing, hop)) return false;
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
        if (wanted >> r & 1) put_zeros(from[r]);
    return true;
}
