// New tokens into a cache of keys and values, at the end of each sequence; keys and queries are
// turned by rotary position embedding (Su et al. 2021) on the way. Token t of `seq` is at position
// lengths[b] - seq + t of sequence b, and new if that is not below starts[b]: where sequences have
// fewer new tokens than others, theirs are the last.
#include "chunk.cuh"
#include "params.cuh"

constexpr int THREADS = 128;

// cufa/specs/append.py holds the same layout as a NumPy dtype.
struct AppendParams {
    Tensor k, v, q,
        turned_q;  // (batch, heads, seq, dim); no query heads where there are no queries
    Tensor k_cache,
        v_cache;  // (pages, heads_kv, page_size, dim); a contiguous cache has one page a sequence
    const int *starts, *lengths;
    const int* table;  // (batch, pages_a_sequence), or null: sequence b is page b
    long long table_stride;
    const float *cos, *sin;  // (positions, rotary_dim / 2); null where rotary_dim is 0
    int seq, heads_kv, heads_q, head_dim, head_dim_v, rotary_dim, positions;
    int page_size, pages, pages_a_sequence;
};

template <int VEC, class T>
__device__ void copy_chunk(T* to, const T* from) {
    if constexpr (VEC == 1)
        *to = *from;
    else
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

// Copies one of the units that a row of keys or queries is made of: first those of two chunks that
// are turned, which hold VEC pairs, then those of one chunk that stays.
template <int VEC, bool INTERLEAVED, class T>
__device__ void copy_unit(const AppendParams& p, T* to, const T* from, int unit, int position,
                          bool turns) {
    const int half = p.rotary_dim / 2, pairs = half / VEC;
    if (unit >= pairs) {
        const int at = (unit + pairs) * VEC;
        copy_chunk<VEC>(to + at, from + at);
        return;
    }
    const int at_x = INTERLEAVED ? 2 * unit * VEC : unit * VEC;
    const int at_y = INTERLEAVED ? at_x + VEC : at_x + half;
    if (!turns) {
        copy_chunk<VEC>(to + at_x, from + at_x);
        copy_chunk<VEC>(to + at_y, from + at_y);
        return;
    }
    float z[2][VEC], turned[2][VEC], cos[VEC], sin[VEC];
    load_chunk(z[0], from + at_x);
    load_chunk(z[1], from + at_y);
    const long long angles = static_cast<long long>(position) * half + unit * VEC;
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
    store_chunk(to + at_x, turned[0]);
    store_chunk(to + at_y, turned[1]);
}

template <class T>
__device__ T* row_ptr(const Tensor& t, int batch, int head, int seq) {
    return head_ptr<T>(t, batch, head) + seq * t.stride_seq;
}

// A block has one token of one sequence, or a part of its heads; a thread one unit.
template <class T, int VEC, bool INTERLEAVED>
__global__ void __launch_bounds__(THREADS) append(const __grid_constant__ AppendParams p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const int b = blockIdx.x / p.seq, t = blockIdx.x % p.seq;
    const int units = (p.head_dim - p.rotary_dim / 2) / VEC,
              units_v = p.head_dim_v / VEC;  // of a row
    int item = blockIdx.y * THREADS + threadIdx.x;

    const int position = p.lengths[b] - p.seq + t;
    const bool is_new = position >= p.starts[b] && position >= 0 &&
                        position < static_cast<long long>(p.pages_a_sequence) * p.page_size;
    const int angle = min(position, p.positions - 1);
    if (item < p.heads_q * units) {
        const int head = item / units;
        copy_unit<VEC, INTERLEAVED>(p, row_ptr<T>(p.turned_q, b, head, t),
                                    row_ptr<const T>(p.q, b, head, t), item % units, angle, is_new);
        return;
    }
    item -= p.heads_q * units;
    if (!is_new || item >= p.heads_kv * (units + units_v)) return;

    const int page = p.table ? p.table[b * p.table_stride + position / p.page_size] : b;
    const int slot = position % p.page_size;
    if (page < 0 || page >= p.pages) return;
    if (item < p.heads_kv * units) {
        const int head = item / units;
        copy_unit<VEC, INTERLEAVED>(p, row_ptr<T>(p.k_cache, page, head, slot),
                                    row_ptr<const T>(p.k, b, head, t), item % units, angle, true);
    } else {
        item -= p.heads_kv * units;
        const int head = item / units_v, at = item % units_v * VEC;
        copy_chunk<VEC>(row_ptr<T>(p.v_cache, page, head, slot) + at,
                        row_ptr<const T>(p.v, b, head, t) + at);
    }
}
