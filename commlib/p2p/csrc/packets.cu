// all_gather and all_to_all of any bytes: each 8 of them travel with two flags that are never zero.

#include "channel.cuh"

constexpr u32 kFlag = 1;

// One rank's part of a tensor, in pieces of 8 bytes; the last may be short.
struct Part {
    char* at;
    i64 bytes;

    __device__ i64 pieces() const { return (bytes + 7) / 8; }
    __device__ bool whole(i64 i) const {
        return reinterpret_cast<u64>(at) % 8 == 0 && (i + 1) * 8 <= bytes;
    }

    __device__ uint2 get(i64 i) const {
        if (whole(i)) return reinterpret_cast<const uint2*>(at)[i];
        u64 piece = 0;
        for (int k = 0; k < 8 && i * 8 + k < bytes; ++k) {
            piece |= u64(static_cast<unsigned char>(at[i * 8 + k])) << 8 * k;
        }
        return make_uint2(u32(piece), u32(piece >> 32));
    }

    __device__ void put(i64 i, uint2 v) const {
        if (whole(i)) {
            reinterpret_cast<uint2*>(at)[i] = v;
            return;
        }
        const u64 piece = u64(v.y) << 32 | v.x;
        for (int k = 0; k < 8 && i * 8 + k < bytes; ++k) at[i * 8 + k] = char(piece >> 8 * k);
    }
};

// 0 while a flag is missing.
__device__ inline u32 flagged(const uint4& v) { return min(v.y, v.w); }

extern "C" __global__ void __launch_bounds__(kThreads)
    packets(const __grid_constant__ Call call) {
    const i64 bytes = call.items, apart = call.option ? bytes : 0;
    const auto given = [&](int rank) { return Part{const_cast<char*>(call.x) + rank * apart, bytes}; };
    const auto wanted = [&](int rank) { return Part{call.out + rank * bytes, bytes}; };
    const Part own = wanted(call.rank);
    const i64 first = i64(blockIdx.x) * blockDim.x + threadIdx.x, step = i64(gridDim.x) * blockDim.x;
    const i64 pieces = own.pieces();
    const auto push = [&](u32 epoch, i64 i) {
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
            const uint2 v = given((call.rank + d) % kRanks).get(i);
            poke(slot(call, d, epoch, call.rank * pieces + i), make_uint4(v.x, kFlag, v.y, kFlag));
        }
    };
    const auto spoil = [&](i64 i) {  // all bits set: NaN, -1 or 255
        for (int r = 0; r < kRanks; ++r) wanted(r).put(i, make_uint2(~0u, ~0u));
    };
    begin(call);
    State state = enter(call);
    if (state.fault) {
        report(call, state.fault);
        for (i64 i = first; i < pieces; i += step) spoil(i);
        return;
    }
    if (first < pieces) push(state.epoch, first);
    sign(call, state);
    for (i64 i = first; i < pieces; i += step) {
        if (i + step < pieces) push(state.epoch, i + step);
        own.put(i, given(call.rank).get(i));
        uint4* from[kRanks];
        uint4 v[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            from[r] = slot(call, 0, state.epoch, r * pieces + i);
        }
        if (!take(call, state, others(call), from, v, flagged)) {
            spoil(i);
            continue;
        }
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (r != call.rank) wanted(r).put(i, make_uint2(v[r].x, v[r].z));
        }
    }
    leave(call, state);
}
