// Tiles in shared memory: their swizzled layout, and copying them from global memory.
#pragma once
#include "ptx.cuh"

// A [ROWS, COLS] tile stored as panels of up to 128 bytes a row. Inside a panel the 16-byte chunks of a
// row are permuted by XOR with the row number, so that the eight rows (or the eight chunks) that one
// phase of a warp's access touches lie in different banks. It is TMA's 128/64/32-byte swizzle.
template <int ROWS_, int COLS_, int ELEMENT_BYTES>
struct SmemTile {
    static constexpr int ROWS = ROWS_, COLS = COLS_;
    static constexpr int CHUNK = 16 / ELEMENT_BYTES;  // elements a chunk
    static constexpr int CHUNKS = COLS / CHUNK;       // chunks a row
    static constexpr int PANEL = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;  // chunks a panel row
    static constexpr int bytes = ROWS * COLS * ELEMENT_BYTES;
    static_assert(COLS % (2 * CHUNK) == 0 && ROWS % 8 == 0, "a tile is made of 8-row by 32-byte pieces");

    static __device__ uint32_t offset(int row, int chunk) {
        const int swizzled = (chunk % PANEL) ^ (row / (8 / PANEL) % PANEL);
        return (chunk / PANEL * ROWS + row) * (PANEL * 16) + swizzled * 16;
    }

    // The address `rows` rows and `chunks` chunks on from `lane_address`, which is that of a row below 16 and
    // of chunk 0 or 1. `rows` is a multiple of 8 and `chunks` of 2: the swizzle is then one XOR of a constant.
    static __device__ uint32_t advance(uint32_t lane_address, int rows, int chunks) {
        return (lane_address ^ (chunks % PANEL * 16)) + (chunks / PANEL * ROWS + rows) * (PANEL * 16);
    }
};

// Lane addresses for ldmatrix.x4 on 16 rows by two chunks. As operand A (and transposed B) the two
// row halves come first, as operand B the two chunks.
template <class Tile>
__device__ uint32_t lane_address_a(uint32_t tile, int lane) {
    return tile + Tile::offset(lane % 16, lane / 16);
}
template <class Tile>
__device__ uint32_t lane_address_b(uint32_t tile, int lane) {
    return tile + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Starts the copy of a tile. Rows from `rows` on and columns from `cols` on are filled with zeros and not read.
// A thread copies the same chunk of every STEP-th row, in each panel.
template <class Tile, int THREADS, class T>
__device__ void load_tile_async(uint32_t tile, const T* gmem, long long stride, int rows, int cols) {
    constexpr int STEP = THREADS / Tile::PANEL;
    static_assert(STEP % 8 == 0, "rows that a thread copies share their swizzle");
    const int row0 = threadIdx.x / Tile::PANEL, chunk0 = threadIdx.x % Tile::PANEL;
    const T* src = gmem + row0 * stride + chunk0 * Tile::CHUNK;
    const uint32_t dst = tile + Tile::offset(row0, chunk0);
#pragma unroll
    for (int i = 0; i < Tile::ROWS; i += STEP) {
        if (Tile::ROWS % STEP != 0 && row0 + i >= Tile::ROWS) break;
#pragma unroll
        for (int chunk = 0; chunk < Tile::CHUNKS; chunk += Tile::PANEL) {
            const int cols_left = cols - (chunk0 + chunk) * Tile::CHUNK;
            const int elements = row0 + i < rows ? max(0, min(Tile::CHUNK, cols_left)) : 0;
            cp_async_16(Tile::advance(dst, i, chunk), src + chunk * Tile::CHUNK, elements * static_cast<int>(sizeof(T)));
        }
        src += STEP * stride;
    }
}
