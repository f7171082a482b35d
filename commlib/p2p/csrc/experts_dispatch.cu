// Tokens to their experts (see experts.cuh). A token's row travels once to each rank that has one of
// its experts, and the receiver copies it to all its places there.
//
// The first block counts. The other pushers claim tokens in order. A row's number among those for the
// same rank, and the number of a choice among this rank's for the same expert, follow from the choices
// of all earlier tokens: every pusher counts them as it goes on, so no block waits for another one to
// count. Pushers then make the rows zero that are not used, while takers copy.

#include "experts_moves.cuh"
#include "experts_places.cuh"

// What a slot holds: token, then an entry per choice; the row begins at the next line.
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

// In whole lines, as in experts/layout.py.
__device__ inline i64 header_bytes(const Call& call) { return ((call.choices + 1) * 16 + 127) / 128 * 128; }

// -- pushing ---------------------------------------------------------------------------------------

// One warp, a lane per choice and then per rank: where the token goes, and whether there is room.
template <bool Known>
__device__ bool plan_token(const Call& call, const State& state, int token, int e, Plan& plan) {
    const int lane = threadIdx.x, to = owner(call, max(e, 0));
    const i64 choice = static_cast<i64>(token) * call.choices + lane;
    const bool goes = e >= 0 && has(state.live, to), holds = lane < call.choices;
    const u32 same = __match_any_sync(kWarp, goes ? e : kExperts + lane);
    int index = -1;
    if (goes) index = Known ? call.positions[choice] : counters[e] + __popc(same & before(lane));
    const u32 ranks = __reduce_or_sync(kWarp, goes ? 1u << to : 0);
    __syncwarp();
    if (goes && !(same & before(lane))) counters[e] += __popc(same);
    if (holds && !Known) {
        call.expert_ids[choice] = e;
        call.positions[choice] = index;  // a place once the counts of all ranks are here
    }
    const float weight = holds && !Known && call.weights ? call.weights[choice] : 1.0f;
    plan.owner[lane] = goes ? to : -1;
    plan.choice[lane] = make_int4(index, goes ? e - to * call.local : 0, __float_as_int(weight), 0);
    if (lane == 0) plan.ranks = ranks;
    if (!(lane < kRanks && has(ranks, lane))) return true;
    const int row = plan.row[lane] = counters[kExperts + lane]++;
    if (row < call.slots) return await_room(call, state, lane);
    return await_room(call, state, lane, row % call.slots, tag(state, row - call.slots));
}

__device__ inline void write_headers(const Call& call, const Plan& plan, u32 ranks, int token,
                                     char* const* slots) {
#pragma unroll 1
    for (u32 left = ranks; left; left &= left - 1) {
        const int r = __ffs(left) - 1;
        Header* header = reinterpret_cast<Header*>(slots[r] - header_bytes(call));
        if (threadIdx.x == 0) header->token = make_int4(token, 0, 0, 0);
        if (threadIdx.x < call.choices) {
            int4 choice = plan.choice[threadIdx.x];
            if (plan.owner[threadIdx.x] != r) choice.x = -1;
            header->choice[threadIdx.x] = choice;
        }
    }
}

// Pushes tokens from `token` on, which is then the next one of the block; as many as may wait for places.
template <bool Known, class Way>
__device__ bool push_some(const Call& call, const State& state, int& token, Pushed& pushed) {
    __shared__ Plan plan;
    __shared__ char* slots[kRanks];
    __shared__ int next;
    int counted = 0, count = 0;
    clear();
#pragma unroll 1
    for (; token < call.tokens && (Known || count < kPlanned); token = next, ++count) {
        const i64 choice = static_cast<i64>(token) * call.choices + threadIdx.x;
        const int e = threadIdx.x < call.choices ? expert<Known>(call, choice) : -1;
        add<Known>(call, state.live, counted, token);
        counted = token + 1;
        if (!Known && threadIdx.x == 0) pushed.tokens[count] = token;
        const bool good = threadIdx.x >= 32 || plan_token<Known>(call, state, token, e, plan);
        if (!__syncthreads_and(good)) return false;
        const int later = claims() ? claim(call, kToPush) : 0;  // on its way for long
        if (threadIdx.x < kRanks && has(plan.ranks, threadIdx.x)) {
            const int index = plan.row[threadIdx.x] % call.slots;
            slots[threadIdx.x] = slot(call, state, threadIdx.x, call.rank, index) + header_bytes(call);
        }
        __syncthreads();
        const int peer = after_first_warp();
        const int row = peer >= 0 ? plan.row[peer] : 0;
        const u32 here = Way::kOwnSlots ? 0 : plan.ranks & 1u << call.rank, others = plan.ranks & ~here;
        if (here) {  // its flag needn't wait until rows are at other ranks
            write_headers(call, plan, here, token, slots);
            __syncthreads();
            if (peer == call.rank) raise(call, state, peer, row % call.slots, tag(state, row));
        }
        if (others) {
            Way::push(call, call.x + static_cast<i64>(token) * call.row, others, slots);
            write_headers(call, plan, others, token, slots);
        }
        if (claims()) next = later;
        __syncthreads();  // the first warp goes on with the next token
        if (peer >= 0 && has(others, peer)) raise(call, state, peer, row % call.slots, tag(state, row));
    }
    pushed.count = count;
    return true;
}

template <bool Known, class Way>
__device__ bool push(const Call& call, const State& state, int token) {
    __shared__ Pushed pushed;
    do {
        if (!push_some<Known, Way>(call, state, token, pushed)) return false;
        if (!Known && pushed.count && !place_choices(call, state, pushed)) return false;
    } while (!Known && token < call.tokens);
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
    __syncwarp();  // a vote orders no memory: other lanes read what lane 0 has acquired
    const Header* header = reinterpret_cast<Header*>(slot(call, state, call.rank, from, index));
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
__device__ bool take(const Call& call, const State& state, int from, int row) {
    __shared__ Taken taken;
    __shared__ u32 rows;
    __shared__ int next;
    if (!has(state.live, from)) return true;
    bool good = true;
    clear();
    if (threadIdx.x == kThreads - 1) {  // the others need not wait for it
        good = await_count(call, state, from, kExperts + call.rank, rows);
    }
    const int first = call.rank * call.local;
    if (!Known) good = add_counts(call, state, before(from), first, call.local) && good;
    if (!__syncthreads_and(good)) return false;
#pragma unroll 1
    for (; row < rows; row = next) {
        good = threadIdx.x >= 32 || find_places<Known>(call, state, from, row, taken);
        if (!__syncthreads_and(good)) return false;
        const char* at = slot(call, state, call.rank, from, row % call.slots) + header_bytes(call);
        const int later = claims() ? claim(call, to_take(from)) : 0;  // on its way for long
        if (!Way::kOwnSlots && from == call.rank) {
            at = call.x + static_cast<i64>(taken.token) * call.row;
        }
        if (taken.count) Way::put(call, at, taken);
        if (claims()) next = later;
        __syncthreads();
        if (row + call.slots >= rows) continue;  // no later row needs the slot
        if (after_first_warp() == 0) release(call, from, row % call.slots, tag(state, row));
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
    const Role block = role(call);
    const int from = block.number % call.size;  // a taker has one sender: see experts.cuh
    const bool counts = !block.takes && block.number == 0;
    State state;
    int item;
    const Work work = counts ? kNothing : block.takes ? to_take(from) : kToPush;
    bool good = enter(call, kToExperts, work, state, item);
    if (block.takes) {
        if (good) take<Known, Way>(call, state, from, item);
    } else {
        if (good) good = counts ? announce<Known>(call, state) : push<Known, Way>(call, state, item);
        if (good && !Known && counts) good = total(call, state);
        if (good) clear_unused<Known, Way>(call, state, block.number);
    }
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
