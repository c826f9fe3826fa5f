// Which rows and keys a lane has scores of.
#pragma once
#include "divisor.cuh"

// Where the accumulators of m16n8 products are: `row` and `key` are those of the warp's first
// score. A lane holds the rows lane / 4 + {0, 8} and the keys 2 (lane % 4) + {0, 1} of each piece.
// Rows are those of 2^pack_log2 heads, query by query: of a pack of them.
struct At {
    int lane, row, key;
    int batch, pack;
    int pack_log2 = 0;

    __device__ int query(int mt, int h) const { return query_of(row_of(mt, h)); }
    __device__ int head(int mt, int h) const { return head_of(row_of(mt, h)); }
    __device__ int query_of(int row) const { return row >> pack_log2; }
    __device__ int head_of(int row) const { return (pack << pack_log2) + row % (1 << pack_log2); }
    __device__ int row_of(int mt, int h) const { return row + lane / 4 + mt * 16 + h * 8; }
    __device__ int key_of(int nt, int i) const { return key + lane % 4 * 2 + nt * 8 + i; }
};

// The same, of rows of any number of heads, query by query.
struct GroupedAt {
    int lane, row, key;
    const Divisor& group;
    int batch, first_head;

    __device__ int query(int mt, int h) const { return group.quotient(row_of(mt, h)); }
    __device__ int head(int mt, int h) const { return first_head + group.remainder(row_of(mt, h)); }
    __device__ int row_of(int mt, int h) const { return row + lane / 4 + mt * 16 + h * 8; }
    __device__ int key_of(int nt, int i) const { return key + lane % 4 * 2 + nt * 8 + i; }
};
