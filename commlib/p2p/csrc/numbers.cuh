// The kinds of numbers that vectors of 16 bytes hold.

#pragma once
#include "memory.cuh"

struct Bfloat16 {
    typedef unsigned short Bits;
};
struct Float16 {
    typedef unsigned short Bits;
};
struct Float32 {
    typedef u32 Bits;
};

template <class T>
constexpr int kItems = 16 / sizeof(typename T::Bits);

__device__ inline void unpack(Bfloat16, u32 word, float* to) {
    to[0] = __uint_as_float(word << 16);
    to[1] = __uint_as_float(word & 0xffff0000u);
}

__device__ inline void unpack(Float16, u32 word, float* to) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(to[0]), "=f"(to[1]) : "r"(word));
}

__device__ inline void unpack(Float32, u32 word, float* to) { to[0] = __uint_as_float(word); }

template <class T>
__device__ inline void unpack(const uint4& v, float (&to)[kItems<T>]) {
    constexpr int n = kItems<T> / 4;
    unpack(T(), v.x, to);
    unpack(T(), v.y, to + n);
    unpack(T(), v.z, to + 2 * n);
    unpack(T(), v.w, to + 3 * n);
}

// -- rounded to nearest, with the sign of a zero ---------------------------------------------------

__device__ inline u32 rounded(Bfloat16, const float* from) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(from[0]), "f"(from[1]));
    return word;
}

__device__ inline u32 rounded(Float16, const float* from) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(from[0]), "f"(from[1]));
    return word;
}

__device__ inline u32 rounded(Float32, const float* from) { return __float_as_uint(from[0]); }

template <class T>
__device__ inline uint4 rounded(const float (&from)[kItems<T>]) {
    constexpr int n = kItems<T> / 4;
    return make_uint4(rounded(T(), from), rounded(T(), from + n), rounded(T(), from + 2 * n),
                      rounded(T(), from + 3 * n));
}
