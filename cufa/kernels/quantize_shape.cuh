// The threads of quantize.cu: what a lane holds of a row, and where.
#pragma once
#include "quantize_params.cuh"

constexpr int KEYS = 16;  // of a tile that a thread transposes at once

// The threads of a block: LANES to a row, of which TOGETHER columns are transformed together. A
// thread has units of columns, see hadamard.cuh. cufa/specs/quantize.py has the same numbers.
template <int COLUMNS, int LANES>
struct Shape {
    static constexpr int THREADS = ROWS * LANES, WARPS = THREADS / 32, WARP_ROWS = 32 / LANES;
    static constexpr int TOGETHER = COLUMNS & -COLUMNS, GROUP = TOGETHER / LANES;
    static constexpr int UNIT = GROUP / LANES, UNITS = COLUMNS / GROUP;
    // Bytes that a lane stores at once: so the lanes of a row store SPAN, a sector of L2 or more.
    static constexpr int STORED = GROUP < 32 ? GROUP : UNIT, SPAN = LANES * STORED;
    static constexpr int BYTES = ROWS * COLUMNS + ROWS / KEYS * 16;  // of a tile to be transposed

    // The first column of a unit, as it is stored and before the transform.
    __device__ static constexpr int column(int unit, int lane) {
        return unit * UNIT / STORED * SPAN + lane * STORED + unit * UNIT % STORED;
    }
    __device__ static constexpr int column_before(int unit, int lane) {
        return unit / LANES * TOGETHER + lane * GROUP + (unit % LANES ^ lane) * UNIT;
    }
    // Where a tile to be transposed has a row, and where the row has a column. Lanes read from
    // their own banks, of rows that are KEYS apart, and write to them: spans change places.
    __device__ static constexpr int row_place(int row) { return row * COLUMNS + row / KEYS * 16; }
    __device__ static constexpr int column_place(int row, int column) {
        constexpr int APART = TOGETHER < 128 ? 128 / TOGETHER : 1;  // rows of the same banks
        return column ^ row / APART % (128 / SPAN / APART) * SPAN;
    }
};
