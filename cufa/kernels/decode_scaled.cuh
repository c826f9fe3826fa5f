// The products of the kernels that decode over K and V of 8 bits: see decode_block.cuh.
#pragma once
#include "decode_block.cuh"
#include "products_8bit.cuh"

template <class KIND, int BM>
struct ScaledProducts {
    template <class T>
    using Element = unsigned char;
    static constexpr bool SCALED = true;
    static constexpr int TEAM = BM > 16 ? 2 : 1;
    static __device__ void written() {}
    template <class T, class QTile, class KTile, int MT, int NT>
    static __device__ void qk(float (&rS)[MT][NT][4], uint32_t tile_q, uint32_t tile_k, int row0) {
        qk_8bit<T, KIND, QTile, KTile>(rS, tile_q, tile_k, row0);
    }
    template <class T, class VTile, int MT, int OT, int NT>
    static __device__ void pv(float (&rO)[MT][OT][4], const float (&rP)[MT][NT][4],
                              uint32_t tile_v) {
        pv_8bit<KIND, VTile>(rO, rP, tile_v);
    }
};
