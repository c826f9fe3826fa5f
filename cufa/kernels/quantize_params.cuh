// The parameter of quantize.cu, and which rows of x are in a tile.
#pragma once
#include "divisor.cuh"
#include "params.cuh"

constexpr int ROWS = 128;  // of a tile

// cufa/specs/quantize.py holds the same layout as a NumPy dtype.
struct QuantizeParams {
    Tensor x;  // (batch, heads, seq, head_dim); head_dim is a multiple of 8
    unsigned char*
        values;         // (batch, heads, seq, COLUMNS), or (batch, heads, blocks, COLUMNS, ROWS)
    float* scales;      // (batch, heads, scales_a_head), or one for all
    uint32_t* largest;  // the same, as bits; 0 in front of LARGEST; null for WHOLE
    const int* cu_seqlens;  // (sequences + 1,): where sequences begin in x that follow each other
    const int* used;        // (sequences,) or (batch,): how many of their rows count; null for all
    uint32_t signs[8];      // a bit for each column
    Divisor heads, blocks;  // of x; of ROWS rows, of a head
    int tiles, rows;        // of all heads; of x
    int seq, head_dim;      // seq: rows of values of a head
    int block_log2;         // log2 of the rows that share a scale
    int scales_a_head;      // 0: one for all
    int sequences;
    int overlaps;  // whether it waits for the launch in front only at its end
};

// The rows of x that are in a tile: `count` from `first` on, or as many as a tile has.
struct RowsOfTile {
    int first, count;
};

// Sequences that follow each other begin in blocks of their own, see cufa/quantized/sequences.py.
// No row outside of x is among them, whatever the offsets are. All come from L2, as x does: a
// launch that overlaps has not waited for the kernel that wrote them.
__device__ inline RowsOfTile rows_of_tile(const QuantizeParams& p, int batch, int block) {
    if (!p.cu_seqlens) {
        const int rows = p.used ? min(max(__ldcg(p.used + batch), 0), p.rows) : p.rows;
        return {block * ROWS, rows - block * ROWS};
    }
    auto first_of = [&](int i) { return min(max(__ldcg(p.cu_seqlens + i), 0), p.rows); };
    int i = 0;
    for (int more = p.sequences - 1; i < more;) {  // the last that begins at this block or before
        const int middle = i + (more - i + 1) / 2;
        if (first_of(middle) / ROWS + middle <= block)
            i = middle;
        else
            more = middle - 1;
    }
    const int first = first_of(i), before = max(block - first / ROWS - i, 0) * ROWS;
    const int rows = max(first_of(i + 1) - first, 0);
    return {first + before, (p.used ? min(rows, max(__ldcg(p.used + i), 0)) : rows) - before};
}
