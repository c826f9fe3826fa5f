// Tiles in shared memory: their swizzled layout, and copying them from global memory.
#pragma once
#include "ptx.cuh"

// A [ROWS, COLS] tile stored as panels of up to 128 bytes a row. Inside a panel the 16-byte chunks
// of a row are permuted by XOR with the row number, so that the eight rows (or the eight chunks)
// that one phase of a warp's access touches lie in different banks. It is TMA's 128/64/32-byte
// swizzle.
template <int ROWS_, int COLS_, int ELEMENT_BYTES>
struct SmemTile {
    static constexpr int ROWS = ROWS_, COLS = COLS_;
    static constexpr int CHUNK = 16 / ELEMENT_BYTES;  // elements a chunk
    static constexpr int CHUNKS = COLS / CHUNK;       // chunks a row
    static constexpr int PANEL = CHUNKS % 8 == 0   ? 8
                                 : CHUNKS % 4 == 0 ? 4
                                                   : 2;  // chunks a panel row
    static constexpr int bytes = ROWS * COLS * ELEMENT_BYTES;
    static_assert(COLS % (2 * CHUNK) == 0 && ROWS % 8 == 0,
                  "a tile is made of 8-row by 32-byte pieces");

    static __device__ uint32_t offset(int row, int chunk) {
        const int swizzled = (chunk % PANEL) ^ (row / (8 / PANEL) % PANEL);
        return (chunk / PANEL * ROWS + row) * (PANEL * 16) + swizzled * 16;
    }
    // The same place in a tile that begins at a multiple of 128 bytes, for copies with a policy.
    // XOR comes last: from a sum of a number that is the same in all lanes and one that is not,
    // ptxas (CUDA 13) may make illegal instructions there.
    static __device__ uint32_t place(uint32_t tile, int row, int chunk) {
        return (tile + (chunk / PANEL * ROWS + row) * (PANEL * 16)) ^
               (offset(row, chunk) % (PANEL * 16));
    }

    // The offset `rows` rows and `panels` panels on from that of a row whose number has no bit in
    // common with `rows`, and of a chunk of the first panel.
    static __device__ uint32_t move_on(uint32_t offset, int rows, int panels) {
        return (offset ^ (rows / (8 / PANEL) % PANEL * 16)) + (panels * ROWS + rows) * (PANEL * 16);
    }

    // The offset `rows` rows and `chunks` chunks on from `lane_offset`, which is that of a row
    // below 16 and of a chunk of the first panel. `rows` is a multiple of 8, and `chunks` of 2 if
    // the chunk was 0 or 1, else of PANEL: the swizzle is then one XOR with a constant.
    static __device__ uint32_t advance(uint32_t lane_offset, int rows, int chunks) {
        return (lane_offset ^ (chunks % PANEL * 16)) +
               (chunks / PANEL * ROWS + rows) * (PANEL * 16);
    }
};

// A lane's offset for ldmatrix.x4 on 16 rows by two chunks. As operand A (and transposed B) the two
// row halves come first, as operand B the two chunks.
template <class Tile>
__device__ uint32_t lane_offset_a(int lane = thread_index() % 32) {
    return Tile::offset(lane % 16, lane / 16);
}
template <class Tile>
__device__ uint32_t lane_offset_b(int lane = thread_index() % 32) {
    return Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Copies tiles of a (rows, cols) matrix from global memory. A thread copies the same chunk of every
// STEP-th row, in each panel.
template <class Tile, int THREADS, class T>
struct TileLoader {
    static constexpr int STEP = THREADS / Tile::PANEL;
    static_assert(STEP % 8 == 0, "rows that a thread copies share their swizzle");

    const T* gmem;
    long long stride;
    int rows, cols;

    // This thread's first chunk of the tile that begins at `row`.
    __device__ const T* source(int row) const {
        const int thread = thread_index();
        return gmem + (row + thread / Tile::PANEL) * stride + thread % Tile::PANEL * Tile::CHUNK;
    }

    // Starts the copy of the tile that begins at `row`, `src` being its source. Zeros stand for
    // elements beyond the matrix, which are not read. Rows are made of whole chunks:
    // cufa/arrays.py pads others with zeros.
    __device__ void start(uint32_t tile, int row, const T* src) const {
        const int thread = thread_index();
        const int row0 = thread / Tile::PANEL, chunk0 = thread % Tile::PANEL;
        const uint32_t dst = Tile::offset(row0, chunk0);
#pragma unroll
        for (int i = 0; i < Tile::ROWS; i += STEP) {
            if (Tile::ROWS % STEP != 0 && row0 + i >= Tile::ROWS) break;
#pragma unroll
            for (int chunk = 0; chunk < Tile::CHUNKS; chunk += Tile::PANEL) {
                const bool inside = row + row0 + i < rows && (chunk0 + chunk) * Tile::CHUNK < cols;
                cp_async_16(tile + Tile::advance(dst, i, chunk), src + chunk * Tile::CHUNK, inside);
            }
            src += STEP * stride;
        }
    }
};
