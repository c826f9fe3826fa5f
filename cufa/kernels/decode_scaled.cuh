// The products of the kernels that decode over K and V of 8 bits: see decode_block.cuh.
#pragma once
#include "decode_block.cuh"
#include "products_8bit.cuh"
#include "products_int8.cuh"

// What they have in common. KIND expands the elements.
template <class KIND, int BM>
struct ScaledProducts {
    template <class T>
    using Element = unsigned char;
    static constexpr bool SCALED = true;
    static constexpr int TEAM = BM > 16 ? 2 : 1;
    static __device__ void written() {}
    template <class T, class VTile, int MT, int OT, int NT>
    static __device__ void pv(float (&rO)[MT][OT][4], const float (&rP)[MT][NT][4],
                              uint32_t tile_v) {
        pv_8bit<KIND, VTile>(rO, rP, tile_v);
    }
};
template <int BM>
struct ProductsOfE4m3 : ScaledProducts<E4m3, BM> {
    static constexpr bool INTEGERS = false;
    template <class T, class QTile, int MT>
    struct Factors {};
    template <class T, class QTile, class KTile, int MT, int NT>
    static __device__ void qk(float (&rS)[MT][NT][4], uint32_t tile_q, uint32_t tile_k, int row0) {
        qk_e4m3<T, QTile, KTile>(rS, tile_q, tile_k, row0);
    }
};
template <int BM>
struct ProductsOfInt8 : ScaledProducts<Int8, BM> {
    static constexpr bool INTEGERS = true;
    template <class T, class QTile, int MT>
    using Factors = RowFactors<T, QTile, MT>;
    template <class T, class QTile, class KTile, int MT, int NT>
    static __device__ void qk(float (&rS)[MT][NT][4], const RowFactors<T, QTile, MT>& factors,
                              uint32_t tile_q, uint32_t tile_k, int row0, int rows) {
        qk_int8<T, QTile, KTile>(rS, factors, tile_q, tile_k, row0, rows);
    }
};
