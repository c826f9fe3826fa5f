// The threads of quantize.cu: what a lane holds of a row, and where.
#pragma once
#include "quantize_params.cuh"

constexpr int LANES = 4;               // of a row
constexpr int THREADS = ROWS * LANES;  // of a block
constexpr int WARPS = THREADS / 32;    // of a block
constexpr int WARP_ROWS = 32 / LANES;  // of a tile
constexpr int UNIT = 8;                // columns of a lane that follow each other
constexpr int SPAN = LANES * UNIT;     // columns of a unit of all lanes
constexpr int KEYS_AT_ONCE = 16;       // of a tile that a thread transposes at once

// Where a tile of e4m3 that is transposed has a row, and where the row has a column. Lanes read
// from their own banks, of rows that are KEYS_AT_ONCE apart, and write to them: spans change
// places.
template <int COLUMNS>
struct Turned {
    static constexpr int BYTES = ROWS * COLUMNS + ROWS / KEYS_AT_ONCE * 16;

    __device__ static constexpr int row_place(int row) {
        return row * COLUMNS + row / KEYS_AT_ONCE * 16;
    }
    __device__ static constexpr int column_place(int row, int column) {
        constexpr int OF_TWO = COLUMNS & -COLUMNS;              // the largest power of two
        constexpr int APART = OF_TWO < 128 ? 128 / OF_TWO : 1;  // rows of the same banks
        return column ^ row / APART % (128 / SPAN / APART) * SPAN;
    }
};
