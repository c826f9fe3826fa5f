// Flash-decoding of many rows on Hopper, for float16 and bfloat16, sm_90a: see decode_block.cuh. A
// team is a warpgroup, whose products are of 64 rows and a tile of keys at once.
#include "decode_block.cuh"
#include "tile_sm90.cuh"

struct WgmmaProducts : InTypeOfQ {
    static constexpr int TEAM = 4;
    // wgmma reads through the asynchronous proxy.
    static __device__ void written() { fence_proxy_async(); }
    template <class T, class QTile, class KTile, int NT>
    static __device__ void qk(float (&rS)[1][NT][4], uint32_t tile_q, uint32_t tile_k, int) {
        using Q = WgmmaTile<QTile::ROWS, QTile::COLS>;
        using K = WgmmaTile<KTile::ROWS, KTile::COLS>;
        wgmma_fence();
        queue_product<T, Q, K>(rS[0], Q::operand(tile_q), K::operand(tile_k));
        wgmma_commit();
        wgmma_wait<0>();
    }
    template <class T, class VTile, int OT, int NT>
    static __device__ void pv(float (&rO)[1][OT][4], const float (&rP)[1][NT][4], uint32_t tile_v) {
        using V = WgmmaTile<VTile::ROWS, VTile::COLS>;
        uint32_t packed[NT / 2][4];
#pragma unroll
        for (int kk = 0; kk < NT / 2; ++kk)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                packed[kk][i] = pack2<T>(rP[0][2 * kk + i / 2][i % 2 * 2],
                                         rP[0][2 * kk + i / 2][i % 2 * 2 + 1]);
        wgmma_fence();
        queue_product<T, V>(rO[0], packed, V::operand(tile_v), true);
        wgmma_commit();
        wgmma_wait<0>();
    }
};

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, bool WHOLE, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    decode_wgmma(const __grid_constant__ DecodeArguments<SCORE, KV> p) {
    static_assert(BM == 64, "the rows of a product");
    decode_block<WgmmaProducts, T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, WARPS, false, WHOLE>(p);
}
