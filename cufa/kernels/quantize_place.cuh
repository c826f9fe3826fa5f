// Where quantize.cu reads and writes a tile.
#pragma once
#include "quantize_params.cuh"

struct alignas(16) Place {
    long long from;     // elements of x in front of its first row
    int rows, padding;  // of x that count, from there on
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
