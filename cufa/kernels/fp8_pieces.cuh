// O += P V for a tile of keys of fp8_wgmma.cu, in pieces of PIECE columns.
#pragma once
#include "fp8_config.cuh"

template <class C>
struct Pieces {
    static constexpr int PIECE = C::PIECE, PIECES = C::PIECES, IN_FLIGHT = C::IN_FLIGHT;

    float sums[IN_FLIGHT][PIECE / 8][4];

    // Queues the i-th piece.
    __device__ void queue(int i, const uint32_t (&rP)[C::BN / 32][4], uint32_t operand_v) {
        const uint32_t piece = C::VTile::template piece<PIECE>(operand_v, i);
#pragma unroll
        for (int k = 0; k < C::BN / 32; ++k)
            Wgmma<float8, PIECE>::rs(sums[i % IN_FLIGHT], rP[k], C::VTile::columns(piece, k),
                                     k > 0);
        wgmma_commit();
    }
    // Waits for the i-th piece; those before it have ended.
    static __device__ void wait(int i) {
        if (i <= PIECES - IN_FLIGHT)
            wgmma_wait<IN_FLIGHT - 1>();
        else
            wgmma_wait<0>();
    }
    // Adds the i-th piece to O.
    __device__ void add(int i, float scale, float (&rO)[1][C::HEAD_DIM_V / 8][4]) const {
#pragma unroll
        for (int e = 0; e < PIECE / 2; ++e) {
            float& o = rO[0][i * PIECE / 8 + e / 4][e % 4];
            o = fmaf(sums[i % IN_FLIGHT][e / 4][e % 4], scale, o);
        }
    }
};

// O += P V in float32: the sums of wgmma have too few bits for more than a tile of keys. These sums
// take the registers of S. IN_FLIGHT pieces are queued first, and each of the others as soon as the
// registers of an earlier one are free.
template <class C>
__device__ void add_product(float (&rO)[1][C::HEAD_DIM_V / 8][4],
                            const uint32_t (&rP)[C::BN / 32][4], uint32_t operand_v, float scale) {
    Pieces<C> pieces;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::IN_FLIGHT; ++i) pieces.queue(i, rP, operand_v);
#pragma unroll
    for (int i = 0; i < C::PIECES; ++i) {
        pieces.wait(i);
        pieces.add(i, scale, rO);
        if (i + C::IN_FLIGHT < C::PIECES) {
            wgmma_fence();
            pieces.queue(i + C::IN_FLIGHT, rP, operand_v);
        }
    }
}
