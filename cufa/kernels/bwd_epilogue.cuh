// dK and dV in registers, and from there to global memory.
#pragma once
#include "epilogue.cuh"
#include "ptx.cuh"
#include "tile.cuh"

// dK and dV of a warp. Where warps share keys, each holds one of the two.
template <int MT, int KT, int VT, bool SHARES>
struct Gradients {
    float dk[MT][KT][4] = {}, dv[MT][VT][4] = {};
    __device__ auto& k() { return dk; }
    __device__ auto& v() { return dv; }
};
template <int MT, int KT, int VT>
struct Gradients<MT, KT, VT, true> {
    static_assert(KT == VT, "one array is either of them");
    float either[MT][KT][4] = {};
    __device__ auto& k() { return either; }
    __device__ auto& v() { return either; }
};

// All of them `factor` times.
template <int MT, int OT>
__device__ void multiply(float (&r)[MT][OT][4], float factor) {
#pragma unroll
    for (int i = 0; i < MT * OT * 4; ++i) r[i / (OT * 4)][i / 4 % OT][i % 4] *= factor;
}

// A warp's rows of a 16-bit tile to shared memory, from row0 of the tile on.
template <class T, class Tile, int MT, int OT>
__device__ void stage_gradient(const float (&r)[MT][OT][4], uint32_t tile, int row0) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int ot = 0; ot < OT; ++ot)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sts_32(tile + Tile::offset(row0 + mt * 16 + h * 8 + lane / 4, ot) + lane % 4 * 4,
                       pack2<T>(r[mt][ot][2 * h], r[mt][ot][2 * h + 1]));
}
// Writes 16 bytes of a row, `left` elements at most: at once if that is all, and aligned.
template <class T>
__device__ void write_chunk(const float (&values)[4], T* dst, int left, bool aligned) {
    constexpr int CHUNK = 16 / sizeof(T);
    if (aligned && CHUNK <= left) {
        *reinterpret_cast<float4*>(dst) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
        const T* elements = reinterpret_cast<const T*>(values);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (i < left) dst[i] = elements[i];
    }
}
// The tile from there to global memory: whole 16-byte chunks of a row, where they are aligned.
template <class Tile, int THREADS, class T>
__device__ void copy_gradient(uint32_t tile, T* g, long long stride, int rows, int cols) {
    const bool aligned = (reinterpret_cast<uint64_t>(g) | stride * sizeof(T)) % 16 == 0;
    for (int piece = thread_index(); piece < Tile::ROWS * Tile::CHUNKS; piece += THREADS) {
        const int row = piece / Tile::CHUNKS, chunk = piece % Tile::CHUNKS,
                  col = chunk * Tile::CHUNK;
        if (row >= rows || col >= cols) continue;
        float values[4];
        lds(values, tile + Tile::offset(row, chunk));
        write_chunk(values, g + row * stride + col, cols - col, aligned);
    }
}
