// The rows of experts back to their tokens (see experts.cuh). A rank adds up its rows of a token and
// sends the sum, in float32, to the token's rank, which adds the sums of all ranks.
//
// Pushers find the rows of a token by the links that the dispatch has left in `sources`.

#include "experts.cuh"

constexpr int kHeld = 2;   // vectors that a thread adds up at a time
constexpr int kAhead = 2;  // rows that are on their way at the same time
constexpr int kLines = 4;  // of `sources` that a thread looks at at a time
constexpr int kFew = 4096;  // rows of which every block looks at all
constexpr int kGroup = 8;  // sums that a block prepares together
constexpr int kNoLast = 0x7fffffff;  // no pass is known to be the last one

struct Source {  // a line of `sources`
    int rank, token, choice, link;

    __device__ bool first() const { return rank >= 0 && (link & 1); }
    __device__ int next() const { return (link >> 1) - 1; }
};

__device__ inline Source source(const Call& call, i64 row) {
    const int4 line = call.sources[row];
    return {line.x, line.y, line.z, line.w};
}

// -- passes ----------------------------------------------------------------------------------------

// Tells the other pushers of this rank that a share of a pass is done. `last`: the last pass in it.
__device__ inline void finish_share(const Call& call, int last) {
    Control* mine = control(call, call.rank);
    __syncthreads();
    if (threadIdx.x) return;
    if (last) atomicMax(&mine->last_pass, static_cast<u32>(last));
    __threadfence();
    atomicAdd(&mine->pushed, 1);
}

// Waits for all shares of the passes before `pass`; `exists` says whether there is such a pass.
__device__ inline bool await_passes(const Call& call, const State& state, int pass, bool& exists) {
    __shared__ bool more;
    const Control* mine = control(call, call.rank);
    const u32 shares = static_cast<u32>(pass) * call.pushers;
    bool good = true;
    if (threadIdx.x == 0) {
        good = await(call, state, [&] { return peek(&mine->pushed) >= shares ? kReady : call.rank; });
        __threadfence();
        more = peek(&mine->last_pass) >= static_cast<u32>(pass);
    }
    good = __syncthreads_and(good);
    exists = more;
    return good;
}

// -- pushing ---------------------------------------------------------------------------------------

struct Sum {  // of the rows of a token
    int rank, token, index, count;
    int rows[kChoices];  // in order of choice
    float weights[kChoices];
};

// One thread follows the links from the first row of a token.
__device__ inline void find_rows(const Call& call, int row, Sum& sum) {
    Source at = source(call, row);
    sum.rank = at.rank;
    sum.token = at.token;
    sum.index = at.token % call.slots;
    int n = 0;
#pragma unroll 1
    for (; row >= 0; ++n, row = at.next()) {
        if (n) at = source(call, row);
        sum.rows[n] = row;
        sum.weights[n] = call.weighted ? call.row_weights[row] : 1.0f;
    }
    sum.count = n;
}

// One thread waits for the slot of a token's sum.
__device__ inline bool await_slot(const Call& call, const State& state, int row) {
    const Source at = source(call, row);
    const int index = at.token % call.slots;
    const u64 last = at.token < call.slots ? 0 : peek(used(call, at.rank, index));
    return await_room(call, state, at.rank, index, last >> 32 == state.number() ? last : 0);
}

// Adds up the rows of one token, from the first product on.
template <class T>
__device__ void push_sum(const Call& call, const Sum& of, char* to) {
    constexpr int n = kItems<T>;
    const int vectors = call.row / 16;
    const uint4* rows = reinterpret_cast<const uint4*>(call.x);
#pragma unroll 1
    for (int begin = threadIdx.x; begin < vectors; begin += kHeld * kThreads) {
        float sum[kHeld][n];
#pragma unroll 1
        for (int first = 0; first < of.count; first += kAhead) {
            uint4 held[kAhead][kHeld];
#pragma unroll
            for (int a = 0; a < kAhead; ++a) {
                const int row = of.rows[min(first + a, of.count - 1)];
#pragma unroll
                for (int h = 0; h < kHeld; ++h) {
                    const int i = min(begin + h * kThreads, vectors - 1);
                    held[a][h] = __ldcg(rows + static_cast<i64>(row) * vectors + i);
                }
            }
#pragma unroll
            for (int a = 0; a < kAhead; ++a) {
                if (first + a == of.count) break;
                const float weight = of.weights[first + a];
#pragma unroll
                for (int h = 0; h < kHeld; ++h) {
                    float y[n];
                    unpack<T>(held[a][h], y);
#pragma unroll
                    for (int k = 0; k < n; ++k) {
                        const float product = __fmul_rn(weight, y[k]);
                        sum[h][k] = first + a ? __fadd_rn(sum[h][k], product) : product;
                    }
                }
            }
        }
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            const int i = begin + h * kThreads;
            if (i >= vectors) continue;
            float4* target = reinterpret_cast<float4*>(to) + i;
#pragma unroll
            for (int k = 0; k < n; k += 4) {  // far apart, so that a warp writes whole lines
                target[k / 4 * vectors] = make_float4(sum[h][k], sum[h][k + 1], sum[h][k + 2], sum[h][k + 3]);
            }
        }
    }
}

// Pushes the sums of some tokens, given by their first rows.
template <class T>
__device__ bool push_sums(const Call& call, const State& state, const int* rows, int count) {
    __shared__ Sum sums[kGroup];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool good = true;
    if (warp == 0 && lane < count) find_rows(call, rows[lane], sums[lane]);
    if (warp == 1 && lane < count) good = await_slot(call, state, rows[lane]);
    if (!__syncthreads_and(good)) return false;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const int rank = sums[i].rank, token = sums[i].token, index = sums[i].index;
        push_sum<T>(call, sums[i], slot(call, state, rank, call.rank, index));
        __syncthreads();
        if (after_first_warp() == 0) {
            poke(used(call, rank, index), tag(state, token));
            raise(call, state, rank, index, tag(state, token));
        }
    }
    return true;
}

// Of few rows every block looks at all: tokens then go round the shares, as more shares have something.
__device__ inline bool has_few_rows(const Call& call) { return call.local * call.capacity <= kFew; }

// Pushes a share of a pass, of as many as there are pushers; `last` is 0, or the last pass that the rows
// that it has looked at belong to.
template <class T>
__device__ bool push_share(const Call& call, const State& state, int pass, int share, int& last) {
    __shared__ int list[kLines * kThreads], listed, latest;
    const int rows = call.local * call.capacity;
    const bool few = has_few_rows(call);
    const int start = few ? 0 : share, step = few ? 1 : call.pushers;
    if (threadIdx.x == 0) latest = 0;
#pragma unroll 1
    for (int first = start; first < rows; first += kLines * kThreads * step) {
        if (threadIdx.x == 0) listed = 0;
        __syncthreads();
        Source lines[kLines];  // on their way at the same time
#pragma unroll
        for (int k = 0; k < kLines; ++k) {
            const int row = first + (k * kThreads + threadIdx.x) * step;
            lines[k] = source(call, min(row, rows - 1));
        }
#pragma unroll
        for (int k = 0; k < kLines; ++k) {
            const int row = first + (k * kThreads + threadIdx.x) * step;
            const Source at = lines[k];
            if (row >= rows || !at.first() || !has(state.live, at.rank)) continue;
            const int when = at.token / call.slots;
            if (when > pass) atomicMax(&latest, when);
            const u32 turn = static_cast<u32>(at.token) * call.size + at.rank;
            if (few && turn % call.pushers != share) continue;
            if (when == pass) list[atomicAdd(&listed, 1)] = row;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < listed; i += kGroup) {
            if (!push_sums<T>(call, state, list + i, min(kGroup, listed - i))) return false;
        }
        __syncthreads();
    }
    __syncthreads();
    last = latest;
    return true;
}

template <class T>
__device__ bool push(const Call& call, const State& state, int item) {
    __shared__ int next;
    int most = kNoLast;  // the last pass of the call, where this block has looked at all rows
    for (;; item = next) {
        const int pass = item / call.pushers, share = item % call.pushers;
        int last;
        bool exists = pass <= most;
        if (exists && pass && !await_passes(call, state, pass, exists)) return false;
        if (!exists) return true;
        if (!push_share<T>(call, state, pass, share, last)) return false;
        if (has_few_rows(call)) most = max(pass, last);
        finish_share(call, last);
        if (claims()) next = claim(call, kToPush);
        __syncthreads();
    }
}

// -- taking ----------------------------------------------------------------------------------------

// Adds the sums of `ranks`, in their order, and rounds once.
template <class T>
__device__ void take_sum(const Call& call, const State& state, u32 ranks, int index, uint4* to) {
    constexpr int n = kItems<T>;
    const int vectors = call.row / 16;
    for (int begin = threadIdx.x; begin < vectors; begin += kHeld * kThreads) {
        float sum[kHeld][n] = {};
        bool added = false;
        for (u32 left = ranks; left; left &= left - 1, added = true) {
            const char* at = slot(call, state, call.rank, __ffs(left) - 1, index);
            const float4* from = reinterpret_cast<const float4*>(at);
#pragma unroll
            for (int h = 0; h < kHeld; ++h) {
                const int i = begin + h * kThreads;
                if (i >= vectors) continue;
#pragma unroll
                for (int k = 0; k < n; k += 4) {
                    const float4 v = __ldcg(from + k / 4 * vectors + i);
                    const float part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int m = 0; m < 4; ++m) {
                        sum[h][k + m] = added ? __fadd_rn(sum[h][k + m], part[m]) : part[m];
                    }
                }
            }
        }
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            if (begin + h * kThreads < vectors) to[begin + h * kThreads] = rounded<T>(sum[h]);
        }
    }
}

// One warp, a lane per choice and then per rank: waits for the sums of a token.
__device__ bool await_sums(const Call& call, const State& state, int token, u32& from) {
    const int lane = threadIdx.x;
    const i64 choice = static_cast<i64>(token) * call.choices + lane;
    u32 rank = 0;
    if (lane < call.choices && call.positions[choice] >= 0) {
        rank = 1u << owner(call, call.expert_ids[choice]);
    }
    const u32 ranks = __reduce_or_sync(kWarp, rank) & state.live;
    if (lane == 0) from = ranks;
    if (!(lane < kRanks && has(ranks, lane))) return true;
    return await_flag(call, state, lane, token % call.slots, tag(state, token));
}

template <class T>
__device__ bool take(const Call& call, const State& state, int token) {
    __shared__ u32 from;
    __shared__ int next;
    const int vectors = call.row / 16;
    for (; token < call.tokens; token = next) {
        const bool good = threadIdx.x >= 32 || await_sums(call, state, token, from);
        if (!__syncthreads_and(good)) return false;
        const int index = token % call.slots, later = claims() ? claim(call, kToTake) : 0;
        take_sum<T>(call, state, from, index,
                    reinterpret_cast<uint4*>(call.out) + static_cast<i64>(token) * vectors);
        const int peer = after_first_warp();  // the first warp goes on with the next token
        const bool releases = peer >= 0 && has(from, peer) && token + call.slots < call.tokens;
        if (claims()) next = later;
        __syncthreads();
        if (releases) release(call, peer, index, tag(state, token));
    }
    return true;
}

// -- the kernels -----------------------------------------------------------------------------------

template <class T>
__device__ void run(const Call& call) {
    const bool takes = role(call).takes;
    State state;
    int item;
    if (enter(call, kBack, takes ? kToTake : kToPush, state, item)) {
        if (takes) take<T>(call, state, item);
        else push<T>(call, state, item);
    }
    leave(call, state, [&] { fill(call.out, static_cast<i64>(call.tokens) * call.row, ~0u); });
}

#define KERNEL(name, type)                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads, 4)                         \
        name(const __grid_constant__ Call call) {                                     \
        run<type>(call);                                                              \
    }

KERNEL(combine_bfloat16, Bfloat16)
KERNEL(combine_float16, Float16)
KERNEL(combine_float32, Float32)
