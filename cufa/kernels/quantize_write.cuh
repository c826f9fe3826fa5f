// How quantize.cu writes a tile that it transposes.
#pragma once
#include "ptx_expand.cuh"
#include "quantize_shape.cuh"

// Writes a tile as (COLUMNS, ROWS), where keys have the order 0 1 8 9 2 3 10 11 ... of 16, as wgmma
// of 8 bits takes weights from the registers in which wgmma leaves scores. Columns have the order
// of VTile8 in fp8_config.cuh.
template <int COLUMNS>
__device__ void write_transposed(unsigned char* to, const unsigned char* tile) {
    using Tile = Turned<COLUMNS>;
    constexpr int GROUPS = ROWS / KEYS_AT_ONCE, QUAD = 4;  // columns of a thread
// One turn at most; written as a branch, it takes more registers.
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUPS * COLUMNS / QUAD; i += THREADS) {
        const int group = i % GROUPS, column = i / GROUPS * QUAD;
        const unsigned char* from = tile + Tile::row_place(group * KEYS_AT_ONCE);
        uint32_t y[QUAD][KEYS_AT_ONCE / 4];
#pragma unroll
        for (int j = 0; j < KEYS_AT_ONCE / 4; ++j) {
            uint32_t x[4];  // of four keys
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int key = 2 * j + n % 2 + n / 2 * 8;
                x[n] = *reinterpret_cast<const uint32_t*>(from + key * COLUMNS +
                                                          Tile::column_place(key, column));
            }
            const uint32_t low01 = permuted(x[0], x[1], 0x5140),
                           low23 = permuted(x[2], x[3], 0x5140);
            const uint32_t up01 = permuted(x[0], x[1], 0x7362), up23 = permuted(x[2], x[3], 0x7362);
            y[0][j] = permuted(low01, low23, 0x5410), y[1][j] = permuted(low01, low23, 0x7632);
            y[2][j] = permuted(up01, up23, 0x5410), y[3][j] = permuted(up01, up23, 0x7632);
        }
        // The row of the first pair of columns; the other pair is eight rows on.
        const int place = column / 32 * 32 + column / 4 % 2 * 16 + column / 8 % 4 * 2;
#pragma unroll
        for (int c = 0; c < QUAD; ++c)
            *reinterpret_cast<uint4*>(to + (place + c / 2 * 8 + c % 2) * ROWS +
                                      group * KEYS_AT_ONCE) = {y[c][0], y[c][1], y[c][2], y[c][3]};
    }
}
