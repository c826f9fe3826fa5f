// Parts of the kernels that write new tokens into a cache. Token t of `seq` is at position
// lengths[b] - seq + t of sequence b, and new if that is not below starts[b]: where sequences have
// fewer new tokens than others, theirs are the last.
#pragma once
#include "chunk.cuh"
#include "params.cuh"

constexpr int THREADS = 128;

// cufa/specs/append.py holds the same layout as a NumPy dtype.
struct AppendParams {
    Tensor k, v, q,
        turned_q;  // (batch, heads, seq, dim); no query heads where there are no queries
    Tensor k_cache,
        v_cache;  // (pages, heads_kv, page_size, dim); a contiguous cache has one page a sequence
    Tensor k_scale, v_scale;  // (pages, heads_kv, page_size), of a cache of 8 bits
    Tensor k_mean;            // (batch, heads_kv, dim) that is taken off keys, or null
    const int *starts, *lengths;
    const int* table;  // (batch, pages_a_sequence), or null: sequence b is page b
    long long table_stride;
    const float *cos, *sin;  // (positions, rotary_dim / 2); null where rotary_dim is 0
    int seq, heads_kv, heads_q, head_dim, head_dim_v, rotary_dim, positions;
    int page_size, pages, pages_a_sequence;
};

// Where a token is.
struct Token {
    int batch, seq;  // in the arrays of new tokens
    int position;    // in its sequence
    int angle;       // row of the rotary tables
    bool is_new;
    int page = -1, slot = 0;  // in the cache, if it is new

    __device__ Token(const AppendParams& p, int index) : batch(index / p.seq), seq(index % p.seq) {
        position = p.lengths[batch] - p.seq + seq;
        angle = min(position, p.positions - 1);
        is_new = position >= p.starts[batch] && position >= 0 &&
                 position < static_cast<long long>(p.pages_a_sequence) * p.page_size;
        if (!is_new) return;
        page = p.table ? p.table[batch * p.table_stride + position / p.page_size] : batch;
        slot = position % p.page_size;
    }
    __device__ bool is_written(const AppendParams& p) const { return page >= 0 && page < p.pages; }
};

template <class T>
__device__ T* row_ptr(const Tensor& t, int batch, int head, int seq) {
    return head_ptr<T>(t, batch, head) + seq * t.stride_seq;
}

template <int VEC, class T>
__device__ void copy_chunk(T* to, const T* from) {
    if constexpr (VEC == 1)
        *to = *from;
    else
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

// The units that a row of keys or queries is made of: first those of two chunks that are turned,
// which hold VEC pairs, then those of one chunk that stays.
template <int VEC, bool INTERLEAVED>
struct Units {
    int half, pairs, count;

    __device__ Units(int rotary_dim, int dim)
        : half(rotary_dim / 2), pairs(half / VEC), count((dim - half) / VEC) {}

    // Where the chunks of a unit begin in the row.
    __device__ int first(int unit) const {
        if (unit >= pairs) return (unit + pairs) * VEC;
        return INTERLEAVED ? 2 * unit * VEC : unit * VEC;
    }
    __device__ int second(int unit) const { return first(unit) + (INTERLEAVED ? VEC : half); }

    // Reads a unit of two chunks and turns it.
    template <class T>
    __device__ void turn(const AppendParams& p, float (&turned)[2][VEC], const T* from, int unit,
                         int angle) const {
        float z[2][VEC], cos[VEC], sin[VEC];
        load_chunk(z[0], from + first(unit));
        load_chunk(z[1], from + second(unit));
        const long long angles = static_cast<long long>(angle) * half + unit * VEC;
        load_chunk(cos, p.cos + angles);
        load_chunk(sin, p.sin + angles);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            // Pair i: the same place in both chunks, or neighbours, which fill one chunk after the
            // other.
            const int x = INTERLEAVED ? 2 * i : i, y = INTERLEAVED ? 2 * i + 1 : VEC + i;
            const float zx = z[x / VEC][x % VEC], zy = z[y / VEC][y % VEC];
            turned[x / VEC][x % VEC] = zx * cos[i] - zy * sin[i];
            turned[y / VEC][y % VEC] = zy * cos[i] + zx * sin[i];
        }
    }

    template <class T>
    __device__ void copy(const AppendParams& p, T* to, const T* from, int unit, int angle,
                         bool turns) const {
        const int at = first(unit);
        if (unit >= pairs) {
            copy_chunk<VEC>(to + at, from + at);
            return;
        }
        const int at_y = second(unit);
        if (!turns) {
            copy_chunk<VEC>(to + at, from + at);
            copy_chunk<VEC>(to + at_y, from + at_y);
            return;
        }
        float turned[2][VEC];
        turn(p, turned, from, unit, angle);
        store_chunk(to + at, turned[0]);
        store_chunk(to + at_y, turned[1]);
    }
};
