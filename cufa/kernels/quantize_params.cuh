// The parameter of quantize.cu.
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
    const int*
        cu_seqlens;   // (sequences + 1,): first rows of packed sequences in x; null if it has none
    const int* used;  // (sequences,) or (batch,): how many of their rows count; null for all
    uint32_t signs[8];      // a bit for each column
    Divisor heads, blocks;  // of x; of ROWS rows, of a head
    int tiles, rows;        // of all heads; of x
    int seq, head_dim;      // seq: rows of values of a head
    int block_log2;         // log2 of the rows that share a scale
    int scales_a_head;      // 0: one for all
    int sequences;
    int overlaps;  // whether it waits for the launch in front only at its end
};
