// Rows from every rank to every rank, each straight to its place in the receiver's order.
//
// A rank pushes its rows, in chunks, into the receiver's half of this call (two halves take turns),
// and raises the chunk's flag there; the receiver copies a chunk to its output when the flag is up.
// Flags hold the number of the call, which lives in device memory: a replayed graph counts on.
// Before a rank pushes call e to a peer, the peer has begun call e - 1: it has emptied that half.
// A rank that nobody makes wait may be a call ahead of its receivers, so a half has its own flags.

#include "memory.cuh"

constexpr int kRanks = 16;
constexpr int kSegments = SEGMENTS;  // given at compilation: the call's block is as small as can be
constexpr int kVectors = 4;

struct Segment {  // as in _routes.py, in rows
    i64 start, target, place, rows;
    int peer, slot;
};

struct Call {
    const char* x;
    char* out;
    char* base[kRanks];  // every rank's memory, as this rank sees it
    u64* error;          // in host memory: 0, or what went wrong first
    i64 half;            // offset of the first half; bytes of each are `window`
    i64 window;          // bytes from other ranks that fit into one half
    i64 first;           // which of those bytes this call begins with, on every receiver
    i64 row;             // bytes of a row
    u64 limit_ns;
    int rank, size, chunk, sends, takes;
    int flags;           // offset of the first half's flags; those of each take `flag_bytes`
    int flag_bytes;
    Segment send[kSegments];
    Segment take[kSegments];
};

// Control words at the start of every rank's memory.
struct Control {
    u32 begun[64];   // [r]: the last call that rank r has begun
    u32 epoch;       // the last call that this rank has finished
    u32 arrived;     // blocks that have finished the present one
    u32 aborted;     // 0, or 1 + the peer that was given up, here or elsewhere
};

__device__ inline Control* control(const Call& call, int rank) {
    return reinterpret_cast<Control*>(call.base[rank]);
}

// The host keeps the first report; bit 63 tells one of peer 0 from none.
__device__ inline void report(const Call& call, u32 peer, u32 epoch) {
    atomicCAS_system(call.error, 0ull, (1ull << 63) | (static_cast<u64>(peer) << 32) | epoch);
}

// How far ahead of the call that is waited for a word may be: a peer that waits for nobody may have
// begun any number of calls more, but a flag is up for one call only.
constexpr u32 kBegun = 0x7FFFFFFF, kRaised = 0;

// One thread waits until *word has reached `epoch`; false when it is given up.
__device__ bool reached(const Call& call, const u32* word, u32 epoch, u32 ahead, int peer) {
    const u64 end = now() + call.limit_ns;
    Control* mine = control(call, call.rank);
    for (u32 polls = 0; peek(word) - epoch > ahead; ++polls) {
        if ((polls & 1023) != 1023) continue;
        const u32 known = peek(&mine->aborted);
        if (known) {
            report(call, known - 1, epoch);
            return false;
        }
        if (now() < end) continue;
        report(call, peer, epoch);
        for (int rank = 0; rank < call.size; ++rank) poke(&control(call, rank)->aborted, peer + 1);
        return false;
    }
    fence();
    return true;
}

// Loads pass the L1 cache by: what a peer has just written may be stale there. A few vectors are
// under way in every thread before the first is stored: with 8 a block has too few registers.
__device__ inline void copy(char* to, const char* from, i64 bytes) {
    const u64 bits = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes;
    if (bits % 16) {
        for (i64 i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = __ldcg(from + i);
        return;
    }
    const uint4* source = reinterpret_cast<const uint4*>(from);
    uint4* target = reinterpret_cast<uint4*>(to);
    const int count = bytes / 16, threads = blockDim.x;
    int i = threadIdx.x;
    for (; i + (kVectors - 1) * threads < count; i += kVectors * threads) {
        uint4 held[kVectors];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) held[k] = __ldcg(source + i + k * threads);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) target[i + k * threads] = held[k];
    }
    for (; i < count; i += threads) target[i] = __ldcg(source + i);
}

// The part of a segment that belongs to this call: the rows in its window, and own rows at first.
struct Part {
    i64 skip;    // bytes of the segment before it
    i64 place;   // first byte in the half
    i64 bytes;
    int chunks;
};

__device__ inline Part part(const Call& call, const Segment& segment) {
    const bool own = segment.peer == call.rank;
    const i64 begin = own ? 0 : segment.place * call.row, end = begin + segment.rows * call.row;
    const i64 low = max(begin, call.first), high = own ? end : min(end, call.first + call.window);
    const i64 bytes = own && call.first ? 0 : max(high - low, 0ll);
    return {low - begin, low - call.first, bytes,
            static_cast<int>((bytes + call.chunk - 1) / call.chunk)};
}

__device__ inline u32* flag(const Call& call, int rank, u32 epoch, const Segment& segment,
                            const Part& p, int c) {
    const int begin = call.flags + (epoch & 1) * call.flag_bytes;
    u32* flags = reinterpret_cast<u32*>(call.base[rank] + begin);
    return flags + p.place / call.chunk + segment.slot + c;
}

// Chunks of this call's part of the segments go round the workers; each takes those that are its.
__device__ inline int first_chunk(int worker, int workers, int& dealt, int chunks) {
    const int first = (worker + workers - dealt % workers) % workers;
    dealt += chunks;
    return first;
}

extern "C" __global__ void __launch_bounds__(512, 2) exchange_rows(const __grid_constant__ Call call) {
    __shared__ u32 epoch;
    __shared__ int go;
    Control* mine = control(call, call.rank);
    await_predecessor();
    if (threadIdx.x == 0) {
        epoch = following(peek(&mine->epoch));
        const u32 known = peek(&mine->aborted);
        if (known) report(call, known - 1, epoch);
        go = !known;
    }
    __syncthreads();
    bool alive = go;  // the same in all threads of a block, always
    if (blockIdx.x == 0 && threadIdx.x < call.size) {
        poke(&control(call, threadIdx.x)->begun[call.rank], epoch);
    }
    const i64 half = call.half + (epoch & 1) * call.window;
    // The first blocks push, the others empty this rank's half: NVLink and memory work at a time.
    const int pushers = gridDim.x * 3 / 5;
    const bool push = blockIdx.x < pushers;
    const int worker = push ? blockIdx.x : blockIdx.x - pushers;
    const int workers = push ? pushers : gridDim.x - pushers;
    u32 ready = 0;  // peers that are known to have begun the last call
    int dealt = 0;
    __syncthreads();
    for (int s = 0; alive && push && s < call.sends; ++s) {
        const Segment& segment = call.send[s];
        const bool own = segment.peer == call.rank;
        const Part p = part(call, segment);
        for (int c = first_chunk(worker, workers, dealt, p.chunks); c < p.chunks; c += workers) {
            const i64 offset = static_cast<i64>(c) * call.chunk;
            const i64 bytes = min(p.bytes - offset, static_cast<i64>(call.chunk));
            const char* from = call.x + segment.start * call.row + p.skip + offset;
            if (own) {
                copy(call.out + segment.target * call.row + p.skip + offset, from, bytes);
                continue;
            }
            if (!(ready >> segment.peer & 1)) {
                if (threadIdx.x == 0) {
                    const u32* begun = &mine->begun[segment.peer];
                    go = reached(call, begun, epoch - 1, kBegun, segment.peer);
                }
                __syncthreads();
                alive = go;
                __syncthreads();
                if (!alive) break;
                ready |= 1u << segment.peer;
            }
            copy(call.base[segment.peer] + half + p.place + offset, from, bytes);
            __syncthreads();
            if (threadIdx.x == 0) {
                fence();
                poke(flag(call, segment.peer, epoch, segment, p, c), epoch);
            }
        }
    }
    for (int t = 0; alive && !push && t < call.takes; ++t) {
        const Segment& segment = call.take[t];
        if (segment.peer == call.rank) continue;
        const Part p = part(call, segment);
        for (int c = first_chunk(worker, workers, dealt, p.chunks); c < p.chunks; c += workers) {
            if (threadIdx.x == 0) {
                const u32* raised = flag(call, call.rank, epoch, segment, p, c);
                go = reached(call, raised, epoch, kRaised, segment.peer);
            }
            __syncthreads();
            alive = go;
            __syncthreads();
            if (!alive) break;
            const i64 offset = static_cast<i64>(c) * call.chunk;
            const i64 bytes = min(p.bytes - offset, static_cast<i64>(call.chunk));
            const char* from = call.base[call.rank] + half + p.place + offset;
            copy(call.out + segment.target * call.row + p.skip + offset, from, bytes);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&mine->arrived, 1) == gridDim.x - 1) {
            mine->arrived = 0;
            __threadfence();
            poke(&mine->epoch, epoch);
        }
    }
}
