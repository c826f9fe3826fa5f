// Which keys a query sees. Every kernel asks here for the keys that a row sees: a new mask or score
// expression begins in this file.
#pragma once
#include "ptx.cuh"

// With PACKED, the rows are those of 2^pack_log2 heads, query by query.
template <bool CAUSAL, bool PACKED = false>
struct Mask {
    int seq_kv;
    int diagonal;  // seq_kv - seq_q: causal is aligned bottom-right, query i sees keys j <= i + diagonal
    int pack_log2;

    __device__ Mask(int seq_q, int seq_kv, int pack_log2 = 0)
        : seq_kv(seq_kv), diagonal(seq_kv - seq_q), pack_log2(pack_log2) {}

    __device__ int query(int row) const { return PACKED ? row >> pack_log2 : row; }

    // One past the last key that any of the rows [row, row + rows) sees; 0 when there is none.
    __device__ int kv_end(int row, int rows) const {
        return CAUSAL ? max(0, min(seq_kv, query(row + rows - 1) + 1 + diagonal)) : seq_kv;
    }
    // The last key that a row sees, below 0 when there is none.
    __device__ int last_key(int row) const { return CAUSAL ? min(seq_kv - 1, query(row) + diagonal) : seq_kv - 1; }

    // How many keys from the first on every row from `row` on sees: tiles among them need no mask.
    __device__ int keys_before_mask(int row) const { return max(0, last_key(row) + 1); }

    // Sets the scores that are not visible to -inf, in the accumulator fragments of m16n8 products. `row` and
    // `key` are those of the warp's first score; lane `lane` holds the rows lane / 4 + {0, 8} and keys
    // 2 (lane % 4) + {0, 1} of each piece.
    template <int MT, int NT>
    __device__ void apply(float (&rS)[MT][NT][4], int lane, int row, int key) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int last = last_key(row + lane / 4 + mt * 16 + h * 8) - (key + lane % 4 * 2);
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (nt * 8 + i > last) rS[mt][nt][2 * h + i] = -INF;
            }
    }
};
