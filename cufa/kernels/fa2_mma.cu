// FlashAttention-2 forward (Dao 2023, algorithm 1) on tensor cores, for float16 and bfloat16, sm_80 and later.
// A block computes BM rows of one head's output and loops over the keys in tiles of BN. Each warp owns
// BM / WARPS of the rows, so that no product is split between warps. K and V tiles arrive by cp.async
// in a ring of STAGES.
#include "epilogue.cuh"
#include "kv.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "score.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM, class SCORE,
          class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) fa2_mma(const __grid_constant__ Params p) {
    constexpr bool CAUSAL = SCORE::CAUSAL;
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
    auto warp_row0 = [&] { return tile_of_block<CAUSAL>(p, block_index()).q_tile * BM + warp_row<BM, WARPS>(); };
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

    OnlineSoftmax<MT, false> softmax(p.scale_log2);
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
        const uint32_t lane_q = lane_offset_a<QTile>() + warp_row<BM, WARPS>() * (QTile::PANEL * 16);
        const uint32_t lane_k = lane_offset_b<KTile>();
        const uint32_t tile_k = sK + j % STAGES * KTile::bytes;
#pragma unroll
        for (int kd = 0; kd < HEAD_DIM / 16; ++kd) {
            uint32_t rQ[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) ldmatrix_x4(rQ[mt], sQ + QTile::advance(lane_q, mt * 16, kd * 2));
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
        const uint32_t lane_v = lane_offset_a<VTile>();
        const uint32_t tile_v = sV + j % STAGES * VTile::bytes;
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
                ldmatrix_x4_trans(rV, tile_v + VTile::advance(lane_v, kk * 16, ot));
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
    const OutputTile<BM, WARPS> out(p, tile_of_block<CAUSAL>(p, block_index()));
    store_lse(lse, p, out);
    cp_async_wait<0>();
    __syncthreads();  // every warp is done with Q, K and V: their place takes O
    store_o_16bit<T, OTile, WARPS>(rO, sQ, p.o, out, p.head_dim_v);
}
