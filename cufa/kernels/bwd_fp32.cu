// FlashAttention-2 backward (Dao 2023, algorithm 2) for float32, at float32 accuracy, sm_80 and
// later. The loop is that of bwd_mma.cu, the products those of products_fp32.cuh.
#include "bwd_block.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_products.cuh"
#include "products_fp32.cuh"
#include "ptx.cuh"
#include "tile.cuh"

// S^T = K Q^T or dP^T = V dO^T. Few columns leave errors of split products nothing to average out
// with.
template <class RowTile, class ColTile, int MT, int NT>
__device__ void products(float (&r)[MT][NT][4], uint32_t rows, uint32_t cols, int row0) {
    if constexpr (RowTile::COLS > 32)
        qk_tensor_cores<RowTile, ColTile>(r, rows, cols, row0);
    else
        qk_cuda_cores<RowTile, ColTile>(r, rows, cols, row0);
}

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    bwd_fp32(const __grid_constant__ BackwardArguments<SCORE, KV> p) {
    using Block = BackwardBlock<T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, WARPS, SCORE, KV>;
    using KTile = typename Block::KTile;
    using VTile = typename Block::VTile;
    using QTile = typename Block::QTile;
    using OTile = typename Block::OTile;
    using STile = SmemTile<BM, BN, 4>;  // of dS
    using Share = DqShare<HEAD_DIM, BM, Block::KEY_WARPS, 32>;
    constexpr int MT = Block::MT, NT = Block::NT;
    constexpr int KEYS = 16;  // of a step of dQ

    extern __shared__ __align__(1024) unsigned char smem[];
    const Block block(p, smem);
    Gradients<MT, HEAD_DIM / 8, HEAD_DIM_V / 8, Block::SHARES> gradients;
    RowTile t = block.begin();
    block.start(t);
    for (int i = 0; block.visits(t); ++i) {
        const int stage = i % STAGES;
        const RowTile following = block.after(t);
        block.next(following, stage);

        // S^T = K Q^T, P^T = exp(S^T - LSE)
        float rP[MT][NT][4] = {};
        typename Block::Slopes slopes;
        products<KTile, QTile>(rP, block.tile_k(), block.tile_q(stage), block.key0());
        block.weigh(rP, slopes, t, stage);

        // dP^T = V dO^T, dS^T = P^T (dP^T - delta)
        float rdS[MT][NT][4] = {};
        if (block.has_dk()) {
            products<VTile, OTile>(rdS, block.tile_v(), block.tile_do(stage), block.key0());
            block.differentiate(rdS, rP, slopes, t, stage);
            store_ds_fp32<STile>(rdS, block.tile_ds(), block.key0());
        }

        // dV += P^T dO, dK += dS^T Q
        if (block.has_dv()) {
            block.drop(rP, t);
            pv_tensor_cores<OTile>(gradients.v(), rP, block.tile_do(stage), 0);
        }
        if (!Block::SHARES) pv_tensor_cores<QTile>(gradients.k(), rdS, block.tile_q(stage), 0);
        block.exchange(following);
        if (Block::SHARES && block.has_dk())
            pv_tensor_cores<QTile>(gradients.k(), rdS, block.tile_q(stage), 0);

        // dQ += dS K
        if (p.dq_sums) {
            block.take_turn(t);
            if (block.has_dv()) {
#pragma unroll
                for (int row = 0; row < Share::ROWS; row += 16)
#pragma unroll 1
                    for (int col = 0; col < Share::COLS; col += Share::STEP) {
                        const int piece = (Share::col() + col) / 8;
                        float rdQ[1][Share::STEP / 8][4] = {};
#pragma unroll 1
                        for (int key = 0; key < BN; key += KEYS) {
                            float rows[1][KEYS / 8][4];
                            load_ds_fp32<STile>(rows, block.tile_ds(), Share::row() + row, key);
                            pv_tensor_cores<KTile>(
                                rdQ, rows, block.tile_k() + KTile::advance(0, key, 0), piece * 2);
                        }
                        block.add_dq(rdQ[0], t, Share::row() + row, piece);
                    }
            }
            block.end_turn(t);
        }
        block.release(following);
        t = following;
    }
    block.end_sums();
    cp_async_wait<0>();

    const Tile tile{block.batch, block.head_kv, block.key_tile};
    const Sequence keys{block.key_tile * BN + block.keys_left(), 0, block.sequence.first_k};
    const OutputTile<BN, Block::KEY_WARPS> out{tile, keys, KV::RAGGED ? 0 : block.batch};
    if (p.dv.data && block.has_dv()) {
        multiply(gradients.v(), block.growth());
        store_o_fp32(gradients.v(), p.dv, out, 0, p.head_dim_v);
    }
    if (p.dk.data && block.has_dk()) {
        multiply(gradients.k(), p.scale);
        store_o_fp32(gradients.k(), p.dk, out, 0, p.head_dim);
    }
}
