// Memory that other GPUs write to or read from, the clock, and the order of kernels.

#pragma once

typedef int i32;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The instructions of what happens rarely are put apart: fetching them takes time.
__device__ inline bool usually(bool condition) { return __builtin_expect(condition, true); }
__device__ inline bool rarely(bool condition) { return __builtin_expect(condition, false); }

// The compiler does not work it out again where it is used, in a loop that polls.
__device__ inline u32 kept(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ inline uint4 peek(const uint4* place) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(place) : "memory");
    return v;
}

__device__ inline void poke(uint4* place, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(place), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Of a vector that has been taken; its place is one of this GPU.
__device__ inline void put_zeros(uint4* place) {
    asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(place), "r"(0) : "memory");
}

__device__ inline u64 peek(const u64* place) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(place) : "memory");
    return v;
}

// What this thread does next comes after it, and what others do after a barrier with it. Unlike a
// fence, it doesn't wait for earlier writes.
__device__ inline u64 acquire(const u64* place) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(place) : "memory");
    return v;
}

__device__ inline void poke(u64* place, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(place), "l"(v) : "memory");
}

__device__ inline u32 peek(const u32* place) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

__device__ inline void poke(u32* place, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}

__device__ inline void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline u64 now() {
    u64 value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

// Started early, as a programmatic dependent: nothing but arguments may be read before this.
__device__ inline void await_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The number of the next call where 0 is what memory holds before the first one. Parity goes on
// alternating.
__device__ inline u32 following(u32 epoch) { return epoch == 0xFFFFFFFFu ? 2 : epoch + 1; }
