// Flash-decoding by mma.sync, sm_80 and later: see decode_block.cuh. With more than 16 rows two
// warps are a team, so that keys are read once.
#include "decode_block.cuh"
#include "products_fp32.cuh"
#include "products_mma.cuh"

template <int BM>
struct MmaProducts : InTypeOfQ {
    static constexpr int TEAM = BM > 16 ? 2 : 1;
    static __device__ void written() {}
    template <class T, class QTile, class KTile, int MT, int NT>
    static __device__ void qk(float (&rS)[MT][NT][4], uint32_t tile_q, uint32_t tile_k, int row0) {
        if constexpr (sizeof(T) == 4)
            qk_tensor_cores<QTile, KTile>(rS, tile_q, tile_k, 0);
        else
            qk_mma<T, QTile, KTile>(rS, tile_q, tile_k, row0);
    }
    template <class T, class VTile, int MT, int OT, int NT>
    static __device__ void pv(float (&rO)[MT][OT][4], const float (&rP)[MT][NT][4],
                              uint32_t tile_v) {
        if constexpr (sizeof(T) == 4)
            pv_tensor_cores<VTile>(rO, rP, tile_v, 0);
        else
            pv_mma<T, VTile>(rO, rP, tile_v, [](int) { return false; });
    }
};

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, bool UNIFIED, bool WHOLE, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    decode(const __grid_constant__ DecodeArguments<SCORE, KV> p) {
    decode_block<MmaProducts<BM>, T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, WARPS, UNIFIED, WHOLE>(
        p);
}
