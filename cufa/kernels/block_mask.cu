// Which tiles of queries and keys a caller's own mask hides: 0 where no pair of a tile is seen, 2
// where all are, else 1.
#include "expression.cuh"
#include "ptx.cuh"
#include "score.cuh"

constexpr int WARPS = 4;

// cufa/specs/block_mask.py holds the same layout as a NumPy dtype.
struct BlockMaskParams {
    unsigned char* kinds;  // (batch, heads, rows, columns)
    int heads, rows, columns, tiles;
    int seq_q, seq_kv;
    int queries, keys;  // of a tile
};

template <class MASK>
struct BlockMaskArguments : BlockMaskParams, MASK {};

// A warp looks at the pairs of a tile until it has found both kinds.
template <class MASK>
__global__ void __launch_bounds__(WARPS * 32)
    block_mask(const __grid_constant__ BlockMaskArguments<MASK> p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const MASK& mask = p;
    const int tile = block_index() * WARPS + thread_index() / 32, lane = thread_index() % 32;
    if (tile >= p.tiles) return;
    const Sequence sequence{p.seq_q, p.seq_kv};
    const int column = tile % p.columns, row = tile / p.columns % p.rows,
              of_head = tile / p.columns / p.rows;
    const int first_key = column * p.keys, end_key = min(first_key + p.keys, p.seq_kv);
    const int first_query = row * p.queries, end_query = min(first_query + p.queries, p.seq_q);
    int hidden = 0, seen = 0;
    for (int query = first_query; query < end_query && !(hidden && seen); ++query) {
        for (int key = first_key + lane; key < end_key; key += 32) {
            if (mask.hides({sequence, of_head / p.heads, of_head % p.heads, query, key}))
                hidden = 1;
            else
                seen = 1;
        }
        hidden = __any_sync(0xffffffff, hidden), seen = __any_sync(0xffffffff, seen);
    }
    if (lane == 0) p.kinds[tile] = seen + (seen && !hidden);
}
