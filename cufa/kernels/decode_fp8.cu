// Flash-decoding over K and V of 8-bit floating point, e4m3, with a scale for each key and head, by
// mma.sync, sm_80 and later: see decode_block.cuh.
#include "decode_scaled.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, bool WHOLE, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    decode_fp8(const __grid_constant__ ScaledArguments<SCORE, KV> p) {
    decode_block<ScaledProducts<E4m3, BM>, T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, WARPS, false,
                 WHOLE>(p);
}
