// O and the log-sum-exp from registers to global memory.
#pragma once
#include "params.cuh"
#include "tile.cuh"

// Writes O of 16-bit type through shared memory, so that global stores are whole 16-byte chunks of a row.
// `smem` is a free tile; every thread of the block calls this.
template <class T, class OTile, int THREADS, int MT, int OT>
__device__ void store_o_16bit(const float (&rO)[MT][OT][4], uint32_t smem, int warp_row, int lane, T* gO,
                              long long stride, int rows, int cols) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int ot = 0; ot < OT; ++ot)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sts_32(smem + OTile::offset(warp_row + mt * 16 + h * 8 + lane / 4, ot) + lane % 4 * 4,
                       pack2<T>(rO[mt][ot][2 * h], rO[mt][ot][2 * h + 1]));
    __syncthreads();
    const bool aligned = (reinterpret_cast<uint64_t>(gO) | stride * sizeof(T)) % 16 == 0;
    for (int piece = threadIdx.x; piece < OTile::ROWS * OTile::CHUNKS; piece += THREADS) {
        const int row = piece / OTile::CHUNKS, col = piece % OTile::CHUNKS * OTile::CHUNK;
        if (row >= rows || col >= cols) continue;
        const float4 chunk = lds_128(smem + OTile::offset(row, piece % OTile::CHUNKS));
        T* dst = gO + row * stride + col;
        if (aligned && col + OTile::CHUNK <= cols) {
            *reinterpret_cast<float4*>(dst) = chunk;
        } else {
            const T* elements = reinterpret_cast<const T*>(&chunk);
#pragma unroll
            for (int i = 0; i < OTile::CHUNK; ++i)
                if (col + i < cols) dst[i] = elements[i];
        }
    }
}

// Writes O of float32 from the registers of fa2_fp32.cu, where a thread holds eight neighbouring columns of each 32:
// element n of piece i is column 4 n + i. `row` is the first of this thread's rows.
template <int MT, int OT>
__device__ void store_o_fp32(const float (&rO)[MT][OT][4], float* gO, long long stride, int row, int rows, int cols,
                             int lane) {
    const bool aligned = (reinterpret_cast<uint64_t>(gO) | stride * sizeof(float)) % 16 == 0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + mt * 16 + h * 8;
            if (r >= rows) continue;
#pragma unroll
            for (int ot = 0; ot < OT; ot += 4)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int col = ot * 8 + lane % 4 * 8 + n * 4;
                    float* dst = gO + r * stride + col;
                    if (aligned && col + 4 <= cols) {
                        *reinterpret_cast<float4*>(dst) =
                            make_float4(rO[mt][ot][2 * h + n], rO[mt][ot + 1][2 * h + n], rO[mt][ot + 2][2 * h + n],
                                        rO[mt][ot + 3][2 * h + n]);
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (col + i < cols) dst[i] = rO[mt][ot + i][2 * h + n];
                    }
                }
        }
}

// `row` is the first of this thread's rows, and the tile's rows end at `rows`; one lane of four writes.
template <int MT>
__device__ void store_lse(const float (&lse)[MT][2], float* gLse, int row, int rows, int lane) {
    if (lane % 4 != 0) return;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (row + mt * 16 + h * 8 < rows) gLse[row + mt * 16 + h * 8] = lse[mt][h];
}
