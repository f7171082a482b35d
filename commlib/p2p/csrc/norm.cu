// all_reduce of rows, a bias and a residual added to the sum, and the norm of that, in one kernel.
//
// A block, or a cluster of them, does a row at a time, and a thread the same vectors of it in every
// step. The rows before the norm have the same bits on all ranks, and every rank normalises all of
// them: what it adds up for that it has itself, in an order that the launch fixes. So no sums
// travel, and all ranks end with the same bits.

#include "row.cuh"

// -- one hop -----------------------------------------------------------------------------------------

template <class T, int V>
struct OneHop : Rows<T, V> {
    using Base = Rows<T, V>;
    using Base::Base, Base::call, Base::norm, Base::state, Base::good, Base::holds, Base::column;
    static constexpr int kFit = (V > 2 ? kUnderWay / 2 : kUnderWay) / kRanks;
    static constexpr int kBatch = kFit < 1 ? 1 : kFit < V ? kFit : V;  // of V at a time

    // at: how many ranks after this one.
    __device__ uint4* from(int at, int source, int row, int j) const {
        return slot(call, at, state.epoch, (source * norm.rows + row) * norm.width + column(j));
    }

    __device__ void push(int row, const Mine<V>& own) const {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (!holds(j)) continue;
            const uint4 v = masked(own[j]);
#pragma unroll
            for (int d = 1; d < kRanks; ++d) poke(from(d, call.rank, row, j), v);
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
            call, state, wanted, [&](int i, int r) { return from(0, r, row, first + i); },
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
    leave(norm.call, work.state);
}

// -- two hops ----------------------------------------------------------------------------------------

// Every rank owns a slice of the columns: it adds up the values there, and hands them on.
template <class T, int V>
struct TwoHops : Rows<T, V> {
    using Base = Rows<T, V>;
    using Base::call, Base::norm, Base::state, Base::good, Base::holds, Base::column;
    const int slice;

    __device__ TwoHops(const NormCall& norm, Parts& parts)
        : Base(norm, parts), slice((norm.width + kRanks - 1) / kRanks) {}

    __device__ int owner(int j) const { return column(j) / slice; }

    // Of the first hop come `source`s 0 to kRanks - 1, of the second kRanks + the owner. at: how many
    // ranks after this one.
    __device__ uint4* from(int at, int source, int row, int j) const {
        const int begin = (source * norm.rows + row) * slice;
        return slot(call, at, state.epoch, begin + column(j) - owner(j) * slice);
    }

    __device__ void push(int row, const Mine<V>& own) const {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (!holds(j) || owner(j) == call.rank) continue;
            const int to = (owner(j) - call.rank + kRanks) % kRanks;
            poke(from(to, call.rank, row, j), masked(own[j]));
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
                call, state, others(call), [&](int, int r) { return from(0, r, row, j); },
                [](int, int r) { return r; }, v);
            if (!good) {
                this->keep(row, j, not_numbers());
                continue;
            }
            const uint4 z = this->added(v[0], more);
#pragma unroll
            for (int d = 1; d < kRanks; ++d) poke(from(d, kRanks + call.rank, row, j), masked(z));
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
            call, state, wanted,
            [&](int j, int) { return from(0, kRanks + owner(j), row, j); },
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
    // The three steps of one row are a turn apart, so that all of them go on at a time.
    for (int row = first; row < norm.rows + 2 * step; row += step) {
        if (work.good && row > first && row < norm.rows) {
            work.get(norm.call.x, row, own);
            work.push(row, own);
        }
        const int second = row - step, third = row - 2 * step;
        if (second >= first && second < norm.rows) work.add_and_spread(second);
        if (third >= first && third < norm.rows) work.finish(third);
    }
    leave(norm.call, work.state);
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
