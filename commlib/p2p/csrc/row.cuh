// One row of an all_reduce with a norm after it: what a thread has of it, and what is done with that.
#pragma once

#include "team.cuh"
#include "values.cuh"

struct NormCall {  // as in norm.py
    Call call;     // x: this rank's rows; out: the rows that are normalised; items: of a row
    const char* residual;
    const char* linear_bias;  // or null, as `bias` and `scale`
    const char* weight;
    const char* bias;
    char* total;         // the rows before the norm
    const float* scale;  // null: out is of the type of x; else of 8 bits, and divided by it
    float eps;
    int rows;
    int width;  // vectors of a row
    int layer;  // LayerNorm, else RMSNorm
};

constexpr int kUnderWay = 8;  // vectors that a thread waits for at a time; more take registers

// As take, of `Count` times `Ranks` vectors from place(i, r); peer(i, r) is whom to name if one
// does not come, and bit i * Ranks + r of `wanted` says whether it will.
template <int Count, int Ranks, class Place, class Peer>
__device__ inline bool take_all(const Call& call, const State& state, u32 wanted, Place place, Peer peer,
                                uint4 (&to)[Count][Ranks], int hop = 1) {
    const auto wants = [&](int i, int r) { return wanted >> (i * Ranks + r) & 1; };
    u64 begin = 0;
    for (u32 polls = 1;; ++polls) {
        u32 least = ~0u;
#pragma unroll
        for (int i = 0; i < Count; ++i)
#pragma unroll
            for (int r = 0; r < Ranks; ++r)
                if (wants(i, r)) to[i][r] = peek(place(i, r));
#pragma unroll
        for (int i = 0; i < Count; ++i)
#pragma unroll
            for (int r = 0; r < Ranks; ++r)
                if (wants(i, r)) least = min(least, every_word(to[i][r]));
        if (least) break;
        if (usually(polls % kPolls)) continue;
        int missing = -1;
#pragma unroll
        for (int i = 0; i < Count; ++i)
#pragma unroll
            for (int r = 0; r < Ranks; ++r)
                if (wants(i, r) && !every_word(to[i][r])) missing = peer(i, r);
        if (given_up(call, state, begin, missing, hop)) return false;
    }
#pragma unroll
    for (int i = 0; i < Count; ++i)
#pragma unroll
        for (int r = 0; r < Ranks; ++r)
            if (wants(i, r)) put_zeros(place(i, r));
    return true;
}

// -- 8-bit floats ------------------------------------------------------------------------------------

// Four numbers, rounded to the nearest; what is too large becomes the largest, 448.
__device__ inline u32 eight_bits(const float* from) {
#if __CUDA_ARCH__ >= 890
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(from[1]), "f"(from[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(from[3]), "f"(from[2]));
    return u32(high) << 16 | low;
#else
    return 0x7f7f7f7f;  // norm.py asks for none on such a device
#endif
}

// -- one row -----------------------------------------------------------------------------------------

// Vectors of one row, or of a vector that is the same for all rows: those that this thread has.
template <int V>
using Mine = uint4[V];

template <class T, int V>
struct Rows {
    const NormCall& norm;
    const Call& call;
    const Team team;
    RowSum sum;
    State state;
    bool good;  // no peer has been given up

    __device__ Rows(const NormCall& norm, Parts& parts)
        : norm(norm), call(norm.call), sum{parts} {}

    __device__ int column(int j) const {
        return (j * team.size + team.rank) * blockDim.x + threadIdx.x;
    }
    __device__ bool holds(int j) const { return column(j) < norm.width; }
    __device__ int place(int row, int j) const { return row * norm.width + column(j); }

    __device__ uint4 get(const char* from, int row, int j) const {
        return reinterpret_cast<const uint4*>(from)[place(row, j)];
    }

    __device__ void get(const char* from, int row, Mine<V>& to) const {
#pragma unroll
        for (int j = 0; j < V; ++j)
            if (holds(j)) to[j] = get(from, row, j);
    }

    // This rank's vector, in all places: those of the others are written over.
    __device__ void own(int row, int j, uint4 (&to)[kRanks]) const {
        const uint4 v = get(call.x, row, j);
#pragma unroll
        for (int r = 0; r < kRanks; ++r) to[r] = v;
    }

    __device__ void keep(int row, int j, const uint4& z) const {
        reinterpret_cast<uint4*>(norm.total)[place(row, j)] = z;
    }

    // What an addition needs besides the sum: on its way while that is waited for.
    struct Addends {
        uint4 bias, residual;
    };

    __device__ Addends addends(int row, int j) const {
        Addends found;
        found.residual = get(norm.residual, row, j);
        if (norm.linear_bias) found.bias = get(norm.linear_bias, 0, j);
        return found;
    }

    // The sum of the ranks' vectors, rounded, as all_reduce gives it; then all additions, rounded
    // once. No zero in it is negative.
    __device__ uint4 added(const uint4 (&v)[kRanks], const Addends& more) const {
        float total[kItems<T>], item[kItems<T>];
        reduce<T, kSum>(v, false, total);
        unpack<T>(pack<T>(total), total);
        if (norm.linear_bias) {
            unpack<T>(more.bias, item);
#pragma unroll
            for (int k = 0; k < kItems<T>; ++k) total[k] = __fadd_rn(total[k], item[k]);
        }
        unpack<T>(more.residual, item);
#pragma unroll
        for (int k = 0; k < kItems<T>; ++k) total[k] = __fadd_rn(total[k], item[k]);
        return pack<T>(total);
    }

    // What the norm needs besides the row. Of two vectors a thread it is on its way while the row
    // is waited for; for more there are too few registers, and none at all for the bias.
    static constexpr bool kEarly = V <= 2;
    struct Affine {
        Mine<V> weight, bias;
        float scale;
    };

    __device__ void fetch(Affine& affine) const {
        get(norm.weight, 0, affine.weight);
        if (kEarly && norm.bias) get(norm.bias, 0, affine.bias);
        affine.scale = norm.scale ? __frcp_rn(*norm.scale) : 1.0f;
    }

    __device__ void put(int row, int j, const float (&y)[kItems<T>]) const {
        if (!norm.scale) {
            reinterpret_cast<uint4*>(call.out)[place(row, j)] = pack<T>(y);
        } else if constexpr (kItems<T> == 8) {
            const uint2 v = make_uint2(eight_bits(y), eight_bits(y + 4));
            reinterpret_cast<uint2*>(call.out)[place(row, j)] = v;
        } else {
            reinterpret_cast<u32*>(call.out)[place(row, j)] = eight_bits(y);
        }
    }

    // All threads of the block call it. A vector that is not a number makes the row none.
    __device__ void normalise(int row, const Mine<V>& z, const Affine& affine) {
        float mean = 0.0f, squares = 0.0f;
        if (norm.layer) {
            float own = 0.0f;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                if (!holds(j)) continue;
                float item[kItems<T>];
                unpack<T>(z[j], item);
#pragma unroll
                for (int k = 0; k < kItems<T>; ++k) own += item[k];
            }
            mean = __fdiv_rn(sum(team, own), float(call.items));
        }
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (!holds(j)) continue;
            float item[kItems<T>];
            unpack<T>(z[j], item);
#pragma unroll
            for (int k = 0; k < kItems<T>; ++k) squares += (item[k] - mean) * (item[k] - mean);
        }
        const float variance = __fdiv_rn(sum(team, squares), float(call.items));
        const float factor = __frcp_rn(__fsqrt_rn(variance + norm.eps));
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (!holds(j)) continue;
            float item[kItems<T>], by[kItems<T>];
            unpack<T>(z[j], item);
            unpack<T>(affine.weight[j], by);
#pragma unroll
            for (int k = 0; k < kItems<T>; ++k) item[k] = (item[k] - mean) * factor * by[k];
            if (norm.bias) {
                unpack<T>(kEarly ? affine.bias[j] : get(norm.bias, 0, j), by);
#pragma unroll
                for (int k = 0; k < kItems<T>; ++k) item[k] += by[k];
            }
#pragma unroll
            for (int k = 0; k < kItems<T>; ++k) item[k] *= affine.scale;
            put(row, j, item);
        }
    }

    // After the first pushes, if there is no fault. After one a block goes on without its peers, for
    // its team counts on it, and no result is a number.
    __device__ void pushed() {
        good = !__syncthreads_or(state.fault != 0);
        team.arrive();
        if (state.fault) report(call, state.fault);
        if (good) sign(call, state);
    }
};

// Pushes the first row as soon as it may, before anything else.
template <class Work, int V>
__device__ inline void start(Work& work, Mine<V>& own) {
    begin(work.call);
    work.get(work.call.x, work.team.first, own);
    work.state = enter(work.call);
    if (!work.state.fault) work.push(work.team.first, own);
    work.pushed();
}
