// FlashAttention-2 forward (Dao 2023, algorithm 1) for float32, at float32 accuracy, sm_80 and later.
// The loops are those of fa2_mma.cu. Each product runs on the tensor cores as three TF32 products (3xTF32, as in
// CUTLASS's example 27): with x = hi + lo, both TF32, a b = lo hi + hi lo + hi hi + O(2^-22). Tensor cores
// truncate their sums, so sums are kept short there and added up in float32 arithmetic, which rounds to nearest.
#include "epilogue.cuh"
#include "kv.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "score.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "tile.cuh"

// N float32 registers as TF32 parts. The tensor cores ignore the last bits of lo; `rest` holds them.
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

// The two small products and the large one. Sums begin with the small ones, which truncation costs less.
__device__ inline void mma_small(float (&d)[4], const Split<4>& a, const Split<2>& b) {
    mma_m16n8k8_tf32(d, a.lo, b.hi[0], b.hi[1]);
    mma_m16n8k8_tf32(d, a.hi, b.lo[0], b.lo[1]);
}
__device__ inline void mma_large(float (&d)[4], const Split<4>& a, const Split<2>& b) {
    mma_m16n8k8_tf32(d, a.hi, b.hi[0], b.hi[1]);
}

// S = Q K^T on CUDA cores, in the layout of the accumulators. A head dim of a few numbers leaves the errors of
// the split products nothing to average out with, and few products to do.
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
                            rS[mt][nt][2 * h + i] = fmaf(rQ[mt][h][e], rK[e], rS[mt][nt][2 * h + i]);
            }
    }
}

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM, class SCORE,
          class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) fa2_fp32(const __grid_constant__ Params p) {
    constexpr bool CAUSAL = SCORE::CAUSAL;
    constexpr int THREADS = WARPS * 32;
    constexpr int V_PARTS = HEAD_DIM_V > 160 ? 2 : 1;  // warps that share rows, each with a part of the columns
    constexpr int ROW_WARPS = WARPS / V_PARTS;         // of the output, where registers do not hold all of them
    constexpr int MT = BM / ROW_WARPS / 16;            // 16-row pieces of a warp
    constexpr int NT = BN / 8;                         // 8-key pieces of a tile of scores
    constexpr int OT = HEAD_DIM_V / V_PARTS / 8;       // 8-column pieces of the output of a warp
    // Steps of k = 8 that the tensor cores sum up: fewer round less, and take more registers.
    constexpr int QK_STEPS = 2, PV_STEPS = HEAD_DIM_V <= 64 ? 2 : NT;
    using QTile = SmemTile<BM, HEAD_DIM, 4>;
    using KTile = SmemTile<BN, HEAD_DIM, 4>;
    using VTile = SmemTile<BN, HEAD_DIM_V, 4>;

    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sQ = smem_address(smem);
    const uint32_t sK = sQ + QTile::bytes;
    const uint32_t sV = sK + STAGES * KTile::bytes;
    // From which tile of keys on each warp has to mask: kept here, for registers are scarce.
    volatile int* sMaskFrom = reinterpret_cast<int*>(smem + QTile::bytes + STAGES * (KTile::bytes + VTile::bytes));

    const Tile tile = tile_of_block<CAUSAL>(p, block_index());
    const int q0 = tile.q_tile * BM;
    const int kv_head = tile.head / p.group;
    const TileLoader<QTile, THREADS, T> load_q{head_ptr<T>(p.q, tile.batch, tile.head), p.q.stride_seq, p.seq_q,
                                               p.head_dim};
    const TileLoader<KTile, THREADS, T> load_k{head_ptr<T>(p.k, tile.batch, kv_head), p.k.stride_seq, p.seq_kv,
                                               p.head_dim};
    const TileLoader<VTile, THREADS, T> load_v{head_ptr<T>(p.v, tile.batch, kv_head), p.v.stride_seq, p.seq_kv,
                                               p.head_dim_v};
    const Mask<CAUSAL> mask(p.seq_q, p.seq_kv);
    const int kv_tiles = (mask.kv_end(q0, BM) + BN - 1) / BN;
    auto warp_row0 = [&] { return tile_of_block<CAUSAL>(p, block_index()).q_tile * BM + warp_row<BM, ROW_WARPS>(); };
    if (threadIdx.x % 32 == 0) sMaskFrom[threadIdx.x / 32] = mask.keys_before_mask(warp_row0()) / BN;
    __syncthreads();

    auto start_k = [&](int j) {
        if (j >= 0) load_k.start(sK + j % STAGES * KTile::bytes, j * BN, load_k.source(j * BN));
        cp_async_commit();
    };
    auto start_v = [&](int j) {
        if (j >= 0) load_v.start(sV + j % STAGES * VTile::bytes, j * BN, load_v.source(j * BN));
        cp_async_commit();
    };

    load_q.start(sQ, q0, load_q.source(q0));
    start_k(kv_tiles - 1);
    if constexpr (STAGES > 1) start_v(kv_tiles - 1);
    for (int j = kv_tiles - 2; j > kv_tiles - STAGES; --j) start_k(j), start_v(j);

    OnlineSoftmax<MT, true> softmax(p.scale_log2);
    float rO[MT][OT][4] = {};

    // From the last tile of keys to the first: the masked ones come first.
    for (int j = kv_tiles - 1; j >= 0; --j) {
        // K of this tile is here, and every warp is done with the previous tile, whose place is filled again.
        if constexpr (STAGES == 1) {
            const T* source = load_v.source(j * BN);  // before the wait, so that the copy starts right after it
            cp_async_wait<0>();
            __syncthreads();
            load_v.start(sV, j * BN, source);
            cp_async_commit();
        } else {
            cp_async_wait<2 * (STAGES - 2)>();
            __syncthreads();
            start_k(j - STAGES + 1);
            start_v(j - STAGES + 1);
        }

        // S = Q K^T
        float rS[MT][NT][4] = {};
        const uint32_t tile_k = sK + j % STAGES * KTile::bytes;
        if constexpr (HEAD_DIM <= 32) {
            qk_cuda_cores<QTile, KTile>(rS, sQ, tile_k, warp_row<BM, ROW_WARPS>());
        } else {
            const uint32_t lane_q = lane_offset_a<QTile>() + warp_row<BM, ROW_WARPS>() * (QTile::PANEL * 16);
            const uint32_t lane_k = lane_offset_b<KTile>();
#pragma unroll(2)
            for (int kd = 0; kd < HEAD_DIM / 8; kd += QK_STEPS) {
                Split<4> rQ[QK_STEPS][MT];
#pragma unroll
                for (int step = 0; step < QK_STEPS; ++step)
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) {
                        uint32_t q[4];
                        ldmatrix_x4(q, sQ + QTile::advance(lane_q, mt * 16, (kd + step) * 2));
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
                            for (int step = 0; step < QK_STEPS; ++step) mma_small(rSum, rQ[step][mt], rK[i][step]);
#pragma unroll
                            for (int step = 0; step < QK_STEPS; ++step) mma_large(rSum, rQ[step][mt], rK[i][step]);
#pragma unroll
                            for (int j = 0; j < 4; ++j) rS[mt][nt + i][j] += rSum[j];
                        }
                }
            }
        }

        // P = exp(S - m); m, l and O follow
        if (j >= sMaskFrom[thread_index() / 32]) mask.apply(rS, thread_index() % 32, warp_row0(), j * BN);
        softmax.update(rS, rO);

        if constexpr (STAGES == 1) {
            const T* source = load_k.source((j - 1) * BN);
            cp_async_wait<0>();
            __syncthreads();
            if (j > 0) load_k.start(sK, (j - 1) * BN, source);
            cp_async_commit();
        }

        // O += P V
        Split<4> rP[MT][NT];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int i = 0; i < 4; ++i) rP[mt][nt].set(i, rS[mt][nt][i % 2 * 2 + i / 2]);
        // A lane's keys are those that it holds of P, 2 (lane % 4) + {0, 1} of eight, and its columns of V are the
        // chunk lane / 4 of 32: it serves four 8-column pieces, column n of piece i being 4 n + i of the 32.
        const int lane = thread_index() % 32, part = thread_index() / 32 / ROW_WARPS;
        const uint32_t lane_v[2] = {VTile::offset(lane % 4 * 2, lane / 4), VTile::offset(lane % 4 * 2 + 1, lane / 4)};
        const uint32_t tile_v = sV + j % STAGES * VTile::bytes + VTile::advance(0, 0, part * OT * 2);
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
                            if constexpr (HEAD_DIM_V <= 32)  // so few outputs that each one's last bit shows
                                mma_m16n8k8_tf32(rSum[mt][i], rP[mt][kk].hi, rV[i].rest(0), rV[i].rest(1));
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

    // O = O / l and the log-sum-exp
    float lse[MT][2];
    softmax.finish(rO, lse);
    const OutputTile<BM, ROW_WARPS> out(p, tile_of_block<CAUSAL>(p, block_index()));
    store_lse(lse, p, out);
    store_o_fp32(rO, p.o, out, thread_index() / 32 / ROW_WARPS * OT * 8, p.head_dim_v);
}
