// Vectors of 16 bytes: as they are in tensors, as they travel, and as numbers.

#pragma once
#include "channel.cuh"
#include "numbers.cuh"

enum Operation : int { kSum, kMax, kMin };

// -- numbers ---------------------------------------------------------------------------------------

// A zero comes out as +0, whatever was rounded to it: multiplied by 1, +0 added.
__device__ inline u32 pack(Bfloat16, const float* from) {
    u32 word;
    asm("{.reg .b32 w; cvt.rn.bf16x2.f32 w, %2, %1; fma.rn.bf16x2 %0, w, %3, %4;}"
        : "=r"(word) : "f"(from[0]), "f"(from[1]), "r"(0x3f803f80), "r"(0));
    return word;
}

__device__ inline u32 pack(Float16, const float* from) {
    u32 word;
    asm("{.reg .b32 w; cvt.rn.f16x2.f32 w, %2, %1; fma.rn.f16x2 %0, w, %3, %4;}"
        : "=r"(word) : "f"(from[0]), "f"(from[1]), "r"(0x3c003c00), "r"(0));
    return word;
}

__device__ inline u32 pack(Float32, const float* from) {
    return __float_as_uint(__fadd_rn(from[0], 0.0f));
}

template <class T>
__device__ inline uint4 pack(const float (&from)[kItems<T>]) {
    constexpr int n = kItems<T> / 4;
    return make_uint4(pack(T(), from), pack(T(), from + n), pack(T(), from + 2 * n),
                      pack(T(), from + 3 * n));
}

template <int Op>
__device__ inline float combine(float a, float b) {
    float c;
    if (Op == kSum) return __fadd_rn(a, b);
    if (Op == kMax) asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    if (Op == kMin) asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// By a power of two a product has the same bits, and takes an instruction.
__device__ inline float divided_by_ranks(float item) {
    constexpr bool power = (kRanks & (kRanks - 1)) == 0;
    return power ? __fmul_rn(item, 1.0f / kRanks) : __fdiv_rn(item, kRanks);
}

// The reduction of all ranks' vectors in float32 and in rank order, so with the same bits on all of
// them but for the sign of a zero: a rank sees its own +0, and those of its peers as -0. pack drops it.
template <class T, int Op>
__device__ inline void reduce(const uint4 (&v)[kRanks], bool mean, float (&to)[kItems<T>]) {
    unpack<T>(v[0], to);
#pragma unroll
    for (int rank = 1; rank < kRanks; ++rank) {
        float next[kItems<T>];
        unpack<T>(v[rank], next);
#pragma unroll
        for (int k = 0; k < kItems<T>; ++k) to[k] = combine<Op>(to[k], next[k]);
    }
    if (Op == kSum && mean)
        for (float& item : to) item = divided_by_ranks(item);
}

// -- on the way --------------------------------------------------------------------------------------

// A word that is zero travels as that of fp32's -0; two 16-bit numbers as +0 and -0.
__device__ inline u32 masked(u32 word) { return word ? word : 0x80000000u; }
__device__ inline uint4 masked(const uint4& v) {
    return make_uint4(masked(v.x), masked(v.y), masked(v.z), masked(v.w));
}

// The way back, for reduced values, in which no zero is negative.
__device__ inline u32 unmasked(u32 word) { return word == 0x80000000u ? 0 : word; }
__device__ inline uint4 unmasked(const uint4& v) {
    return make_uint4(unmasked(v.x), unmasked(v.y), unmasked(v.z), unmasked(v.w));
}

// 0 while a word is missing.
__device__ inline u32 every_word(const uint4& v) { return min(min(v.x, v.y), min(v.z, v.w)); }

// -- in tensors of any length and alignment ----------------------------------------------------------

// Whether each vector of a tensor is a whole one, and can be loaded at once.
template <class T>
__device__ inline bool whole_vectors(const void* at, i64 count) {
    return reinterpret_cast<u64>(at) % 16 == 0 && count % kItems<T> == 0;
}

// Of one tensor, in vectors; the last may be short, and is filled up with zeros. kWhole: of a tensor
// of whole vectors, which takes a fraction of the instructions.
template <class T, bool kWhole>
struct View {
    typedef typename T::Bits Bits;
    Bits* items;
    i64 count;
    bool aligned;

    __device__ View(const void* at, i64 count)
        : items(static_cast<Bits*>(const_cast<void*>(at))),
          count(count),
          aligned(reinterpret_cast<u64>(at) % 16 == 0) {}

    __device__ u32 vectors() const { return (count + kItems<T> - 1) / kItems<T>; }
    __device__ bool whole(u32 i) const {
        return kWhole || (aligned && i64(i + 1) * kItems<T> <= count);
    }

    __device__ uint4 get(u32 i) const {
        if (whole(i)) return reinterpret_cast<const uint4*>(items)[i];
        union {
            uint4 v;
            Bits item[kItems<T>];
        } u;
        u.v = make_uint4(0, 0, 0, 0);
        const i64 first = i64(i) * kItems<T>;
#pragma unroll
        for (int k = 0; k < kItems<T>; ++k) {
            if (first + k < count) u.item[k] = items[first + k];
        }
        return u.v;
    }

    __device__ void put(u32 i, const uint4& v) const {
        if (whole(i)) {
            reinterpret_cast<uint4*>(items)[i] = v;
            return;
        }
        union {
            uint4 v;
            Bits item[kItems<T>];
        } u;
        u.v = v;
        const i64 first = i64(i) * kItems<T>;
#pragma unroll
        for (int k = 0; k < kItems<T>; ++k) {
            if (first + k < count) items[first + k] = u.item[k];
        }
    }
};

constexpr u32 kNotANumber = 0xffffffffu;  // in all three formats
__device__ inline uint4 not_numbers() {
    return make_uint4(kNotANumber, kNotANumber, kNotANumber, kNotANumber);
}
