// dQ = dS K of a tile: dS of a warp's keys goes to shared memory, from where each warp takes rows.
// The other products are those of the forward pass, on tiles that change their roles.
#pragma once
#include "ptx.cuh"
#include "tile.cuh"

// A warp's dS^T, from `key` of the tile on, to a 16-bit tile of dS^T.
template <class T, class STile, int MT, int NT>
__device__ void store_ds_16bit(const float (&rdS)[MT][NT][4], uint32_t tile, int key) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sts_32(tile + STile::offset(key + mt * 16 + h * 8 + lane / 4, nt) + lane % 4 * 4,
                       pack2<T>(rdS[mt][nt][2 * h], rdS[mt][nt][2 * h + 1]));
}
// dQ += dS K of 16 rows, from a multiple of 16 on, and of the 8-column pieces from an even one on.
template <class T, class STile, class KTile, int OT>
__device__ void dq_mma(float (&rdQ)[OT][4], uint32_t tile_ds, uint32_t tile_k, int row, int piece) {
    const uint32_t lane_ds = lane_offset_b<STile>(), lane_k = lane_offset_a<KTile>();
#pragma unroll
    for (int kk = 0; kk < KTile::ROWS / 16; ++kk) {
        uint32_t rdS[4];
        ldmatrix_x4_trans(rdS, tile_ds + STile::advance(lane_ds, kk * 16, row / 8));
#pragma unroll
        for (int ot = 0; ot < OT; ot += 2) {
            uint32_t rK[4];
            ldmatrix_x4_trans(rK, tile_k + KTile::advance(lane_k, kk * 16, piece + ot));
            mma_m16n8k16<T>(rdQ[ot], rdS, rK[0], rK[1]);
            mma_m16n8k16<T>(rdQ[ot + 1], rdS, rK[2], rK[3]);
        }
    }
}

// A warp's dS^T, from `key` of the tile on, to a float32 tile of dS.
template <class STile, int MT, int NT>
__device__ void store_ds_fp32(const float (&rdS)[MT][NT][4], uint32_t tile, int key) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int of = key + mt * 16 + i / 2 * 8 + lane / 4;
                sts(tile + STile::offset(nt * 8 + lane % 4 * 2 + i % 2, of / 4) + of % 4 * 4,
                    rdS[mt][nt][i]);
            }
}
// 16 rows of it, as accumulators: KEYS from `key` on.
template <class STile, int NT>
__device__ void load_ds_fp32(float (&rdS)[1][NT][4], uint32_t tile, int row, int key) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int of = key + nt * 8 + lane % 4 * 2;
            const float2 two =
                lds_2(tile + STile::offset(row + h * 8 + lane / 4, of / 4) + of % 4 * 4);
            rdS[0][nt][2 * h] = two.x, rdS[0][nt][2 * h + 1] = two.y;
        }
}

// How the warps that compute dQ share a tile of it: rows first, then columns, a multiple of LEAST
// each.
template <int HEAD_DIM, int BM, int WARPS, int LEAST>
struct DqShare {
    static constexpr int ROW_PARTS = BM / 16 < WARPS ? BM / 16 : WARPS;
    static constexpr int COL_PARTS = WARPS / ROW_PARTS;
    static constexpr int ROWS = BM / ROW_PARTS, COLS = HEAD_DIM / COL_PARTS;
    // Columns at a time, for which registers must be left.
    static constexpr int STEP = COLS % 64 == 0 && LEAST < 32 ? 64 : COLS % 32 == 0 ? 32 : LEAST;
    static_assert(WARPS % ROW_PARTS == 0 && HEAD_DIM % (COL_PARTS * LEAST) == 0,
                  "columns of dQ are shared in whole steps");

    static __device__ int row() { return thread_index() / 32 % ROW_PARTS * ROWS; }
    static __device__ int col() { return thread_index() / 32 / ROW_PARTS * COLS; }
};
