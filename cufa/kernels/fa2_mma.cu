// FlashAttention-2 forward (Dao 2023, algorithm 1) on tensor cores, for float16 and bfloat16, sm_80
// and later. A block computes BM rows of one head's output and loops over the keys in tiles of BN.
// Each warp owns BM / WARPS of the rows, so that no product is split between warps. K and V tiles
// arrive by cp.async in a ring of STAGES.
#include "epilogue.cuh"
#include "fa2_block.cuh"
#include "params.cuh"
#include "products_mma.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
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
    if (block.is_empty) return;
    block.start();
    OnlineSoftmax<MT, false, 0, false, SCORE::NATURAL> softmax(SCORE::to_log2(p.scale_log2));
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
        qk_mma<T, QTile, KTile>(rS, block.sQ, block.tile_k(j), warp_row<BM, WARPS>());

        // P = exp(S - m); m, l and O follow
        block.apply_score(rS, j, edge.masked);
        softmax.update(rS, rO);
        block.drop(rS, j);
        block.next_v(j);

        // O += P V
        pv_mma<T, VTile>(rO, rS, block.tile_v(j),
                         [&](int mt) { return SCORE::LEFT_EDGE && (edge.ended >> mt & 1); });
    }

    // O = O / l and the log-sum-exp
    float lse[MT][2];
    block.finish(softmax, rO, lse);
    const OutputTile<BM, WARPS> out = block.output(block.tile());
    store_lse(lse, p, out);
    cp_async_wait<0>();
    __syncthreads();  // every warp is done with Q, K and V: their place takes O
    store_o_16bit<T, OTile, WARPS>(rO, block.sQ, p.o, out, p.head_dim_v);
}
