// Tiles in shared memory as TMA writes them and wgmma reads them.
#pragma once
#include "params.cuh"
#include "ptx_sm90.cuh"
#include "tile.cuh"

// The tensor maps that a launch passes to kernels that copy by TMA.
struct TensorMaps {
    TensorMap q, k, v, o;
};
template <class Arguments>
struct TmaArguments {
    TensorMaps maps;
    Arguments params;
};

// A tile in the layout of SmemTile, whose swizzle TMA and wgmma know, too.
template <int ROWS_, int COLS_>
struct WgmmaTile : SmemTile<ROWS_, COLS_, 2> {
    using Tile = SmemTile<ROWS_, COLS_, 2>;
    static constexpr int ROW_BYTES = Tile::PANEL * 16;
    static constexpr int PANEL_COLS = ROW_BYTES / 2;
    static constexpr int PANEL_BYTES = ROWS_ * ROW_BYTES;

    // The low word of the descriptor of a wgmma operand that begins at `address`: the address in
    // units of 16 bytes, and the distance of panels, which counts where K runs along the rows.
    static __device__ uint32_t operand(uint32_t address) {
        return (address >> 4) + (PANEL_BYTES >> 4 << 16);
    }
    // Sixteen columns from 16 k on, K along the columns.
    static __device__ uint64_t columns(uint32_t operand, int k) {
        const int col = 16 * k;
        return descriptor(operand + ((col / PANEL_COLS * PANEL_BYTES + col % PANEL_COLS * 2) >> 4));
    }
    // Sixteen rows from 16 k on, K along the rows.
    static __device__ uint64_t rows(uint32_t operand, int k) {
        return descriptor(operand + (16 * k * ROW_BYTES >> 4));
    }

    // Starts the copy of the tile's rows from `tile_row` on, as many as the map says, from `row`
    // and on. A row of Q is one of the packed heads at a query.
    static __device__ void load(uint32_t tile, int tile_row, const TensorMap& map, uint32_t bar,
                                int row, int head, int batch, unsigned long long policy) {
#pragma unroll
        for (int i = 0; i < COLS_ / PANEL_COLS; ++i)
            tma_load(tile + i * PANEL_BYTES + tile_row * ROW_BYTES, map, bar, i * PANEL_COLS, 0,
                     row, head, batch, policy);
    }
    // The other way.
    static __device__ void store(const TensorMap& map, uint32_t tile, int tile_row, int row,
                                 int head, int batch) {
#pragma unroll
        for (int i = 0; i < COLS_ / PANEL_COLS; ++i)
            tma_store(map, tile + i * PANEL_BYTES + tile_row * ROW_BYTES, i * PANEL_COLS, 0, row,
                      head, batch);
    }

 private:
    // The high word: the distance of eight rows, and the swizzle.
    static __device__ uint64_t descriptor(uint32_t low) {
        constexpr uint32_t SWIZZLE = Tile::PANEL == 8 ? 1 : Tile::PANEL == 4 ? 2 : 3;
        return wgmma_descriptor(low, (8 * ROW_BYTES >> 4) | SWIZZLE << 30);
    }
};

// Queues D = A B^T, for tiles whose `operand` is given: S = Q K^T.
template <class T, class ATile, class BTile, int NT>
__device__ void queue_product(float (&d)[NT][4], uint32_t a, uint32_t b) {
    constexpr int STEPS = ATile::COLS / 16;
#pragma unroll
    for (int k = 0; k < STEPS - 1; k += 2)
        Wgmma<T, BTile::ROWS>::ss(d, ATile::columns(a, k), BTile::columns(b, k),
                                  ATile::columns(a, k + 1), BTile::columns(b, k + 1), k > 0);
    if constexpr (STEPS % 2 == 1)
        Wgmma<T, BTile::ROWS>::ss(d, ATile::columns(a, STEPS - 1), BTile::columns(b, STEPS - 1),
                                  STEPS > 1);
}
// Queues D = A B, or D += A B, for A in registers and a tile whose `operand` is given: O += P V.
template <class T, class BTile, int NT, int STEPS>
__device__ void queue_product(float (&d)[NT][4], const uint32_t (&a)[STEPS][4], uint32_t b,
                              bool accumulates) {
#pragma unroll
    for (int k = 0; k < STEPS - 1; k += 2)
        Wgmma<T, BTile::COLS>::rs(d, a[k], BTile::rows(b, k), a[k + 1], BTile::rows(b, k + 1),
                                  k > 0 || accumulates);
    if constexpr (STEPS % 2 == 1)
        Wgmma<T, BTile::COLS>::rs(d, a[STEPS - 1], BTile::rows(b, STEPS - 1),
                                  STEPS > 1 || accumulates);
}

// A ring of slots in shared memory, filled by one thread. A slot is free again when its readers
// have arrived: a thread of each warp of consumers; for Q, a thread of each warpgroup if O leaves
// through the slot, else every thread. The counter i of the tiles that pass through the ring says
// which slot is meant, and how often it has been used before.
template <int SLOTS>
struct Ring {
    uint32_t full, empty;  // SLOTS barriers each

    static constexpr int bytes = 16 * SLOTS;
    __device__ explicit Ring(uint32_t barriers) : full(barriers), empty(barriers + 8 * SLOTS) {}

    static __device__ uint32_t slot(uint32_t i) { return i % SLOTS; }
    __device__ void init(int arrivals) const {
        for (int s = 0; s < SLOTS; ++s)
            mbarrier_init(full + 8 * s, 1), mbarrier_init(empty + 8 * s, arrivals);
    }
    // Producer: waits until the slot is free; then announces bytes that are copied to it.
    __device__ void acquire(uint32_t i) const {
        mbarrier_wait(empty + 8 * slot(i), i / SLOTS % 2 ^ 1);
    }
    __device__ uint32_t expect(uint32_t i, uint32_t bytes) const {
        mbarrier_arrive_expect(full + 8 * slot(i), bytes);
        return full + 8 * slot(i);
    }
    // Consumers: wait until the slot is filled; free it, once a warp.
    __device__ void wait(uint32_t i) const { mbarrier_wait(full + 8 * slot(i), i / SLOTS % 2); }
    __device__ void release(uint32_t i) const {
        if (threadIdx.x % 32 == 0) arrive(i);
    }
    // The calling thread's part in that.
    __device__ void arrive(uint32_t i) const { mbarrier_arrive(empty + 8 * slot(i)); }
    // Releases a slot that is not read. No lane may still wait then.
    __device__ void pass_over(uint32_t i) const {
        wait(i);
        __syncwarp();
        release(i);
    }
};
