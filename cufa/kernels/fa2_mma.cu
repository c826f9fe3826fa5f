// FlashAttention-2 forward (Dao 2023, algorithm 1) on tensor cores, for float16 and bfloat16, sm_80 and later.
// A block computes BM rows of one head's output and loops over the keys in tiles of BN. Each warp owns
// BM / WARPS of the rows, so that no product is split between warps. K and V tiles arrive by cp.async
// in a ring of STAGES.
#include "epilogue.cuh"
#include "fa2_block.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM, class SCORE,
          class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    fa2_mma(const __grid_constant__ Arguments<SCORE, KV> p) {
    using Block = Fa2Block<T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, WARPS, WARPS, SCORE, KV>;
    using QTile = typename Block::QTile;
    using KTile = typename Block::KTile;
    using VTile = typename Block::VTile;
    using OTile = SmemTile<BM, HEAD_DIM_V, 2>;
    constexpr int MT = Block::MT;       // 16-row pieces of a warp
    constexpr int NT = BN / 8;          // 8-key pieces of a tile of scores
    constexpr int OT = HEAD_DIM_V / 8;  // 8-column pieces of the output

    extern __shared__ __align__(1024) unsigned char smem[];
    const Block block(p, smem);
    block.start();
    OnlineSoftmax<MT, false> softmax(SCORE::LINEAR ? p.scale_log2 : 1.f);
    float rO[MT][OT][4] = {};

    // From the last tile of keys to the first: the masked ones come first.
    for (int j = block.end - 1; j >= block.first; --j) {
        block.next_k(j);
        const auto edge = block.edge(j);
        if (!edge.visits) {
            block.next_v(j);
            continue;
        }
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
            if (mt < MT - 1 && (edge.begins >> mt & 1)) clear(rO[mt]);  // after others of the warp

        // S = Q K^T
        float rS[MT][NT][4] = {};
        const uint32_t lane_q = lane_offset_a<QTile>() + warp_row<BM, WARPS>() * (QTile::PANEL * 16);
        const uint32_t lane_k = lane_offset_b<KTile>(), tile_k = block.tile_k(j);
#pragma unroll
        for (int kd = 0; kd < HEAD_DIM / 16; ++kd) {
            uint32_t rQ[MT][4];
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) ldmatrix_x4(rQ[mt], block.sQ + QTile::advance(lane_q, mt * 16, kd * 2));
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
        block.apply_score(rS, j, edge.masked);
        softmax.update(rS, rO);
        block.next_v(j);

        // O += P V
        const uint32_t lane_v = lane_offset_a<VTile>(), tile_v = block.tile_v(j);
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
                    if (SCORE::LEFT_EDGE && (edge.ended >> mt & 1)) continue;
                    mma_m16n8k16<T>(rO[mt][ot], rP[mt], rV[0], rV[1]);
                    mma_m16n8k16<T>(rO[mt][ot + 1], rP[mt], rV[2], rV[3]);
                }
            }
        }
    }

    // O = O / l and the log-sum-exp
    float lse[MT][2];
    softmax.finish(rO, lse);
    const OutputTile<BM, WARPS> out(p, block.tile());
    store_lse(lse, p, out);
    cp_async_wait<0>();
    __syncthreads();  // every warp is done with Q, K and V: their place takes O
    store_o_16bit<T, OTile, WARPS>(rO, block.sQ, p.o, out, p.head_dim_v);
}
