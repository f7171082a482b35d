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
    i64 items;           // elements of the tensor, or of one rank's part
    char* base[kMost];   // every rank's memory, as this rank sees it
    u64* error;          // in host memory: 0, or the first fault
    i64 half;            // bytes of a half; the first begins after the control words
    int rank;
    u32 tag;             // number of the stream, from 1 on, and of the launch (kLaunchBits)
    u32 collective;      // index of the name in error texts
    int option;          // divide the sum by the ranks; or send each peer its own part
    int signals;         // whether a gate may wait for this call on another rank
};

constexpr i64 kControl = 4096;

struct Control {
    u32 epoch;      // number of the next call; one load reads it and the next two words
    u32 launched;   // blocks of all earlier calls
    u64 fault;      // 0, or why no call does anything any more
    u64 arrivals;   // of the present call: its number (low bits), its blocks, the sum of their tags
    u32 finished;   // blocks of all calls that have done their work
    u32 tag;        // of the last call that has started
    u64 limit_ns;   // how long to wait for a peer; a replayed graph reads it too
    u32 started[kMost];  // [r]: 1 + the number of the last call that rank r has started and signalled
};

struct State {
    u32 epoch, launched;
    u64 fault;
    u32 finished;  // for the first thread of a block
};

__device__ inline Control* control(const Call& call, int rank) {
    return reinterpret_cast<Control*>(call.base[rank]);
}

// -- the order of kernels --------------------------------------------------------------------------

// Comes last: a kernel that starts now finds the next epoch and all that this block has written.
// Signalled earlier, a foreign kernel that does not wait could let our next call overtake this one.
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
    for (int rank = 0; rank < kRanks; ++rank) poke(&control(call, rank)->fault, what);
}

// Every rank gets the first fault; a rank that comes later finds it and leaves at once.
__device__ __noinline__ void raise(const Call& call, u64 what) { tell_all(call, what); }

// Asked now and then by a thread that waits for `peer`; `begin` is 0 at first. A second hop has
// twice the time: its owner may itself be waiting for the rank that is missing, and knows which.
__device__ __noinline__ bool given_up(const Call& call, u64& begin, int peer, u32 epoch,
                                      int hop = 1) {
    const Control* mine = control(call, call.rank);
    const u64 known = peek(&mine->fault);
    if (known) {
        report(call, known);
        return true;
    }
    if (!begin) begin = now();
    if (now() - begin < hop * peek(&mine->limit_ns)) return false;
    raise(call, fault(kLate, call, peer, epoch));
    return true;
}

// -- one call --------------------------------------------------------------------------------------

__device__ inline State enter(const Call& call) {
    const uint4 v = peek(reinterpret_cast<const uint4*>(control(call, call.rank)));
    State state = {v.x, v.y, u64(v.w) << 32 | v.z, v.y};
    if (threadIdx.x == 0) {
        const u32* finished = &control(call, call.rank)->finished;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                     : "=r"(state.finished) : "l"(finished) : "memory");
    }
    return state;
}

// Parity goes on alternating where the number wraps: 0 follows 2^32 - 1.
__device__ inline char* half(const Call& call, int rank, u32 epoch) {
    return call.base[rank] + kControl + (epoch & 1) * call.half;
}

__device__ inline uint4* slot(const Call& call, int at, u32 epoch, i64 index) {
    return reinterpret_cast<uint4*>(half(call, at, epoch)) + index;
}

constexpr u32 kAll = (1u << kRanks) - 1;
__device__ inline u32 others(const Call& call) { return kAll & ~(1u << call.rank); }

// Waits until the vectors at `from[r]`, of all ranks r in `wanted`, have come, and puts the zeros
// back. All loads are under way at a time: what counts is the last arrival, not their number.
template <class Complete>
__device__ inline bool take(const Call& call, u32 epoch, u32 wanted, uint4* const (&from)[kRanks],
                            uint4 (&to)[kRanks], Complete complete, int hop = 1) {
    u64 begin = 0;
    for (u32 polls = 1;; ++polls) {
        int missing = -1;
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
            if (wanted >> r & 1) to[r] = peek(from[r]);
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
            if ((wanted >> r & 1) && !complete(to[r])) missing = r;
        if (missing < 0) break;
        if (polls % kPolls == 0 && given_up(call, begin, missing, epoch, hop)) return false;
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
        if (wanted >> r & 1) *from[r] = make_uint4(0, 0, 0, 0);
    return true;
}

// Says that this rank has started a call; see gate.cu.
__device__ inline void signal(const Call& call, u32 epoch) {
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
        u32* place = &control(call, (call.rank + d) % kRanks)->started[call.rank];
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(place), "r"(epoch + 1) : "memory");
    }
}

// Calls of one ring follow each other: when a block enters, all blocks of earlier calls have finished,
// and when it arrives, those before it have arrived in the same call, with the same tag. Blocks of
// this call may have finished too; the first block to look can't see one of them, so a single block
// of an earlier call is enough to be found.
// A word holds number, count and sum: tags have 27 bits, grids at most 2^13 - 1 blocks.
constexpr int kSumBits = 40, kEpochShift = 53, kLaunchBits = 17;  // as in push_channel.py
constexpr u64 kSumMask = (1ull << kSumBits) - 1, kCountMask = (1u << (kEpochShift - kSumBits)) - 1;

__device__ inline u64 no_arrivals(u32 epoch) { return u64(epoch) << kEpochShift; }

struct Ticket {
    u64 arrivals;

    __device__ u32 blocks() const { return u32(arrivals >> kSumBits & kCountMask); }
    __device__ u64 tags() const { return arrivals & kSumMask; }
    __device__ bool alone(const Call& call, const State& state) const {
        return arrivals >> kEpochShift == no_arrivals(state.epoch) >> kEpochShift &&
               tags() == u64(blocks()) * call.tag && i32(state.finished - state.launched) >= 0;
    }
};

// All threads of a block call it after their first pushes, while the data is under way. All of them
// have read the epoch by then.
__device__ inline Ticket arrive(const Call& call) {
    Ticket ticket = {0};
    __syncthreads();
    if (threadIdx.x == 0) {
        u64* arrivals = &control(call, call.rank)->arrivals;
        ticket.arrivals = atomicAdd(arrivals, 1ull << kSumBits | call.tag);
    }
    return ticket;
}

// The block that arrives last moves the epoch on.
__device__ inline void advance(const Call& call, const Ticket& ticket, const State& state) {
    if (threadIdx.x != 0) return;
    Control* mine = control(call, call.rank);
    if (!ticket.alone(call, state)) {
        const u32 other = ticket.blocks() == 1 ? u32(ticket.tags()) : mine->tag;
        const u32 streams = other >> kLaunchBits << 16 | call.tag >> kLaunchBits;
        raise(call, fault(kTwoAtOnce, call, call.rank, streams));
    }
    if (ticket.blocks() == 0) {
        mine->tag = call.tag;
        if (call.signals) signal(call, state.epoch);
    }
    if (ticket.blocks() != gridDim.x - 1) return;
    mine->arrivals = no_arrivals(state.epoch + 1);
    mine->launched = state.launched + gridDim.x;
    mine->epoch = state.epoch + 1;
}

__device__ inline void leave(const Call& call) {
    __syncthreads();  // the first thread of a block that releases does so for all of it
    if (threadIdx.x == 0) {
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;"
                     ::"l"(&control(call, call.rank)->finished) : "memory");
    }
    release_dependents();
}
