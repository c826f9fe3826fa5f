// S = Q K^T and O += P V of 16-bit tiles on the tensor cores, by mma.sync.
#pragma once
#include "tile.cuh"

// S += Q K^T of MT times 16 rows of Q, from row0 on.
template <class T, class QTile, class KTile, int MT, int NT>
__device__ void qk_mma(float (&rS)[MT][NT][4], uint32_t tile_q, uint32_t tile_k, int row0) {
    const uint32_t lane_q = lane_offset_a<QTile>() + row0 * (QTile::PANEL * 16),
                   lane_k = lane_offset_b<KTile>();
#pragma unroll
    for (int kd = 0; kd < QTile::COLS / 16; ++kd) {
        uint32_t rQ[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
            ldmatrix_x4(rQ[mt], tile_q + QTile::advance(lane_q, mt * 16, kd * 2));
#pragma unroll
        for (int nt = 0; nt < NT; nt += 2) {
            uint32_t rK[4];
            ldmatrix_x4(rK, tile_k + KTile::advance(lane_k, nt * 8, kd * 2));
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                mma_m16n8k16<T>(rS[mt][nt], rQ[mt], rK[0], rK[1]);
                mma_m16n8k16<T>(rS[mt][nt + 1], rQ[mt], rK[2], rK[3]);
            }
        }
    }
}

// O += P V, without those 16-row pieces that `ended` says are done with these keys.
template <class T, class VTile, int MT, int NT, int OT, class Ended>
__device__ void pv_mma(float (&rO)[MT][OT][4], const float (&rP)[MT][NT][4], uint32_t tile_v,
                       Ended ended) {
    const uint32_t lane_v = lane_offset_a<VTile>();
#pragma unroll
    for (int kk = 0; kk < NT / 2; ++kk) {
        uint32_t packed[MT][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                packed[mt][i] = pack2<T>(rP[mt][2 * kk + i / 2][i % 2 * 2],
                                         rP[mt][2 * kk + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int ot = 0; ot < OT; ot += 2) {
            uint32_t rV[4];
            ldmatrix_x4_trans(rV, tile_v + VTile::advance(lane_v, kk * 16, ot));
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                if (ended(mt)) continue;
                mma_m16n8k16<T>(rO[mt][ot], packed[mt], rV[0], rV[1]);
                mma_m16n8k16<T>(rO[mt][ot + 1], packed[mt], rV[2], rV[3]);
            }
        }
    }
}
