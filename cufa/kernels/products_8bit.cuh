// S = Q K^T and O += P V, where K and V have 8 bits, by mma.sync of 16 bits: of Q's type, and of
// float16, which holds more of P than bfloat16. (With integers and up to 16 rows S is another
// product, see products_int8.cuh.) A lane finds four elements in a register, which follow each
// other in a row:
// - Those of K are four of 16 columns, which a product takes in any order. So Q lies in that order,
//   see decode_query.cuh: words 0, 2, 4, 6 of each eight, then 1, 3, 5, 7.
// - Those of V are two columns of two keys, and each product takes every other column. So of 16
//   columns O has the even ones in one piece, and the odd ones in the next.
#pragma once
#include "expand.cuh"
#include "tile.cuh"

// S += Q K^T of MT times 16 rows of Q, from row0 on. KIND expands the elements.
template <class T, class KIND, class QTile, class KTile, int MT, int NT>
__device__ void qk_8bit(float (&rS)[MT][NT][4], uint32_t tile_q, uint32_t tile_k, int row0) {
    const uint32_t lane_q = lane_offset_a<QTile>() + row0 * (QTile::PANEL * 16),
                   lane_k = lane_offset_b<KTile>();
#pragma unroll(2)  // less to compile, and to fetch
    for (int kd = 0; kd < QTile::COLS / 16; kd += 2) {
        uint32_t rQ[2][MT][4];
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i)
            ldmatrix_x4(rQ[i / MT][i % MT],
                        tile_q + QTile::advance(lane_q, i % MT * 16, (kd + i / MT) * 2));
#pragma unroll
        for (int nt = 0; nt < NT; nt += 2) {
            uint32_t rK[4];
            ldmatrix_x4(rK, tile_k + KTile::advance(lane_k, nt * 8, kd));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t two[2];
                KIND::template expand<T>(two, rK[i]);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
                    mma_m16n8k16<T>(rS[mt][nt + i / 2], rQ[i % 2][mt], two[0], two[1]);
            }
        }
    }
}

// O += P V.
template <class KIND, class VTile, int MT, int NT, int OT>
__device__ void pv_8bit(float (&rO)[MT][OT][4], const float (&rP)[MT][NT][4], uint32_t tile_v) {
    const uint32_t lane_v = lane_offset_a<VTile>();
#pragma unroll
    for (int kk = 0; kk < NT / 2; ++kk) {
        uint32_t packed[MT][4];
#pragma unroll
        for (int i = 0; i < MT * 4; ++i)
            packed[i / 4][i % 4] = pack2<float16>(rP[i / 4][2 * kk + i % 4 / 2][i % 2 * 2],
                                                  rP[i / 4][2 * kk + i % 4 / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int ot = 0; ot < OT; ot += 4) {
            uint32_t rV[4];
            ldmatrix_x4_trans(rV, tile_v + VTile::advance(lane_v, kk * 16, ot / 2));
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                uint32_t first[2], last[2];  // of each column the first eight keys, and the others
                KIND::expand_columns(first, rV[i]);
                KIND::expand_columns(last, rV[i + 1]);
#pragma unroll
                for (int j = 0; j < 2 * MT; ++j)
                    mma_m16n8k16<float16>(rO[j / 2][ot + i + j % 2], packed[j / 2], first[j % 2],
                                          last[j % 2]);
            }
        }
    }
}
