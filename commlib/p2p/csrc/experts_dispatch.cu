// Tokens to their experts (see experts.cuh). A token's row travels once to each rank that has one of
// its experts, and the receiver copies it to all its places there.
//
// Pushers handle tokens in turn. A row's number among those for the same rank, and the number of a
// choice among this rank's for the same expert, follow from the choices of all earlier tokens: every
// pusher counts them as it goes on, so no block waits for another one to count.

#include "experts_counts.cuh"
#include "experts_moves.cuh"

// What a slot holds: token, then an entry per choice, then the row.
struct Header {
    int4 token;  // its number
    int4 choice[kChoices];  // index or place (-1: not for this rank), local expert, weight
};

struct Plan {  // of the token that a block pushes
    u32 ranks;
    int row[kRanks];     // number of the row among those for the rank
    int owner[kChoices];
    int4 choice[kChoices];
};

__device__ inline i64 header_bytes(const Call& call) { return (call.choices + 1) * 16; }

// -- pushing ---------------------------------------------------------------------------------------

// One warp, a lane per choice and then per rank: where the token goes, and whether there is room.
template <bool Known>
__device__ bool plan_token(const Call& call, const State& state, int token, Plan& plan) {
    const int lane = threadIdx.x;
    const i64 choice = static_cast<i64>(token) * call.choices + lane;
    const bool holds = lane < call.choices;
    const int e = holds ? expert<Known>(call, choice) : -1, owner = e < 0 ? -1 : e / call.local;
    const bool goes = e >= 0 && has(state.live, owner);
    const u32 same = __match_any_sync(kWarp, goes ? e : kExperts + lane);
    int index = -1;
    if (goes) index = Known ? call.positions[choice] : counters[e] + __popc(same & before(lane));
    const u32 ranks = __reduce_or_sync(kWarp, goes ? 1u << owner : 0);
    __syncwarp();
    if (goes && !(same & before(lane))) counters[e] += __popc(same);
    if (holds && !Known) {
        call.expert_ids[choice] = e;
        call.positions[choice] = index;  // a place once the counts of all ranks are here
    }
    const float weight = holds && !Known && call.weights ? call.weights[choice] : 1.0f;
    plan.owner[lane] = goes ? owner : -1;
    plan.choice[lane] = make_int4(index, goes ? e % call.local : 0, __float_as_int(weight), 0);
    if (lane == 0) plan.ranks = ranks;
    if (!(lane < kRanks && has(ranks, lane))) return true;
    const int row = plan.row[lane] = counters[kExperts + lane]++;
    const int index_in_ring = row % call.slots;
    const u64 last = row < call.slots ? peek(used(call, lane, index_in_ring))
                                      : tag(state, row - call.slots);
    return await_room(call, state, lane, index_in_ring, last);
}

template <bool Known, class Way>
__device__ bool push(const Call& call, const State& state) {
    __shared__ Plan plan;
    __shared__ char* slots[kRanks];
    clear();
    if (blockIdx.x == 0 && !announce<Known>(call, state)) return false;
    int counted = 0;
#pragma unroll 1
    for (int token = blockIdx.x; token < call.tokens; token += call.pushers) {
        add<Known>(call, state.live, counted, token);
        counted = token + 1;
        const bool good = threadIdx.x >= 32 || plan_token<Known>(call, state, token, plan);
        if (!__syncthreads_and(good)) return false;
        if (threadIdx.x < kRanks && has(plan.ranks, threadIdx.x)) {
            const int index = plan.row[threadIdx.x] % call.slots;
            slots[threadIdx.x] = slot(call, threadIdx.x, call.rank, index) + header_bytes(call);
        }
        __syncthreads();
        const u32 ranks = Way::kOwnSlots ? plan.ranks : plan.ranks & ~(1u << call.rank);
        if (ranks) Way::push(call, call.x + static_cast<i64>(token) * call.row, ranks, slots);
#pragma unroll 1
        for (u32 left = plan.ranks; left; left &= left - 1) {
            const int r = __ffs(left) - 1;
            Header* header = reinterpret_cast<Header*>(slots[r] - header_bytes(call));
            if (threadIdx.x == 0) header->token = make_int4(token, 0, 0, 0);
            if (threadIdx.x < call.choices) {
                int4 choice = plan.choice[threadIdx.x];
                if (plan.owner[threadIdx.x] != r) choice.x = -1;
                header->choice[threadIdx.x] = choice;
            }
        }
        const int peer = after_first_warp();  // the first warp goes on with the next token
        const bool raises = peer >= 0 && has(plan.ranks, peer);
        const int row = raises ? plan.row[peer] : 0;
        __syncthreads();
        if (raises) raise(call, peer, row % call.slots, tag(state, row));
    }
    return true;
}

// -- taking ----------------------------------------------------------------------------------------

// One warp, a lane per choice: waits for a row and finds its places.
template <bool Known>
__device__ bool find_places(const Call& call, const State& state, int from, int row, Taken& taken) {
    const int lane = threadIdx.x, index = row % call.slots;
    bool good = true;
    if (lane == 0) good = await_flag(call, state, from, index, tag(state, row));
    if (!__all_sync(kWarp, good)) return false;
    const Header* header = reinterpret_cast<Header*>(slot(call, call.rank, from, index));
    const int token = __ldcg(&header->token).x;
    int4 choice = make_int4(-1, 0, 0, 0);
    if (lane < call.choices) choice = __ldcg(&header->choice[lane]);
    int place = choice.x;
    if (!Known && place >= 0) {
        place += counters[choice.y];
        place = place < call.capacity ? choice.y * call.capacity + place : -1;
    }
    const u32 kept = __ballot_sync(kWarp, place >= 0), later = kept & ~before(lane) & ~(1u << lane);
    const int next = __shfl_sync(kWarp, place, later ? __ffs(later) - 1 : 0);
    if (place >= 0) {
        taken.places[__popc(kept & before(lane))] = place;
        if (!Known) {
            const int link = (later ? next + 1 : 0) << 1 | !(kept & before(lane));
            call.sources[place] = make_int4(from, token, lane, link);
            call.row_weights[place] = __int_as_float(choice.z);
        }
    }
    if (lane == 0) {
        taken.token = token;
        taken.count = __popc(kept);
    }
    return true;
}

template <bool Known, class Way>
__device__ bool take(const Call& call, const State& state) {
    __shared__ Taken taken;
    __shared__ u32 rows;
    const int taker = blockIdx.x - call.pushers, takers = gridDim.x - call.pushers;
    const int from = taker % call.size;  // takers of one sender: see experts.cuh
    const int workers = (takers - from + call.size - 1) / call.size;
    if (!has(state.live, from)) return true;
    if (!Known && !sums(call, state, before(from), call.rank * call.local, call.local)) return false;
    bool good = true;
    if (threadIdx.x == 0) good = sum(call, state, 1u << from, kExperts + call.rank, rows);
    if (!__syncthreads_and(good)) return false;
#pragma unroll 1
    for (int row = taker / call.size; row < rows; row += workers) {
        good = threadIdx.x >= 32 || find_places<Known>(call, state, from, row, taken);
        if (!__syncthreads_and(good)) return false;
        const char* at = slot(call, call.rank, from, row % call.slots) + header_bytes(call);
        if (!Way::kOwnSlots && from == call.rank) {
            at = call.x + static_cast<i64>(taken.token) * call.row;
        }
        if (taken.count) Way::put(call, at, taken);
        __syncthreads();
        if (after_first_warp() == 0) release(call, from, row % call.slots, tag(state, row));
    }
    return true;
}

// -- what the counts of all ranks say --------------------------------------------------------------

// Turns the indices of this block's tokens into places.
__device__ bool place_choices(const Call& call, const State& state) {
    if (!sums(call, state, before(call.rank), 0, call.experts)) return false;
    const int tokens = (call.tokens - static_cast<int>(blockIdx.x) + call.pushers - 1) / call.pushers;
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * call.choices; i += kThreads) {
        const i64 token = blockIdx.x + i / call.choices * call.pushers;
        const i64 choice = token * call.choices + i % call.choices;
        const int index = call.positions[choice], e = call.expert_ids[choice];
        if (index < 0) continue;
        const int place = counters[e] + index;
        const bool kept = place < call.capacity;
        call.positions[choice] = kept ? e % call.local * call.capacity + place : -1;
    }
    return true;
}

// One thread reports an expert with too many choices, where no earlier report is left.
__device__ bool report_overflow(const Call& call, const State& state, int expert) {
    Overflow* overflow = call.overflow;
    if (atomicCAS_system(&overflow->state, 0ull, 1ull)) return true;
    overflow->expert = expert;
    overflow->owner = expert / call.local;
    overflow->capacity = call.capacity;
    bool good = true;
#pragma unroll 1
    for (int r = 0; r < kRanks; ++r) {
        u32 choices = 0;
        if (has(state.live, r)) good = good && sum(call, state, 1u << r, expert, choices);
        overflow->by_rank[r] = choices;
    }
    __threadfence_system();
    poke(&overflow->state, 2ull);
    return good;
}

// One block: the demand for every expert, and the rows of this rank's own.
__device__ bool total(const Call& call, const State& state) {
    __shared__ int worst;
    if (threadIdx.x == 0) worst = kExperts;
    if (!sums(call, state, state.live, 0, call.experts)) return false;
#pragma unroll 1
    for (int e = threadIdx.x; e < call.experts; e += kThreads) {
        call.demand[e] = counters[e];
        if (counters[e] > static_cast<u32>(call.capacity)) atomicMin(&worst, e);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < call.local; i += kThreads) {
        const int e = call.rank * call.local + i;
        call.counts[i] = e < call.experts ? min(static_cast<int>(counters[e]), call.capacity) : 0;
    }
    __syncthreads();
    if (threadIdx.x || worst == kExperts || !call.overflow) return true;
    return report_overflow(call, state, worst);
}

// Makes unused rows zero, each taker its share: while the others are on their way.
template <bool Known, class Way>
__device__ bool clear_unused(const Call& call, const State& state) {
    const int taker = blockIdx.x - call.pushers, takers = gridDim.x - call.pushers;
    __shared__ int list[kThreads], listed;
    if (!Known && !sums(call, state, state.live, call.rank * call.local, call.local)) return false;
    const int rows = call.local * call.capacity, bytes = Way::bytes(call);
#pragma unroll 1
    for (int first = taker; first < rows; first += kThreads * takers) {
        if (threadIdx.x == 0) listed = 0;
        __syncthreads();
        const int row = first + threadIdx.x * takers;
        bool unused = row < rows;
        if (unused && Known) {
            const int from = call.sources[row].x;
            unused = from < 0 || !has(state.live, from);
        }
        if (unused && !Known) unused = row % call.capacity >= counters[row / call.capacity];
        if (unused) list[atomicAdd(&listed, 1)] = row;
        if (unused && !Known) {
            call.sources[row] = make_int4(-1, -1, -1, -1);
            call.row_weights[row] = 0;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < listed; ++i) {
            fill(call.out + static_cast<i64>(list[i]) * bytes, bytes, 0);
            if (call.scales) {
                const int groups = bytes / 128;
                fill(call.scales + static_cast<i64>(list[i]) * groups, groups * 4, 0);
            }
        }
        __syncthreads();
    }
    return true;
}

// -- the kernels -----------------------------------------------------------------------------------

template <bool Known, class Way>
__device__ void spoil(const Call& call) {
    const i64 rows = static_cast<i64>(call.local) * call.capacity;
    const i64 choices = static_cast<i64>(call.tokens) * call.choices;
    fill(call.out, rows * Way::bytes(call), ~0u);  // not a number in any format
    if (Known) return;
    if (call.scales) fill(call.scales, rows * Way::bytes(call) / 128 * 4, ~0u);
    fill(call.expert_ids, choices * 4, ~0u);
    fill(call.positions, choices * 4, ~0u);
    fill(call.sources, rows * 16, ~0u);
    fill(call.row_weights, rows * 4, 0);
    fill(call.counts, call.local * 4, 0);
    fill(call.demand, call.experts * 4, 0);
}

template <bool Known, class Way>
__device__ void run(const Call& call) {
    State state;
    bool good = enter(call, kToExperts, state);
    const bool pusher = blockIdx.x < call.pushers;
    if (good && pusher) good = push<Known, Way>(call, state);
    if (good && !Known && pusher) good = place_choices(call, state);
    if (good && !Known && blockIdx.x == call.pushers - 1) total(call, state);
    if (good && !pusher && clear_unused<Known, Way>(call, state)) take<Known, Way>(call, state);
    leave(call, state, [&] { spoil<Known, Way>(call); });
}

#define KERNEL(name, known, way)                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 4)                         \
        name(const __grid_constant__ Call call) {                                     \
        run<known, way>(call);                                                        \
    }

KERNEL(dispatch, false, Plain)
KERNEL(scatter, true, Plain)
KERNEL(scatter_bfloat16, true, Weighted<Bfloat16>)
KERNEL(scatter_float16, true, Weighted<Float16>)
KERNEL(scatter_float32, true, Weighted<Float32>)
#if __CUDA_ARCH__ >= 890
KERNEL(quantize_bfloat16, false, Quantized<Bfloat16>)
KERNEL(quantize_float16, false, Quantized<Float16>)
KERNEL(quantize_float32, false, Quantized<Float32>)
#endif
