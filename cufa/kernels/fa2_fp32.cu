// FlashAttention-2 forward (Dao 2023, algorithm 1) for float32, at float32 accuracy, sm_80 and
// later. The loops are those of fa2_mma.cu, the products those of products_fp32.cuh.
#include "epilogue.cuh"
#include "fa2_block.cuh"
#include "params.cuh"
#include "products_fp32.cuh"
#include "ptx.cuh"
#include "rows_fp32.cuh"
#include "softmax.cuh"
#include "tile.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    fa2_fp32(const __grid_constant__ Arguments<SCORE, KV> p) {
    constexpr int V_PARTS =
        HEAD_DIM_V > 160 ? 2 : 1;  // warps that share rows, each with a part of the columns
    constexpr int ROW_WARPS =
        WARPS / V_PARTS;  // of the output, where registers do not hold all of them
    using Block = Fa2Block<T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, WARPS, ROW_WARPS, SCORE, KV>;
    using QTile = typename Block::QTile;
    using KTile = typename Block::KTile;
    using VTile = typename Block::VTile;
    constexpr int MT = Block::MT;                 // 16-row pieces of a warp
    constexpr int NT = BN / 8;                    // 8-key pieces of a tile of scores
    constexpr int OT = HEAD_DIM_V / V_PARTS / 8;  // 8-column pieces of the output of a warp

    extern __shared__ __align__(1024) unsigned char smem[];
    const Block block(p, smem);
    if (block.is_empty) return;
    OnlineSoftmax<MT, true, 0, false, SCORE::NATURAL> softmax(SCORE::to_log2(p.scale_log2));
    float rO[MT][OT][4] = {};
    auto part = [] { return thread_index() / 32 / ROW_WARPS; };

    block.start();
    // From the last tile of keys to the first: the masked ones come first.
    for (int j = block.end - 1; j >= block.first; --j) {
        block.next_k(j);
        const auto edge = block.edge(j);
        if (!edge.visits) {
            block.next_v(j);
            continue;
        }

        // S = Q K^T
        float rS[MT][NT][4] = {};
        if constexpr (HEAD_DIM > 32)
            qk_tensor_cores<QTile, KTile>(rS, block.sQ, block.tile_k(j), warp_row<BM, ROW_WARPS>());
        else
            qk_cuda_cores<QTile, KTile>(rS, block.sQ, block.tile_k(j), warp_row<BM, ROW_WARPS>());

        // P = exp(S - m); m, l and O follow
        block.apply_score(rS, j, edge.masked);
        softmax.update(rS, rO);
        block.drop(rS, j);
        block.next_v(j);

        // O += P V
        pv_tensor_cores<VTile>(rO, rS, block.tile_v(j), part() * OT * 2);
    }

    if constexpr (SCORE::CHANGES_EVERY_TILE)
        cp_async_wait<0>();  // of Q, where there is no tile of keys

    // O = O / l and the log-sum-exp
    float lse[MT][2];
    block.finish(softmax, rO, lse);
    const Tile tile = block.tile();
    const OutputTile<BM, ROW_WARPS> out = block.output(tile);
    if (part() == 0) store_lse(lse, p, out);
    store_o_fp32(rO, p.o, out, part() * OT * 8, p.head_dim_v);

    // Compute rows once more that are not finite. The two parts of an infinity, and of a number
    // that rounds up to one, cancel to NaN; large V overflow where P is more than 1; and 0 V of a
    // key that a row does not see may be NaN.
    float zero[MT][2] = {};  // or NaN
#pragma unroll
    for (int i = 0; i < MT * OT * 4; ++i) {
        float& of_row = zero[i / (OT * 4)][i / 2 % 2];
        of_row = fmaf(rO[i / (OT * 4)][i / 4 % OT][i % 4], 0.f, of_row);
    }
    uint32_t bad = 0;  // bit 2 mt + h: of this lane's rows
#pragma unroll
    for (int i = 0; i < MT * 2; ++i) bad |= (zero[i / 2][i % 2] != 0.f) << i;
    if (!__any_sync(0xffffffff, bad)) return;
#pragma unroll 1
    for (int row = 0; row < MT * 16; row += 4) {
        const uint32_t lanes = __ballot_sync(0xffffffff, bad >> row / 8 & 1) >> row % 8 * 4;
        uint32_t wanted = 0;
#pragma unroll
        for (int r = 0; r < 4; ++r) wanted |= ((lanes >> 4 * r & 0xf) != 0) << r;
        if (!__any_sync(0xffffffff, wanted)) continue;
#pragma unroll 1
        for (int col = 0; col < OT * 8; col += 32)
            attend_rows(p, tile, out.q0 + out.row0 + row, wanted, part() * OT * 8 + col);
    }
}
