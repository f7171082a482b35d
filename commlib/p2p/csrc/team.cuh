// Blocks that share a row, and the sum over all of their threads.

#pragma once
#include "channel.cuh"

constexpr int kWarps = kThreads / 32;

// The blocks that share a row: a cluster of the launch, or one block by itself.
struct Team {
    u32 rank, size, first, step;  // of this block; its first row, and from one to the next

    __device__ Team() : rank(0), size(1), first(blockIdx.x), step(gridDim.x) {
#if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0, %cluster_nctarank;" : "=r"(size));
        asm("mov.u32 %0, %clusterid.x;" : "=r"(first));
        asm("mov.u32 %0, %nclusterid.x;" : "=r"(step));
#endif
    }

    // Says that this block has come here, with all that it has written; all threads call both.
    __device__ void arrive() const {
#if __CUDA_ARCH__ >= 900
        if (size > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    }
    __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
        if (size > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    // Writes to the same shared variable of another block, which `peer` numbers.
    __device__ void tell(u32 peer, float* place, float value) const {
#if __CUDA_ARCH__ >= 900
        const u32 mine = static_cast<u32>(__cvta_generic_to_shared(place));
        asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
                     "st.shared::cluster.f32 [there], %2;}"
                     ::"r"(mine), "r"(peer), "f"(value) : "memory");
#endif
    }
};

constexpr int kTeam = 8;  // the most blocks in a team; as in norm.py

struct Parts {  // two buffers take turns
    float warps[2][kWarps];
    float blocks[2][kTeam];
};

// The sum over the threads of a team, with the same bits on all of them. All threads call it, and
// have called team.arrive() once before. The team is given by value: a reference to it keeps all of
// Rows in local memory, which costs 2 us a call.
struct RowSum {
    Parts& parts;
    int turn = 0;
    bool begun = false;

    __device__ static float over_warp(float value, int lanes) {
        for (int apart = lanes / 2; apart; apart /= 2) {
            value = __fadd_rn(value, __shfl_xor_sync(~0u, value, apart));
        }
        return value;
    }

    __device__ float operator()(const Team team, float value) {
        const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
        value = over_warp(value, 32);
        if (lane == 0) parts.warps[turn][threadIdx.x / 32] = value;
        __syncthreads();
        const int warp = lane % kWarps;
        value = over_warp(warp < warps ? parts.warps[turn][warp] : 0.0f, kWarps);
        if (team.size > 1) value = over_team(team, value);
        turn ^= 1;
        return value;
    }

    __device__ float over_team(const Team team, float value) {
        if (!begun) team.wait();  // all blocks are there to be written to
        begun = true;
        if (threadIdx.x < team.size) team.tell(threadIdx.x, &parts.blocks[turn][team.rank], value);
        team.arrive();
        team.wait();
        const int block = threadIdx.x % kTeam;
        return over_warp(block < team.size ? parts.blocks[turn][block] : 0.0f, kTeam);
    }
};
