// FlashAttention-2 forward (Dao 2023, algorithm 1) on tensor cores, for float16 and bfloat16, sm_80 and later.
// A block computes BM rows of one head's output and loops over the keys in tiles of BN. Each warp owns
// BM / WARPS of the rows, so that no product is split between warps. K and V tiles arrive by cp.async
// in a ring of STAGES.
#include "epilogue.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM, bool CAUSAL>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) fa2_mma(const __grid_constant__ Params p) {
    constexpr int THREADS = WARPS * 32;
    constexpr int MT = BM / WARPS / 16;  // 16-row pieces of a warp
    constexpr int NT = BN / 8;           // 8-key pieces of a tile of scores
    constexpr int OT = HEAD_DIM_V / 8;   // 8-column pieces of the output
    using QTile = SmemTile<BM, HEAD_DIM, 2>;
    using KTile = SmemTile<BN, HEAD_DIM, 2>;
    using VTile = SmemTile<BN, HEAD_DIM_V, 2>;
    using OTile = SmemTile<BM, HEAD_DIM_V, 2>;

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
    const uint32_t lane_v = lane_address_a<VTile>(sV, lane);
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
        for (int kd = 0; kd < HEAD_DIM / 16; ++kd) {
            uint32_t rQ[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) ldmatrix_x4(rQ[mt], QTile::advance(lane_q, mt * 16, kd * 2));
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                uint32_t rK[4];
                ldmatrix_x4(rK, KTile::advance(tile_k, nt * 8, kd * 2));
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    mma_m16n8k16<T>(rS[mt][nt], rQ[mt], rK[0], rK[1]);
                    mma_m16n8k16<T>(rS[mt][nt + 1], rQ[mt], rK[2], rK[3]);
                }
            }
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
        const uint32_t tile_v = lane_v + n % STAGES * VTile::bytes;
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk) {
            uint32_t rP[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    rP[mt][i] = pack2<T>(rS[mt][2 * kk + i / 2][i % 2 * 2], rS[mt][2 * kk + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int ot = 0; ot < OT; ot += 2) {
                uint32_t rV[4];
                ldmatrix_x4_trans(rV, VTile::advance(tile_v, kk * 16, ot));
#pragma unroll
                for (int mt = 0; mt < MT; ++mt) {
                    mma_m16n8k16<T>(rO[mt][ot], rP[mt], rV[0], rV[1]);
                    mma_m16n8k16<T>(rO[mt][ot + 1], rP[mt], rV[2], rV[3]);
                }
            }
        }
    }

    // O = O / l and the log-sum-exp
    float lse[MT][2];
    softmax.finish(rO, lse);
    if (p.lse)
        store_lse(lse, p.lse + static_cast<long long>(tile.batch * p.heads_q + tile.head) * p.seq_q,
                  row + lane / 4, p.seq_q, lane);
    cp_async_wait<0>();
    __syncthreads();  // every warp is done with Q, K and V: their place takes O
    T* gO = head_ptr<T>(p.o, tile.batch, tile.head) + q0 * p.o.stride_seq;
    store_o_16bit<T, OTile, THREADS>(rO, sQ, warp * (BM / WARPS), lane, gO, p.o.stride_seq, p.seq_q - q0, p.head_dim_v);
}
