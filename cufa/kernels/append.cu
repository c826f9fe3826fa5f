// New tokens into a cache of keys and values, at the end of each sequence; keys and queries are
// turned by rotary position embedding (Su et al. 2021) on the way.
#include "append.cuh"

// A block has one token of one sequence, or a part of its heads; a thread one unit.
template <class T, int VEC, bool INTERLEAVED>
__global__ void __launch_bounds__(THREADS) append(const __grid_constant__ AppendParams p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const Token token(p, blockIdx.x);
    const Units<VEC, INTERLEAVED> units(p.rotary_dim, p.head_dim);
    const int units_v = p.head_dim_v / VEC;  // of a row
    int item = blockIdx.y * THREADS + threadIdx.x;
    if (item < p.heads_q * units.count) {
        const int head = item / units.count;
        units.copy(p, row_ptr<T>(p.turned_q, token.batch, head, token.seq),
                   row_ptr<const T>(p.q, token.batch, head, token.seq), item % units.count,
                   token.angle, token.is_new);
        return;
    }
    item -= p.heads_q * units.count;
    if (!token.is_written(p) || item >= p.heads_kv * (units.count + units_v)) return;
    if (item < p.heads_kv * units.count) {
        const int head = item / units.count;
        units.copy(p, row_ptr<T>(p.k_cache, token.page, head, token.slot),
                   row_ptr<const T>(p.k, token.batch, head, token.seq), item % units.count,
                   token.angle, true);
    } else {
        item -= p.heads_kv * units.count;
        const int head = item / units_v, at = item % units_v * VEC;
        copy_chunk<VEC>(row_ptr<T>(p.v_cache, token.page, head, token.slot) + at,
                        row_ptr<const T>(p.v, token.batch, head, token.seq) + at);
    }
}
