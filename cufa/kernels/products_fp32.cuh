// Products of float32 tiles at float32 accuracy: on the tensor cores as three TF32 products
// (3xTF32, as in CUTLASS's example 27), or on CUDA cores. With x = hi + lo, both TF32, a b = lo hi
// + hi lo + hi hi + O(2^-22). Tensor cores truncate their sums, so sums are kept short there and
// added up in float32 arithmetic, which rounds to nearest.
#pragma once
#include "ptx.cuh"
#include "tile.cuh"

// N float32 registers as TF32 parts. The tensor cores ignore the last bits of lo; `rest` holds
// them.
template <int N>
struct Split {
    uint32_t hi[N], lo[N];
    __device__ void set(int i, float x) {
        hi[i] = round_tf32(x);
        lo[i] = __float_as_uint(x - __uint_as_float(hi[i]));
    }
    __device__ uint32_t rest(int i) const {
        return __float_as_uint(__uint_as_float(lo[i]) - __uint_as_float(lo[i] & 0xffffe000u));
    }
};

// The two small products and the large one. Sums begin with the small ones, which truncation costs
// less.
__device__ inline void mma_small(float (&d)[4], const Split<4>& a, const Split<2>& b) {
    mma_m16n8k8_tf32(d, a.lo, b.hi[0], b.hi[1]);
    mma_m16n8k8_tf32(d, a.hi, b.lo[0], b.lo[1]);
}
__device__ inline void mma_large(float (&d)[4], const Split<4>& a, const Split<2>& b) {
    mma_m16n8k8_tf32(d, a.hi, b.hi[0], b.hi[1]);
}

// S = Q K^T by split products. Steps of k = 8 that the tensor cores sum up: fewer round less, and
// take more registers.
template <class QTile, class KTile, int MT, int NT>
__device__ void qk_tensor_cores(float (&rS)[MT][NT][4], uint32_t tile_q, uint32_t tile_k,
                                int row0) {
    constexpr int QK_STEPS = 2;
    const uint32_t lane_q = lane_offset_a<QTile>() + row0 * (QTile::PANEL * 16);
    const uint32_t lane_k = lane_offset_b<KTile>();
#pragma unroll(2)
    for (int kd = 0; kd < QTile::COLS / 8; kd += QK_STEPS) {
        Split<4> rQ[QK_STEPS][MT];
#pragma unroll
        for (int step = 0; step < QK_STEPS; ++step)
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                uint32_t q[4];
                ldmatrix_x4(q, tile_q + QTile::advance(lane_q, mt * 16, (kd + step) * 2));
#pragma unroll
                for (int i = 0; i < 4; ++i) rQ[step][mt].set(i, __uint_as_float(q[i]));
            }
#pragma unroll
        for (int nt = 0; nt < NT; nt += 2) {
            Split<2> rK[2][QK_STEPS];
#pragma unroll
            for (int step = 0; step < QK_STEPS; ++step) {
                uint32_t k[4];
                ldmatrix_x4(k, tile_k + KTile::advance(lane_k, nt * 8, (kd + step) * 2));
#pragma unroll
                for (int i = 0; i < 4; ++i) rK[i / 2][step].set(i % 2, __uint_as_float(k[i]));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    float rSum[4] = {};
#pragma unroll
                    for (int step = 0; step < QK_STEPS; ++step)
                        mma_small(rSum, rQ[step][mt], rK[i][step]);
#pragma unroll
                    for (int step = 0; step < QK_STEPS; ++step)
                        mma_large(rSum, rQ[step][mt], rK[i][step]);
#pragma unroll
                    for (int j = 0; j < 4; ++j) rS[mt][nt + i][j] += rSum[j];
                }
        }
    }
}

// S = Q K^T on CUDA cores, in the layout of the accumulators. A head dim of a few numbers leaves
// the errors of the split products nothing to average out with, and few products to do.
template <class QTile, class KTile, int MT, int NT>
__device__ void qk_cuda_cores(float (&rS)[MT][NT][4], uint32_t tile_q, uint32_t tile_k, int row0) {
    const int lane = thread_index() % 32;
#pragma unroll(2)
    for (int chunk = 0; chunk < QTile::CHUNKS; ++chunk) {
        float rQ[MT][2][4];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                lds(rQ[mt][h], tile_q + QTile::offset(row0 + mt * 16 + h * 8 + lane / 4, chunk));
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float rK[4];
                lds(rK, tile_k + KTile::offset(nt * 8 + lane % 4 * 2 + i, chunk));
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            rS[mt][nt][2 * h + i] =
                                fmaf(rQ[mt][h][e], rK[e], rS[mt][nt][2 * h + i]);
            }
    }
}

// O += P V by split products, of a part of the columns of V that begins at `chunk0`.
template <class VTile, int MT, int NT, int OT>
__device__ void pv_tensor_cores(float (&rO)[MT][OT][4], const float (&rS)[MT][NT][4],
                                uint32_t tile_v, int chunk0) {
    constexpr int PV_STEPS = VTile::COLS <= 64 ? 2 : NT;
    Split<4> rP[MT][NT];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 4; ++i) rP[mt][nt].set(i, rS[mt][nt][i % 2 * 2 + i / 2]);
    // A lane's keys are those that it holds of P, 2 (lane % 4) + {0, 1} of eight, and its columns
    // of V are the chunk lane / 4 of 32: it serves four 8-column pieces, column n of piece i being
    // 4 n + i of the 32.
    const int lane = thread_index() % 32;
    const uint32_t lane_v[2] = {VTile::offset(lane % 4 * 2, lane / 4),
                                VTile::offset(lane % 4 * 2 + 1, lane / 4)};
    tile_v += VTile::advance(0, 0, chunk0);
#pragma unroll
    for (int ot = 0; ot < OT; ot += 4) {
#pragma unroll
        for (int kk0 = 0; kk0 < NT; kk0 += PV_STEPS) {
            float rSum[MT][4][4] = {};
#pragma unroll
            for (int kk = kk0; kk < kk0 + PV_STEPS; ++kk) {
                Split<2> rV[4];
#pragma unroll
                for (int key = 0; key < 2; ++key) {
                    float v[4];
                    lds(v, tile_v + VTile::advance(lane_v[key], kk * 8, ot * 2));
#pragma unroll
                    for (int i = 0; i < 4; ++i) rV[i].set(key, v[i]);
                }
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if constexpr (VTile::COLS <=
                                      32)  // so few outputs that each one's last bit shows
                            mma_m16n8k8_tf32(rSum[mt][i], rP[mt][kk].hi, rV[i].rest(0),
                                             rV[i].rest(1));
                        mma_small(rSum[mt][i], rP[mt][kk], rV[i]);
                        mma_large(rSum[mt][i], rP[mt][kk], rV[i]);
                    }
            }
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int i = 0; i < 16; ++i) rO[mt][ot + i / 4][i % 4] += rSum[mt][i / 4][i % 4];
        }
    }
}
