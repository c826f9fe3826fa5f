// The products of the kernels that decode over K and V of 8 bits: see decode_block.cuh.
#pragma once
#include "decode_block.cuh"
#include "products_8bit.cuh"
#include "products_int8.cuh"

// KIND expands the elements.
template <class KIND, int BM>
struct ScaledProducts {
    template <class T>
    using Element = unsigned char;
    static constexpr bool SCALED = true, INTEGERS = false;
    static constexpr int TEAM = BM > 16 ? 2 : 1;
    template <class T, class QTile, int MT>
    struct Factors {};
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
// K of integers is not expanded where rows are few: more would take more registers than there are.
template <int BM>
struct ProductsOfInt8 : ScaledProducts<Int8, BM> {};
template <>
struct ProductsOfInt8<16> : ScaledProducts<Int8, 16> {
    static constexpr bool INTEGERS = true;
    template <class T, class QTile, int MT>
    using Factors = RowFactors<T, QTile, MT>;
    template <class T, class QTile, class KTile, int MT, int NT>
    static __device__ void qk(float (&rS)[MT][NT][4], const RowFactors<T, QTile, MT>& factors,
                              uint32_t tile_q, uint32_t tile_k, int row0, int rows) {
        qk_int8<T, QTile, KTile>(rS, factors, tile_q, tile_k, row0, rows);
    }
};
