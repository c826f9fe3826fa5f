// FlashAttention-2 forward (Dao 2023, algorithm 1) for float32, at float32 accuracy, sm_80 and later.
// The loops are those of fa2_mma.cu. Each product runs on the tensor cores as three TF32 products: with
// x = hi + lo, both TF32, a b = lo hi + hi lo + hi hi + O(2^-22). Tensor cores truncate their sums, so sums are
// kept short there (a few steps of k) and added up in float32 arithmetic, which rounds to nearest.
#include "epilogue.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "tile.cuh"

// N float32 registers as TF32 parts.
template <int N>
struct Split {
    uint32_t hi[N], lo[N];
    __device__ void set(int i, float x) {
        hi[i] = round_tf32(x);
        lo[i] = __float_as_uint(x - __uint_as_float(hi[i]));
    }
};

__device__ inline void mma_3xtf32(float (&d)[4], const Split<4>& a, const Split<2>& b) {
    mma_m16n8k8_tf32(d, a.lo, b.hi[0], b.hi[1]);
    mma_m16n8k8_tf32(d, a.hi, b.lo[0], b.lo[1]);
    mma_m16n8k8_tf32(d, a.hi, b.hi[0], b.hi[1]);
}

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM, bool CAUSAL>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) fa2_fp32(const __grid_constant__ Params p) {
    constexpr int THREADS = WARPS * 32;
    constexpr int MT = BM / WARPS / 16;  // 16-row pieces of a warp
    constexpr int NT = BN / 8;           // 8-key pieces of a tile of scores
    constexpr int OT = HEAD_DIM_V / 8;   // 8-column pieces of the output
    constexpr int SUM_STEPS = 4;         // steps of k = 8 that the tensor cores sum up
    using QTile = SmemTile<BM, HEAD_DIM, 4>;
    using KTile = SmemTile<BN, HEAD_DIM, 4>;
    using VTile = SmemTile<BN, HEAD_DIM_V, 4>;

    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sQ = smem_address(smem);
    const uint32_t sK = sQ + QTile::bytes;
    const uint32_t sV = sK + STAGES * KTile::bytes;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Tile tile = tile_of_block<CAUSAL>(p, blockIdx.x);
    const int q0 = tile.q_tile * BM;
    const int row = q0 + warp * (BM / WARPS);  // first row of this warp
    const T* gQ = head_ptr<T>(p.q, tile.batch, tile.head) + q0 * p.q.stride_seq;
    const T* gK = head_ptr<T>(p.k, tile.batch, tile.head / p.group);
    const T* gV = head_ptr<T>(p.v, tile.batch, tile.head / p.group);
    const Mask<CAUSAL> mask(p.seq_q, p.seq_kv);
    const int kv_tiles = (mask.kv_end(q0, BM) + BN - 1) / BN;

    // Tiles are visited from the last to the first: the masked ones come first. `n` counts visits.
    auto key_of = [&](int n) { return (kv_tiles - 1 - n) * BN; };
    auto load_k = [&](int n) {
        if (n < kv_tiles)
            load_tile_async<KTile, THREADS>(sK + n % STAGES * KTile::bytes, gK + key_of(n) * p.k.stride_seq,
                                            p.k.stride_seq, p.seq_kv - key_of(n), p.head_dim);
        cp_async_commit();
    };
    auto load_v = [&](int n) {
        if (n < kv_tiles)
            load_tile_async<VTile, THREADS>(sV + n % STAGES * VTile::bytes, gV + key_of(n) * p.v.stride_seq,
                                            p.v.stride_seq, p.seq_kv - key_of(n), p.head_dim_v);
        cp_async_commit();
    };

    load_tile_async<QTile, THREADS>(sQ, gQ, p.q.stride_seq, p.seq_q - q0, p.head_dim);
    load_k(0);
    if constexpr (STAGES > 1) {
        load_v(0);
        for (int n = 1; n < STAGES - 1; ++n) load_k(n), load_v(n);
    }

    const uint32_t lane_q = lane_address_a<QTile>(sQ + warp * (BM / WARPS) * (QTile::PANEL * 16), lane);
    const uint32_t lane_k = lane_address_b<KTile>(sK, lane);
    // A lane's keys are those that it holds of P, 2 (lane % 4) + {0, 1} of eight, and its columns of V are the
    // chunk lane / 4 of 32: it serves four 8-column pieces, column n of piece i being 4 n + i of the 32.
    const uint32_t lane_v0 = sV + VTile::offset(lane % 4 * 2, lane / 4);
    const uint32_t lane_v1 = sV + VTile::offset(lane % 4 * 2 + 1, lane / 4);
    OnlineSoftmax<MT> softmax(p.scale_log2);
    float rO[MT][OT][4] = {};

    for (int n = 0; n < kv_tiles; ++n) {
        // K of this tile is here, and every warp is done with the previous tile, whose place is filled again.
        if constexpr (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
            load_v(n);
        } else {
            cp_async_wait<2 * (STAGES - 2)>();
            __syncthreads();
            load_k(n + STAGES - 1);
            load_v(n + STAGES - 1);
        }

        // S = Q K^T
        float rS[MT][NT][4] = {};
        const uint32_t tile_k = lane_k + n % STAGES * KTile::bytes;
#pragma unroll
        for (int kd0 = 0; kd0 < HEAD_DIM / 8; kd0 += SUM_STEPS) {
            float rSum[MT][NT][4] = {};
#pragma unroll
            for (int kd = kd0; kd < kd0 + SUM_STEPS; ++kd) {
                Split<4> rQ[MT];
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    uint32_t q[4];
                    ldmatrix_x4(q, QTile::advance(lane_q, mt * 16, kd * 2));
#pragma unroll
                    for (int i = 0; i < 4; ++i) rQ[mt].set(i, __uint_as_float(q[i]));
                }
#pragma unroll
                for (int nt = 0; nt < NT; nt += 2) {
                    uint32_t k[4];
                    ldmatrix_x4(k, KTile::advance(tile_k, nt * 8, kd * 2));
                    Split<2> rK[2];
#pragma unroll
                    for (int i = 0; i < 4; ++i) rK[i / 2].set(i % 2, __uint_as_float(k[i]));
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) {
                        mma_3xtf32(rSum[mt][nt], rQ[mt], rK[0]);
                        mma_3xtf32(rSum[mt][nt + 1], rQ[mt], rK[1]);
                    }
                }
            }
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < 4; ++i) rS[mt][nt][i] += rSum[mt][nt][i];
        }

        // P = exp(S - m); m, l and O follow
        if (!mask.all_visible(row, key_of(n), BN)) mask.apply(rS, row + lane / 4, key_of(n) + lane % 4 * 2);
        softmax.update(rS, rO);

        if constexpr (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
            load_k(n + 1);
        }

        // O += P V
        Split<4> rP[MT][NT];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int i = 0; i < 4; ++i) rP[mt][nt].set(i, rS[mt][nt][i % 2 * 2 + i / 2]);
        const uint32_t stage_v = n % STAGES * VTile::bytes;
#pragma unroll
        for (int ot = 0; ot < OT; ot += 4) {
            float rSum[MT][4][4] = {};
#pragma unroll
            for (int kk = 0; kk < NT; ++kk) {
                const float4 v0 = lds_128(VTile::advance(lane_v0 + stage_v, kk * 8, ot * 2));
                const float4 v1 = lds_128(VTile::advance(lane_v1 + stage_v, kk * 8, ot * 2));
                Split<2> rV[4];
                rV[0].set(0, v0.x), rV[1].set(0, v0.y), rV[2].set(0, v0.z), rV[3].set(0, v0.w);
                rV[0].set(1, v1.x), rV[1].set(1, v1.y), rV[2].set(1, v1.z), rV[3].set(1, v1.w);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int i = 0; i < 4; ++i) mma_3xtf32(rSum[mt][i], rP[mt][kk], rV[i]);
            }
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int i = 0; i < 16; ++i) rO[mt][ot + i / 4][i % 4] += rSum[mt][i / 4][i % 4];
        }
    }

    // O = O / l and the log-sum-exp
    float lse[MT][2];
    softmax.finish(rO, lse);
    if (p.lse)
        store_lse(lse, p.lse + static_cast<long long>(tile.batch * p.heads_q + tile.head) * p.seq_q, row + lane / 4,
                  p.seq_q, lane);
    store_o_fp32(rO, head_ptr<T>(p.o, tile.batch, tile.head), p.o.stride_seq, row + lane / 4, p.seq_q, p.head_dim_v,
                 lane);
}
