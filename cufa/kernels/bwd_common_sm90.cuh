// Parts that the Hopper kernels of the backward pass share.
#pragma once
#include "bwd_epilogue.cuh"
#include "bwd_params.cuh"
#include "bwd_place.cuh"
#include "ptx_bwd_sm90.cuh"
#include "tile_sm90.cuh"

struct BackwardMaps {
    TensorMap q, k, v, d_out;
};
template <class SCORE, class KV>
struct TmaBackwardArguments {
    BackwardMaps maps;
    BackwardArguments<SCORE, KV> params;
};

// Registers of a thread after the producer has left most of its own to the consumers.
template <int CONSUMERS>
struct BackwardRegisters {
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    static constexpr int AT_LAUNCH = 65536 / THREADS / 8 * 8, ALL = AT_LAUNCH * (CONSUMERS + 1);
    static constexpr int SHARE = (ALL - 24) / CONSUMERS / 8 * 8;
    static constexpr int CONSUMER_REGISTERS = SHARE < 240 ? SHARE : 240;
    static constexpr int REST = ALL - CONSUMER_REGISTERS * CONSUMERS;
    static constexpr int PRODUCER_REGISTERS = REST < 40 ? REST : 40;
};

// Starts the copy of a tile of keys' K or V.
template <class KTile, class KV, class Place>
__device__ void load_keys(uint32_t tile, const TensorMap& map, const Tensor& tensor,
                          const Place& place, int first_key, uint32_t bar) {
    KTile::load(tile, 0, map, bar, place.sequence.first_k + first_key,
                KV::map_head(tensor, place.head_kv), KV::map_batch(tensor, place.batch),
                L2_READ_ONCE);
}

// Accumulators as the left operand of the next product.
template <class T, int NT>
__device__ void pack_operand(uint32_t (&packed)[NT / 2][4], const float (&x)[NT][4]) {
#pragma unroll
    for (int k = 0; k < NT / 2; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            packed[k][i] = pack2<T>(x[2 * k + i / 2][i % 2 * 2], x[2 * k + i / 2][i % 2 * 2 + 1]);
}

// Zeroes the rows of a tile from `first` on: memory behind a sequence may hold NaN, and 0 times NaN
// is NaN. Each consumer writes all of them; the others write the same.
template <class Tile>
__device__ void clear_rows_from(int first, uint32_t tile, int consumer) {
    if (first >= Tile::ROWS) return;
#pragma unroll 1
    for (int chunk = max(first, 0) * Tile::CHUNKS + reread_thread_index() % 128;
         chunk < Tile::ROWS * Tile::CHUNKS; chunk += 128)
        sts_128(tile + Tile::offset(chunk / Tile::CHUNKS, chunk % Tile::CHUNKS),
                make_float4(0.f, 0.f, 0.f, 0.f));
    fence_proxy_async();
    named_barrier_sync(8 + consumer, 128);
}

// Writes 64 rows of a gradient, `factor` times, from a consumer's registers through a tile in
// shared memory: to its rows from `row` on, and its chunks from `chunk` on. `g` is where the tile's
// rows are: `rows` of them, with `cols` columns.
template <class T, class Tile, int N>
__device__ void store_gradient(const float (&r)[N][4], float factor, uint32_t tile, int consumer,
                               int row, int chunk, T* g, long long stride, int rows, int cols) {
    const int thread = reread_thread_index() % 128, lane = thread % 32;
    const int lane_row = row + thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
        stmatrix_x4(tile + Tile::offset(lane_row, chunk + 2 * i + lane / 16),
                    pack2<T>(r[2 * i][0] * factor, r[2 * i][1] * factor),
                    pack2<T>(r[2 * i][2] * factor, r[2 * i][3] * factor),
                    pack2<T>(r[2 * i + 1][0] * factor, r[2 * i + 1][1] * factor),
                    pack2<T>(r[2 * i + 1][2] * factor, r[2 * i + 1][3] * factor));
    named_barrier_sync(8 + consumer, 128);
    const bool aligned = (reinterpret_cast<uint64_t>(g) | stride * sizeof(T)) % 16 == 0;
#pragma unroll 4
    for (int piece = thread; piece < 64 * N; piece += 128) {
        const int of = row + piece / N, at = chunk + piece % N, col = at * Tile::CHUNK;
        if (of >= rows || col >= cols) continue;
        float values[4];
        lds(values, tile + Tile::offset(of, at));
        write_chunk(values, g + of * stride + col, cols - col, aligned);
    }
}
