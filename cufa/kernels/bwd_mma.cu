// FlashAttention-2 backward (Dao 2023, algorithm 2) on tensor cores, for float16 and bfloat16,
// sm_80 and later. A block computes dK and dV of BN keys of one head of K and V, and adds to dQ of
// the rows that see them.
#include "bwd_block.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_products.cuh"
#include "products_mma.cuh"
#include "ptx.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    bwd_mma(const __grid_constant__ BackwardArguments<SCORE, KV> p) {
    using Block = BackwardBlock<T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, WARPS, SCORE, KV>;
    using KTile = typename Block::KTile;
    using VTile = typename Block::VTile;
    using QTile = typename Block::QTile;
    using OTile = typename Block::OTile;
    using STile = SmemTile<BN, BM, 2>;  // of dS^T
    using Share = DqShare<HEAD_DIM, BM, Block::KEY_WARPS, 16>;
    constexpr int MT = Block::MT, NT = Block::NT;
    auto none = [](int) { return false; };

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
        qk_mma<T, KTile, QTile>(rP, block.tile_k(), block.tile_q(stage), block.key0());
        block.weigh(rP, slopes, t, stage);

        // dP^T = V dO^T, dS^T = P^T (dP^T - delta)
        float rdS[MT][NT][4] = {};
        if (block.has_dk()) {
            qk_mma<T, VTile, OTile>(rdS, block.tile_v(), block.tile_do(stage), block.key0());
            block.differentiate(rdS, rP, slopes, t, stage);
            store_ds_16bit<T, STile>(rdS, block.tile_ds(), block.key0());
        }

        // dV += P^T dO, dK += dS^T Q
        if (block.has_dv()) {
            block.drop(rP, t);
            pv_mma<T, OTile>(gradients.v(), rP, block.tile_do(stage), none);
        }
        if (!Block::SHARES) pv_mma<T, QTile>(gradients.k(), rdS, block.tile_q(stage), none);
        block.exchange(following);
        if (Block::SHARES && block.has_dk())
            pv_mma<T, QTile>(gradients.k(), rdS, block.tile_q(stage), none);

        // dQ += dS K
        if (p.dq_sums) {
            block.take_turn(t);
            if (block.has_dv()) {
#pragma unroll
                for (int row = 0; row < Share::ROWS; row += 16)
#pragma unroll 1
                    for (int col = 0; col < Share::COLS; col += Share::STEP) {
                        const int piece = (Share::col() + col) / 8;
                        float rdQ[Share::STEP / 8][4] = {};
                        dq_mma<T, STile, KTile>(rdQ, block.tile_ds(), block.tile_k(),
                                                Share::row() + row, piece);
                        block.add_dq(rdQ, t, Share::row() + row, piece);
                    }
            }
            block.end_turn(t);
        }
        block.release(following);
        t = following;
    }
    block.end_sums();

    // dV and dK take the place of V and K
    cp_async_wait<0>();
    __syncthreads();
    if (block.has_dv()) {
        multiply(gradients.v(), block.growth());
        stage_gradient<T, VTile>(gradients.v(), block.tile_v(), block.key0());
    }
    if (block.has_dk()) {
        multiply(gradients.k(), p.scale);
        stage_gradient<T, KTile>(gradients.k(), block.tile_k(), block.key0());
    }
    __syncthreads();
    if (p.dv.data)
        copy_gradient<VTile, Block::THREADS>(block.tile_v(), block.rows_of(p.dv), p.dv.stride_seq,
                                             block.keys_left(), p.head_dim_v);
    if (p.dk.data)
        copy_gradient<KTile, Block::THREADS>(block.tile_k(), block.rows_of(p.dk), p.dk.stride_seq,
                                             block.keys_left(), p.head_dim);
}
