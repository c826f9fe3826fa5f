// P of fa3_wgmma.cu from scores that are computed once more, where P came out far too large.
#pragma once
#include "softmax.cuh"
#include "tile_sm90.cuh"

// Computes those of a warp's 16 rows of Q from `row` on again that `again` marks: moves m to their
// maximum over a tile of keys, and puts their P into rP. `l` is their sum before. It uses mma.sync,
// as wgmma takes four warps; 16 keys at a time, twice over, in one short loop: this is rare, and
// code takes time to compile. `step` brings 16 rows of S to the softmax's units, given the place of
// their first key.
template <class T, class QTile, class KTile, class Softmax, int NT, class Step>
__device__ void exponentiate_again(Softmax& softmax, float (&rP)[1][NT][4],
                                   const bool (&again)[1][2], const float (&l)[1][2],
                                   uint32_t tile_q, int row, uint32_t tile_k, Step step) {
    const int lane = reread_thread_index() % 32;
    const uint32_t lane_q = tile_q + lane_offset_a<QTile>(lane) + row * QTile::ROW_BYTES;
    const uint32_t lane_k = tile_k + lane_offset_b<KTile>(lane);
    float row_max[2] = {-INF, -INF};
#pragma unroll 1
    for (int i = 0; i < NT; ++i) {
        const int column = i % (NT / 2) * 16;
        float rS[1][2][4] = {};
#pragma unroll 1
        for (int kd = 0; kd < QTile::COLS / 16; ++kd) {
            uint32_t rQ[4], rK[4];
            ldmatrix_x4(rQ, QTile::advance(lane_q, 0, 2 * kd));
            ldmatrix_x4(rK, KTile::advance(lane_k, column, 2 * kd));
            mma_m16n8k16<T>(rS[0][0], rQ, rK[0], rK[1]);
            mma_m16n8k16<T>(rS[0][1], rQ, rK[2], rK[3]);
        }
        step(rS, column);
        if (i < NT / 2) {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                row_max[e / 2 % 2] = fmaxf(row_max[e / 2 % 2], rS[0][e / 4][e % 4]);
            if (i < NT / 2 - 1) continue;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                row_max[h] = lanes_max<4>(row_max[h]);
                if (!again[0][h]) continue;
                softmax.l[0][h] = l[0][h];
                softmax.update_row_max(row_max[h], 0, h);
            }
            continue;
        }
        const int column_of[2] = {again[0][0] ? column : -1, again[0][1] ? column : -1};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int h = e / 2 % 2;
            const float p = again[0][h] ? softmax.exponential(rS[0][e / 4][e % 4], 0, h) : 0.f;
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2)  // registers have no index
                set_if_equal(rP[0][nt + e / 4][e % 4], column_of[h], nt * 8, p);
        }
    }
}
