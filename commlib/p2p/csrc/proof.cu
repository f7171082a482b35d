// Whether ranks reach each other's memory: each writes its token, changed by the place, into every
// 4096 bytes of every rank's memory, and then looks for all tokens in its own.

typedef unsigned long long u64;
typedef long long i64;

constexpr int kRanks = 16;
constexpr i64 kPage = 4096 / sizeof(u64);  // words

struct Proof {
    u64* base[kRanks];  // every rank's memory, as this rank sees it
    u64 token[kRanks];
    i64 pages;
    u64* wrong;         // in host memory: not 0 where a token is missing
    int rank, size;
};

__device__ inline i64 first_page() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline i64 stride() { return i64(gridDim.x) * blockDim.x; }

extern "C" __global__ void write_tokens(const __grid_constant__ Proof proof) {
    for (i64 page = first_page(); page < proof.pages; page += stride()) {
        for (int rank = 0; rank < proof.size; ++rank) {
            u64* place = proof.base[rank] + page * kPage + proof.rank;
            asm volatile("st.relaxed.sys.global.u64 [%0], %1;"
                         ::"l"(place), "l"(proof.token[proof.rank] ^ page) : "memory");
        }
    }
}

extern "C" __global__ void find_tokens(const __grid_constant__ Proof proof) {
    for (i64 page = first_page(); page < proof.pages; page += stride()) {
        for (int rank = 0; rank < proof.size; ++rank) {
            const u64* place = proof.base[proof.rank] + page * kPage + rank;
            u64 found;
            asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(found) : "l"(place) : "memory");
            if (found != (proof.token[rank] ^ page)) *proof.wrong = 1;
        }
    }
}
