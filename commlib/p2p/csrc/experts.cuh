// Tokens to the experts of every rank and back, with counts that never leave the GPUs.
//
// One launch per call. Some of its blocks push, the others take, so no wait is for the same block.
// The routing is known to the kernel alone: a replayed graph may have another one every time. Nothing
// in the protocol depends on how many blocks there are, or run at the same time, beyond the first
// `size + 2` of a launch: other kernels may hold most of the GPU. So blocks claim what they do, item
// after item, in the order of the waits below, and the first blocks of a launch do all kinds of work
// (see `role`). What a block waits for is then the work of a block that runs, or has ended.
//
// Calls. Every rank starts a call by a word to all others. It has ended its calls before then, so what
// they had in its memory is no longer needed. Slots, flags and counts have two halves, which calls use in
// turn: no call pushes a row or a count to a rank before that rank has begun the call before. So a rank
// may push while a later one still ends the call before.
//
// Slots. A rank has a ring of slots for every other rank, in the receiver's memory. A slot may be used
// several times in a call:
//   - the sender fills it, then raises its flag, a tag: number of the call, and of the row in it;
//   - the receiver copies the slot and, if a later row may need it, writes the same tag to `freed`, in
//     the sender's memory. The sender waits for the tag of the row before. A sender of sums keeps the
//     last tag of each slot in `used`: which tokens have a sum of it follows from the routing alone.
// Tags repeat after 2^32 calls: unless a flag is left alone for just as many, none has to be put back.
// Calls may have any number of rows. Slots and rows begin at a line of 128 bytes, and where the width
// allows a warp writes whole ones: other GPUs get parts of a line more slowly.
//
// Why no circle of ranks waits:
//   - On the way to the experts, row j of a sender for a rank (the j-th token with an expert there)
//     waits for row j - slots. Pushers claim tokens in order, and each taker claims the rows of one
//     sender alone, in order. So a token waits for earlier tokens of the same sender only. (A taker
//     with several senders would be wrong: their orders have nothing to do with each other.)
//   - On the way back, token t has slot t % slots, so a pass of `slots` tokens fits at a time. Pushers
//     claim the shares of a pass after those of earlier passes, and push nothing of it before all of
//     these are done. Takers claim tokens in order. So a pass waits for earlier passes only.
//
// Counts. Each call to the experts starts with the choices of this rank counted by expert and by
// rank, to all ranks: words of a count and the number of the call, so no fence and no flag.
//
// Order. The sum of a token is fixed: on each rank in order of choice, then in order of ranks, every
// product and every sum rounded. So the other forms of the operators give the same bits.
//
// Faults. Every wait has the ring's deadline, which is in the memory of the ring, so that replays
// read it too. The peer that a thread waits for may itself wait for the rank that is missing. So the
// rank that has begun the fewest calls is reported. After half the deadline a rank notifies all
// others of the peers that its threads wait for. A report follows these notes to a rank that waits for
// nobody. The block that ends last in a call with a fault overwrites all results.

#pragma once
#include "numbers.cuh"

constexpr int kRanks = 16;      // as in experts/layout.py
constexpr int kExperts = 1024;  // of all ranks
constexpr int kChoices = 32;    // of a token: one per lane
constexpr int kThreads = 256;
constexpr int kSlots = 4096;    // per pair of ranks
constexpr int kCounters = kExperts + kRanks;
constexpr int kVectors = 4;     // that a thread copies at a time
constexpr int kInverse = 20;    // bits of Call.inverse after the point
constexpr int kWorks = 1 + kRanks;  // that blocks claim
constexpr u32 kPolls = 1024;    // between two looks at the clock
constexpr u32 kWarp = 0xffffffffu;

enum Kind : int { kToExperts, kBack };

// In host memory: the first expert of a call beyond its capacity. The host puts `state` back to 0.
struct Overflow {  // as in experts/layout.py
    u64 state;     // 0: free, 1: it is written, 2: complete
    int expert, owner, capacity, unused;
    u32 by_rank[kRanks];
};

struct Call {  // as in experts/layout.py
    const char* x;  // the rows of this rank that are given
    char* out;
    float* scales;
    const void* ids;
    const float* weights;         // of the choices, null for ones
    const unsigned char* active;  // null if all ranks take part
    int* expert_ids;
    int* positions;
    int4* sources;
    float* row_weights;
    int* counts;
    int* demand;
    char* base[kRanks];  // every rank's memory, as this rank sees it
    u64* error;          // in host memory: 0, or the first fault
    Overflow* overflow;  // null without a report
    i64 first_count, first_flag, first_freed, first_used, first_slot;  // offsets
    i64 share;           // bytes of the slots of one pair, in one half
    i64 slot;            // bytes of a slot
    int slots;           // of a pair, in one half
    int rank, size, tokens, choices, experts, local, capacity;
    int row;             // bytes of a row that is given
    int wide;            // whether ids have 64 bits
    int weighted;
    int pushers;         // blocks; the others take
    int inverse;         // 1 / local, rounded up: exact for all experts
};

// Control words at the start of every rank's memory.
struct Control {
    u64 begun[kRanks];          // [r]: the last call that rank r has begun
    u64 calls;                  // the last call that this rank has ended
    u64 limit_ns;               // how long to wait for a peer
    u32 claims[kWorks];         // items of the present call, by work
    u32 pushed;                 // shares of passes, in the present call
    u32 last_pass;              // of the present call, as far as `pushed` says
    u32 arrived;                // blocks that have ended the present call
    u32 aborted;                // 0, or 1 + the peer that was given up, here or elsewhere
    u64 waits[kRanks][kRanks];  // [r][p]: the last call in which r has waited for p for long
};

struct State {
    u64 call;  // number of this call
    u32 live;  // ranks that take part, as bits
    Kind kind;

    __device__ u32 number() const { return static_cast<u32>(call); }  // in words with something else
};

__device__ inline Control* control(const Call& call, int rank) {
    return reinterpret_cast<Control*>(call.base[rank]);
}

__device__ inline bool has(u32 ranks, int rank) { return ranks >> rank & 1; }

__device__ inline int owner(const Call& call, int expert) { return expert * call.inverse >> kInverse; }

// The number of the call after `calls`: none whose low half is 0, which memory holds before the first
// call. The halves go on taking turns.
__device__ inline u64 following(u64 calls) {
    return static_cast<u32>(calls + 1) ? calls + 1 : calls + 3;
}

__device__ inline u64 tag(const State& state, u32 index) {
    return state.call << 32 | (index + 1);
}

// -- work ------------------------------------------------------------------------------------------

struct Role {  // of a block
    bool takes;
    int number;  // among those that do the same
};

// Blocks start in order. The first `size + 2` push and take, so that they make progress, whichever start
// later. Of the others those that push start first where they are few: their work is soon done. Many
// take turns with those that take, which would all come late where a part of the GPU is not free.
__device__ inline Role role(const Call& call) {
    const int block = blockIdx.x, i = block - 1 - call.size;
    if (block == 0) return {false, 0};
    if (i < 0) return {true, block - 1};
    const int pushers = call.pushers - 1, all = gridDim.x - 1 - call.size;
    const bool few = 3 * pushers <= all;
    const auto takers = [&](int before) {
        return few ? max(0, before - pushers) : before * (all - pushers) / all;
    };
    const int found = takers(i);
    if (takers(i + 1) > found) return {true, call.size + found};
    return {false, 1 + i - found};
}

// What blocks claim items of: to push, or to take, on the way to the experts from each sender.
enum Work : int { kNothing = -1, kToPush, kToTake };

__device__ inline Work to_take(int from) { return static_cast<Work>(kToTake + from); }

// One thread claims the next item: an item of a block is later than those it has had.
__device__ inline int claim(const Call& call, Work work) {
    return atomicAdd(&control(call, call.rank)->claims[work], 1);
}

// The thread that claims, while others wait or copy.
__device__ inline bool claims() { return threadIdx.x == kThreads - 1; }

// -- places ----------------------------------------------------------------------------------------

// What call `of` has of rank `from` at a rank is the `place`-th of its kind there.
__device__ inline int place(const Call& call, const State& of, int from) {
    return (of.number() & 1) * call.size + from;
}

__device__ inline char* slot(const Call& call, const State& state, int at, int from, int index) {
    return call.base[at] + call.first_slot + place(call, state, from) * call.share + index * call.slot;
}

__device__ inline u64* word(const Call& call, i64 first, int at, int other, int index) {
    return reinterpret_cast<u64*>(call.base[at] + first) + other * kSlots + index;
}

__device__ inline u64* flag(const Call& call, const State& state, int at, int from, int index) {
    return word(call, call.first_flag, at, place(call, state, from), index);
}

__device__ inline u64* freed(const Call& call, int at, int by, int index) {
    return word(call, call.first_freed, at, by, index);
}

__device__ inline u64* used(const Call& call, int to, int index) {
    return word(call, call.first_used, call.rank, to, index);
}

// Counters of `from` at rank `at`: one per expert, then from kExperts on one per rank.
__device__ inline u64* count(const Call& call, const State& state, int at, int from, int index) {
    return reinterpret_cast<u64*>(call.base[at] + call.first_count) +
           place(call, state, from) * kCounters + index;
}

// -- waits -----------------------------------------------------------------------------------------

// The host keeps the first report: bit 63, kind 40.., peer 32.., call.
__device__ inline void report(const Call& call, const State& state, u32 peer) {
    const u64 what = 1ull << 63 | static_cast<u64>(state.kind) << 40 | static_cast<u64>(peer) << 32;
    atomicCAS_system(call.error, 0ull, what | static_cast<u32>(state.call));
}

// Notifies all ranks that this one has waited for a peer for long.
__device__ inline void note(const Call& call, const State& state, int peer) {
    if (peek(&control(call, call.rank)->waits[call.rank][peer]) == state.call) return;
    for (int rank = 0; rank < call.size; ++rank) {
        if (has(state.live, rank)) poke(&control(call, rank)->waits[call.rank][peer], state.call);
    }
}

// The ranks that a rank waits for in its last call, as bits, as far as this one knows.
__device__ inline u32 awaited(const Call& call, int rank) {
    const Control* mine = control(call, call.rank);
    u32 ranks = 0;
    for (int peer = 0; peer < call.size; ++peer) {
        if (peek(&mine->waits[rank][peer]) == peek(&mine->begun[rank])) ranks |= 1u << peer;
    }
    return ranks;
}

// Of a peer and the ranks that it waits for, directly or not: one that waits for nobody.
__device__ inline int furthest_back(const Call& call, const State& state, int peer) {
    const Control* mine = control(call, call.rank);
    int late = peer;
    for (int rank = 0; rank < call.size; ++rank) {
        if (has(state.live, rank) && peek(&mine->begun[rank]) < peek(&mine->begun[late])) late = rank;
    }
    u32 seen = 0;
    for (u32 next = 1u << late; next & ~seen;) {
        const int rank = __ffs(next & ~seen) - 1;
        const u32 ranks = awaited(call, rank);
        if (!ranks && rank != call.rank) return rank;
        seen |= 1u << rank;
        next |= ranks;
    }
    return late;
}

// Asked now and then by a thread that waits; `begin` is 0 at first. What this rank itself has still
// to do has no deadline: all other waits have one.
__device__ __noinline__ bool given_up(const Call& call, State state, u64& begin, int peer) {
    Control* mine = control(call, call.rank);
    const u32 known = peek(&mine->aborted);
    if (known) {
        report(call, state, known - 1);
        return true;
    }
    if (peer == call.rank) return false;
    if (!begin) begin = now();
    const u64 limit = peek(&mine->limit_ns), waited = now() - begin;
    if (waited >= limit / 2) note(call, state, peer);
    if (waited < limit) return false;
    const int late = furthest_back(call, state, peer);
    report(call, state, late);
    for (int rank = 0; rank < call.size; ++rank) {
        if (has(state.live, rank)) poke(&control(call, rank)->aborted, late + 1);
    }
    return true;
}

constexpr int kReady = -1;

// One thread waits until `missing()` is kReady and no rank; false when it is given up.
template <class Missing>
__device__ inline bool await(const Call& call, const State& state, Missing missing) {
    u64 begin = 0;
    for (u32 polls = 1;; ++polls) {
        const int peer = missing();
        if (peer == kReady) break;
        if (polls % kPolls == 0 && given_up(call, state, begin, peer)) return false;
    }
    return true;
}

// Waits until a rank has begun the call before (this one, where a number between is left out) and has
// freed a slot of the row with the tag `last`, 0 for none.
__device__ inline bool await_room(const Call& call, const State& state, int to, int index = 0,
                                  u64 last = 0) {
    const u64* begun = &control(call, call.rank)->begun[to];
    const u64* from = freed(call, call.rank, to, index);
    return await(call, state, [&] {
        return acquire(begun) + 1 >= state.call && (!last || acquire(from) == last) ? kReady : to;
    });
}

__device__ inline bool await_flag(const Call& call, const State& state, int from, int index,
                                  u64 expected) {
    const u64* raised = flag(call, state, call.rank, from, index);
    return await(call, state, [&] { return acquire(raised) == expected ? kReady : from; });
}

// The number of a thread in the second warp, if it is that of a rank, else -1. That warp tells peers
// about what a block has done: a fence takes as long as a row.
__device__ inline int after_first_warp() {
    const int lane = static_cast<int>(threadIdx.x) - 32;
    return lane >= 0 && lane < kRanks ? lane : -1;
}

// One thread raises the flag of a slot that its block has filled, after __syncthreads.
__device__ inline void raise(const Call& call, const State& state, int to, int index, u64 tag) {
    fence();
    poke(flag(call, state, to, call.rank, index), tag);
}

__device__ inline void release(const Call& call, int from, int index, u64 tag) {
    fence();
    poke(freed(call, from, call.rank, index), tag);
}

// -- begin and end of a call -----------------------------------------------------------------------

// False in all threads where the ring has a fault. One warp of a block reads the control words: all
// threads of a GPU would take turns. `item`: the first one of the block's work.
__device__ inline bool enter(const Call& call, Kind kind, Work work, State& state, int& item) {
    __shared__ State shared;
    __shared__ u32 aborted;
    __shared__ int claimed;
    await_predecessor();
    const int rank = threadIdx.x;
    if (claims() && work != kNothing) claimed = claim(call, work);
    if (rank < 32) {
        const Control* mine = control(call, call.rank);
        const u64 calls = peek(&mine->calls);
        const u32 fault = peek(&mine->aborted);
        const bool takes_part = rank < call.size && (!call.active || call.active[rank]);
        const u32 live = __ballot_sync(kWarp, takes_part);
        if (rank == 0) {
            shared = {following(calls), has(live, call.rank) ? live : 0, kind};
            aborted = fault;
        }
    }
    __syncthreads();
    state = shared;
    item = claimed;
    if (blockIdx.x == 1 && rank < kRanks && has(state.live, rank)) {
        fence();
        poke(&control(call, rank)->begun[call.rank], state.call);
    }
    return aborted == 0;
}

__device__ inline void fill(void* at, i64 bytes, u32 value) {
    const bool whole = (reinterpret_cast<u64>(at) | bytes) % 16 == 0;
    const uint4 v = make_uint4(value, value, value, value);
#pragma unroll 1
    for (i64 i = threadIdx.x; whole && i < bytes / 16; i += kThreads) static_cast<uint4*>(at)[i] = v;
#pragma unroll 1
    for (i64 i = threadIdx.x; !whole && i < bytes / 4; i += kThreads) static_cast<u32*>(at)[i] = value;
}

// Ends a call. `spoil` overwrites all results, in the last block of a call with a fault.
template <class Spoil>
__device__ inline void leave(const Call& call, const State& state, Spoil spoil) {
    __shared__ u32 last, aborted;
    Control* mine = control(call, call.rank);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&mine->arrived, 1) == gridDim.x - 1;
        __threadfence();
        aborted = peek(&mine->aborted);
        if (last && aborted) report(call, state, aborted - 1);
    }
    __syncthreads();
    if (!last) return;
    if (aborted) spoil();
    if (threadIdx.x < kWorks) mine->claims[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x) return;
    mine->pushed = mine->last_pass = mine->arrived = 0;
    __threadfence();
    poke(&mine->calls, state.call);
}
