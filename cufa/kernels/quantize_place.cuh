// Where quantize.cu reads and writes a tile.
#pragma once
#include "quantize_params.cuh"

constexpr int TURNS = 8;  // whose places are in shared memory

// Rows of x from `first` on that are in a tile. `count` may be more than a tile has, or negative.
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

struct alignas(16) Place {
    long long from;     // elements of x in front of its first row
    int rows;           // of x that count, from there on
    long long to;       // bytes of values in front of it
    int stored, scale;  // how many of its rows are stored; its first scale
};

template <int COLUMNS, bool TRANSPOSED>
__device__ Place place_of(const QuantizeParams& p, int tile) {
    const int head = p.blocks.quotient(tile), block = tile - head * p.blocks.divisor;
    const int batch = p.heads.quotient(head), head_of_batch = head - batch * p.heads.divisor;
    const RowsOfTile its = rows_of_tile(p, batch, block);
    Place place;
    place.from =
        batch * p.x.stride_batch + head_of_batch * p.x.stride_head + its.first * p.x.stride_seq;
    place.rows = its.count;
    const long long row = TRANSPOSED ? static_cast<long long>(tile) * ROWS
                                     : static_cast<long long>(head) * p.seq + block * ROWS;
    place.to = row * COLUMNS;
    place.stored = p.seq - block * ROWS;
    place.scale = head * p.scales_a_head + (block * ROWS >> p.block_log2);
    return place;
}
