// all_reduce of rows, a bias and a residual added to the sum, and the norm of that, in one kernel.
//
// A block, or a cluster of them, does a row at a time, and a thread the same vectors of it in every
// step. The rows before the norm have the same bits on all ranks, and every rank normalises all of
// them: what it adds up for that it has itself, in an order that the launch fixes. So no sums
// travel, and all ranks end with the same bits.

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
__device__ inline bool take_all(const Call& call, u32 epoch, u32 wanted, Place place, Peer peer,
                                uint4 (&to)[Count][Ranks], int hop = 1) {
    const auto wants = [&](int i, int r) { return wanted >> (i * Ranks + r) & 1; };
    u64 begin = 0;
    for (u32 polls = 1;; ++polls) {
        int missing = -1;
#pragma unroll
        for (int i = 0; i < Count; ++i)
#pragma unroll
            for (int r = 0; r < Ranks; ++r)
                if (wants(i, r)) to[i][r] = peek(place(i, r));
#pragma unroll
        for (int i = 0; i < Count; ++i)
#pragma unroll
            for (int r = 0; r < Ranks; ++r)
                if (wants(i, r) && !every_word(to[i][r])) missing = peer(i, r);
        if (missing < 0) break;
        if (polls % kPolls == 0 && given_up(call, begin, missing, epoch, hop)) return false;
    }
#pragma unroll
    for (int i = 0; i < Count; ++i)
#pragma unroll
        for (int r = 0; r < Ranks; ++r)
            if (wants(i, r)) *place(i, r) = make_uint4(0, 0, 0, 0);
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
    u32 epoch;
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

    // Behind the first pushes, which `state` has allowed or not. After a fault a block goes on
    // without its peers, for its team counts on it, and no result is a number.
    __device__ void begin(const State& state) {
        good = !__syncthreads_or(state.fault != 0);
        team.arrive();
        if (state.fault) report(call, state.fault);
        if (!good) return;
        const Ticket ticket = ::arrive(call);
        advance(call, ticket, epoch);
    }
};

// Pushes the first row as soon as it may, before anything else.
template <class Work, int V>
__device__ inline void start(Work& work, Mine<V>& own) {
    await_predecessor();
    work.get(work.call.x, work.team.first, own);
    const State state = enter(work.call);
    work.epoch = state.epoch;
    if (!state.fault) work.push(work.team.first, own);
    work.begin(state);
}

// -- one hop -----------------------------------------------------------------------------------------

template <class T, int V>
struct OneHop : Rows<T, V> {
    using Base = Rows<T, V>;
    using Base::Base, Base::call, Base::norm, Base::epoch, Base::good, Base::holds, Base::column;
    static constexpr int kFit = (V > 2 ? kUnderWay / 2 : kUnderWay) / kRanks;
    static constexpr int kBatch = kFit < 1 ? 1 : kFit < V ? kFit : V;  // of V at a time

    __device__ uint4* from(int at, int source, int row, int j) const {
        return slot(call, at, epoch, (source * norm.rows + row) * norm.width + column(j));
    }

    __device__ void push(int row, const Mine<V>& own) const {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (!holds(j)) continue;
            const uint4 v = masked(own[j]);
#pragma unroll
            for (int d = 1; d < kRanks; ++d) {
                poke(from((call.rank + d) % kRanks, call.rank, row, j), v);
            }
        }
    }

    // The vectors of all ranks, from `first` on: waits for them, adds up, and keeps the result.
    __device__ void add(int row, int first, Mine<V>& z) {
        uint4 v[kBatch][kRanks];
        typename Base::Addends more[kBatch];
        u32 wanted = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (!holds(first + i)) continue;
            wanted |= others(call) << i * kRanks;
            this->own(row, first + i, v[i]);
            more[i] = this->addends(row, first + i);
        }
        good = good && take_all<kBatch, kRanks>(
            call, epoch, wanted, [&](int i, int r) { return from(call.rank, r, row, first + i); },
            [](int, int r) { return r; }, v);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (!holds(first + i)) continue;
            z[first + i] = good ? this->added(v[i], more[i]) : not_numbers();
            this->keep(row, first + i, z[first + i]);
        }
    }

    __device__ void finish(int row) {
        typename Base::Affine affine;
        Mine<V> z;
        if (Base::kEarly) this->fetch(affine);
#pragma unroll
        for (int first = 0; first < V; first += kBatch) add(row, first, z);
        if (!Base::kEarly) this->fetch(affine);
        this->normalise(row, z, affine);
    }
};

template <class T, int V>
__device__ inline void norm_one_shot(const NormCall& norm) {
    __shared__ Parts parts;
    OneHop<T, V> work(norm, parts);
    const int first = work.team.first, step = work.team.step;
    Mine<V> own;
    start(work, own);
    for (int row = first; row < norm.rows; row += step) {
        if (work.good && row + step < norm.rows) {  // on its way while this one is waited for
            work.get(norm.call.x, row + step, own);
            work.push(row + step, own);
        }
        work.finish(row);
    }
    leave(norm.call);
}

// -- two hops ----------------------------------------------------------------------------------------

// Every rank owns a slice of the columns: it adds up what lies there, and hands it on.
template <class T, int V>
struct TwoHops : Rows<T, V> {
    using Base = Rows<T, V>;
    using Base::call, Base::norm, Base::epoch, Base::good, Base::holds, Base::column;
    const int slice;

    __device__ TwoHops(const NormCall& norm, Parts& parts)
        : Base(norm, parts), slice((norm.width + kRanks - 1) / kRanks) {}

    __device__ int owner(int j) const { return column(j) / slice; }

    // Of the first hop come `source`s 0 to kRanks - 1, of the second kRanks + the owner.
    __device__ uint4* from(int at, int source, int row, int j) const {
        const int begin = (source * norm.rows + row) * slice;
        return slot(call, at, epoch, begin + column(j) - owner(j) * slice);
    }

    __device__ void push(int row, const Mine<V>& own) const {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (!holds(j) || owner(j) == call.rank) continue;
            poke(from(owner(j), call.rank, row, j), masked(own[j]));
        }
    }

    __device__ void add_and_spread(int row) {
#pragma unroll 1
        for (int j = 0; j < V; ++j) {
            if (!holds(j) || owner(j) != call.rank) continue;
            uint4 v[1][kRanks];
            this->own(row, j, v[0]);
            const typename Base::Addends more = this->addends(row, j);
            good = good && take_all<1, kRanks>(
                call, epoch, others(call),
                [&](int, int r) { return from(call.rank, r, row, j); },
                [](int, int r) { return r; }, v);
            if (!good) {
                this->keep(row, j, not_numbers());
                continue;
            }
            const uint4 z = this->added(v[0], more);
#pragma unroll
            for (int d = 1; d < kRanks; ++d) {
                poke(from((call.rank + d) % kRanks, kRanks + call.rank, row, j), masked(z));
            }
            this->keep(row, j, z);
        }
    }

    __device__ void finish(int row) {
        typename Base::Affine affine;
        uint4 v[V][1];
        Mine<V> z;
        u32 wanted = 0;
        if (Base::kEarly) this->fetch(affine);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (!holds(j)) continue;
            if (owner(j) == call.rank) {
                z[j] = this->get(norm.total, row, j);  // this thread has put it there
            } else {
                wanted |= 1u << j;
            }
        }
        good = good && take_all<V, 1>(
            call, epoch, wanted,
            [&](int j, int) { return from(call.rank, kRanks + owner(j), row, j); },
            [&](int j, int) { return owner(j); }, v, 2);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (!(wanted >> j & 1)) continue;
            z[j] = good ? unmasked(v[j][0]) : not_numbers();
            this->keep(row, j, z[j]);
        }
        if (!Base::kEarly) this->fetch(affine);
        this->normalise(row, z, affine);
    }
};

template <class T, int V>
__device__ inline void norm_two_shot(const NormCall& norm) {
    __shared__ Parts parts;
    TwoHops<T, V> work(norm, parts);
    const int first = work.team.first, step = work.team.step;
    Mine<V> own;
    start(work, own);
    // The three steps of one row lie a turn apart, so that all of them go on at a time.
    for (int row = first; row < norm.rows + 2 * step; row += step) {
        if (work.good && row > first && row < norm.rows) {
            work.get(norm.call.x, row, own);
            work.push(row, own);
        }
        const int second = row - step, third = row - 2 * step;
        if (second >= first && second < norm.rows) work.add_and_spread(second);
        if (third >= first && third < norm.rows) work.finish(third);
    }
    leave(norm.call);
}

#define ENTRY(algorithm, name, T, V)                                      \
    extern "C" __global__ void __launch_bounds__(kThreads)                 \
        algorithm##_##name##_##V(const __grid_constant__ NormCall norm) {   \
        algorithm<T, V>(norm);                                               \
    }
#define ENTRIES(algorithm, name, T)  \
    ENTRY(algorithm, name, T, 1)      \
    ENTRY(algorithm, name, T, 2)       \
    ENTRY(algorithm, name, T, 4)
#define DTYPES(algorithm)                      \
    ENTRIES(algorithm, bfloat16, Bfloat16)      \
    ENTRIES(algorithm, float16, Float16)         \
    ENTRIES(algorithm, float32, Float32)

DTYPES(norm_one_shot)
DTYPES(norm_two_shot)
