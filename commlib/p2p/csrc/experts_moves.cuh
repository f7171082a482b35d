// What a row becomes on its way to its experts.

#pragma once
#include "experts.cuh"

struct Taken {  // of the slot that a block takes
    int token, count;
    int places[kChoices];
};

template <class Move>
__device__ inline void for_vectors(int vectors, const uint4* from, Move move) {
#pragma unroll 1
    for (int begin = threadIdx.x; begin < vectors; begin += kVectors * kThreads) {
        uint4 held[kVectors];  // on their way at the same time
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const int i = begin + k * kThreads;
            if (i < vectors) held[k] = __ldcg(from + i);
        }
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
            const int i = begin + k * kThreads;
            if (i < vectors) move(i, held[k]);
        }
    }
}

struct Plain {  // the same bytes
    static constexpr bool kOwnSlots = false;  // rows of this rank itself are taken where they are

    __device__ static int bytes(const Call& call) { return call.row; }

    __device__ static void push(const Call& call, const char* row, u32 ranks, char* const* to) {
        for_vectors(call.row / 16, reinterpret_cast<const uint4*>(row), [&](int i, uint4 v) {
#pragma unroll 1
            for (u32 left = ranks; left; left &= left - 1) {
                reinterpret_cast<uint4*>(to[__ffs(left) - 1])[i] = v;
            }
        });
    }

    __device__ static void put(const Call& call, const char* from, const Taken& taken) {
        const int vectors = bytes(call) / 16;
        for_vectors(vectors, reinterpret_cast<const uint4*>(from), [&](int i, uint4 v) {
#pragma unroll 1
            for (int k = 0; k < taken.count; ++k) {
                reinterpret_cast<uint4*>(call.out)[static_cast<i64>(taken.places[k]) * vectors + i] = v;
            }
        });
    }
};

template <class T>
struct Weighted : Plain {  // times the weight of each place
    __device__ static void put(const Call& call, const char* from, const Taken& taken) {
        const int vectors = call.row / 16;
        for_vectors(vectors, reinterpret_cast<const uint4*>(from), [&](int i, uint4 v) {
            float x[kItems<T>];
            unpack<T>(v, x);
            for (int k = 0; k < taken.count; ++k) {
                const float weight = call.row_weights[taken.places[k]];
                float y[kItems<T>];
#pragma unroll
                for (int n = 0; n < kItems<T>; ++n) y[n] = __fmul_rn(weight, x[n]);
                reinterpret_cast<uint4*>(call.out)[static_cast<i64>(taken.places[k]) * vectors + i] =
                    rounded<T>(y);
            }
        });
    }
};

#if __CUDA_ARCH__ >= 890
__device__ inline float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ inline u32 float8s(const float* from, float scale) {
    unsigned short low, high;
    float y[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) y[n] = __fdiv_rn(from[n], scale);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(y[1]), "f"(y[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(y[3]), "f"(y[2]));
    return static_cast<u32>(high) << 16 | low;
}

template <class T>
struct Quantized {  // 8 bits per element, and after them a scale per group
    static constexpr bool kOwnSlots = true;
    static constexpr int kGroup = 128, kLanes = kGroup / kItems<T>, kWords = kItems<T> / 4;

    struct alignas(4 * kWords) Words {  // of a thread, in one store, so that a warp writes whole lines
        u32 word[kWords];
    };

    __device__ static int bytes(const Call& call) { return call.row / 16 * kItems<T>; }

    __device__ static void push(const Call& call, const char* row, u32 ranks, char* const* to) {
        const int vectors = call.row / 16;
        for (int first = 0; first < vectors; first += kThreads) {
            const int i = first + threadIdx.x;
            float x[kItems<T>] = {}, most = 0;
            if (i < vectors) unpack<T>(__ldcg(reinterpret_cast<const uint4*>(row) + i), x);
#pragma unroll
            for (int n = 0; n < kItems<T>; ++n) most = larger(most, fabsf(x[n]));
#pragma unroll
            for (int step = kLanes / 2; step; step /= 2) {
                most = larger(most, __shfl_xor_sync(kWarp, most, step));
            }
            if (i >= vectors) continue;
            const float part = __fdiv_rn(most, 448.0f), scale = part == 0 ? 1.0f : part;
            Words words;
#pragma unroll
            for (int n = 0; n < kWords; ++n) words.word[n] = float8s(x + 4 * n, scale);
            for (u32 left = ranks; left; left &= left - 1) {
                char* target = to[__ffs(left) - 1];
                reinterpret_cast<Words*>(target)[i] = words;
                if (i % kLanes == 0) {
                    reinterpret_cast<float*>(target + bytes(call))[i / kLanes] = scale;
                }
            }
        }
    }

    __device__ static void put(const Call& call, const char* from, const Taken& taken) {
        const int vectors = bytes(call) / 16, groups = bytes(call) / kGroup;
        for_vectors(vectors, reinterpret_cast<const uint4*>(from), [&](int i, uint4 v) {
#pragma unroll 1
            for (int k = 0; k < taken.count; ++k) {
                reinterpret_cast<uint4*>(call.out)[static_cast<i64>(taken.places[k]) * vectors + i] = v;
            }
        });
        for (int i = threadIdx.x; i < groups; i += kThreads) {
            const float scale = __ldcg(reinterpret_cast<const float*>(from + bytes(call)) + i);
            for (int k = 0; k < taken.count; ++k) {
                call.scales[static_cast<i64>(taken.places[k]) * groups + i] = scale;
            }
        }
    }
};
#endif
