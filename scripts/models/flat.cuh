// A block's part of y = x W^T for few rows of x, as when text is generated: its time is that of reading W once. Elements
// of W go from memory to registers, 16 bytes a load and many at once, and there through the tensor cores, whose products
// are of 16 outputs and 8 rows (the flat products of FlashDecoding++, Hong et al. 2023, section 4); in float32 by
// ordinary instructions. A row has the same bits in whatever company.
#pragma once
#include "chunk.cuh"
#include "gates.cuh"
#include "streams.cuh"

constexpr int OUTPUTS = 16;  // of a tile
constexpr int ROWS = 8;      // of x in a group
constexpr int LINE = 8;      // chunks of 16 bytes that a warp reads of a row of W at once

// The use of the sums: they are written, or added to what is there, or those of the first half of the outputs
// gate those of the second (Shazeer 2020), in the order of `Gate`.
enum Finish { STORE, ADD, GATE_SILU, GATE_GELU, GATE_CLAMPED };

template <Finish FINISH>
constexpr bool GATES = FINISH >= GATE_SILU;

template <class T>
constexpr int SUMS = sizeof(T) == 2 ? 4 : 2 * ROWS;  // of a thread and group

// Adds the products of a chunk of two outputs, `a` and `b`, with that of each row. The lanes of a quad have chunks of
// their own: which elements meet in one instruction makes no difference as long as both sides agree. `row_of` says where the
// chunk of a row is.
template <class T, class RowOf>
__device__ void add_products(float (&sums)[SUMS<T>], uint4 a, uint4 b, RowOf row_of, int rows, bool read) {
    if constexpr (sizeof(T) == 2) {
        const int row = threadIdx.x % 32 / 4;
        uint4 c = make_uint4(0, 0, 0, 0);
        if (read && row < rows) c = *reinterpret_cast<const uint4*>(row_of(row));
        mma_m16n8k16<T>(sums, {a.x, b.x, a.y, b.y}, c.x, c.y);
        mma_m16n8k16<T>(sums, {a.z, b.z, a.w, b.w}, c.z, c.w);
    } else {
        const float of_a[4] = {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w)};
        const float of_b[4] = {__uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float c[4] = {};
            if (read && row < rows) load_chunk(c, row_of(row));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[2 * row] += of_a[i] * c[i];
                sums[2 * row + 1] += of_b[i] * c[i];
            }
        }
    }
}

// Puts a warp's sums of a group where all warps' are: [row][output].
template <class T>
__device__ void share(float (&sums)[SUMS<T>], float* shared) {
    const int output = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < SUMS<T>; ++i) {
        if constexpr (sizeof(T) == 2) {
            shared[(2 * lane + i % 2) * OUTPUTS + output + i / 2 * 8] = sums[i];
        } else {
            const float sum = lanes_sum<4>(sums[i]);
            if (lane == i % 4) shared[i / 2 * OUTPUTS + output + i % 2 * 8] = sum;
        }
    }
}

template <Finish FINISH>
constexpr int TILE_ENDS = OUTPUTS / (GATES<FINISH> ? 2 : 1);  // results of a tile and row

// W (outputs, inputs) with a bias or null. `x_of` is given the first row of a group and an input, and returns what says
// where that input is of a row of the group; `y_of` says where a row of y begins, (outputs), or half as many with a gate.
// The block has TILES of the outputs from the result `first` on, and its warps share the inputs out, LINES of each at a
// time; it has GROUPS of rows, of which there are `rows`. `waited` says whether the kernel before it has been waited for.
template <class T, class U, int GROUPS, Finish FINISH, int WARPS, int TILES, int LINES, class XOf, class YOf>
__device__ inline void flat_block(const T* weight, const float* bias, XOf x_of, YOf y_of, int outputs, int inputs,
                                  int first, int rows, bool waited) {
    extern __shared__ __align__(16) float smem[];
    constexpr int BLOCK_ROWS = GROUPS * ROWS, CHUNK = 16 / sizeof(T), STEPS = LINES * LINE / 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The second eight outputs of a tile are behind the first eight, or as far into the second half.
    const int end = GATES<FINISH> ? outputs / 2 : outputs, distance = GATES<FINISH> ? end : OUTPUTS / 2;

    const T *row_a[TILES], *row_b[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int output = first + tile * TILE_ENDS<FINISH> + lane / 4;  // what is beyond the end is not used
        row_a[tile] = weight + static_cast<long long>(min(output, outputs - 1)) * inputs;
        row_b[tile] = weight + static_cast<long long>(min(output + distance, outputs - 1)) * inputs;
    }

    float sums[TILES][GROUPS][SUMS<T>] = {};
    const int chunks = inputs / CHUNK;
    for (int start = warp * LINE; start < chunks; start += WARPS * LINE * LINES) {
        uint4 a[STEPS][TILES], b[STEPS][TILES];
        auto chunk_of = [&](int i) { return start + i / 2 * WARPS * LINE + i % 2 * 4 + lane % 4; };
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const bool read = chunk_of(i) < chunks;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                a[i][tile] = read ? load_once(row_a[tile] + chunk_of(i) * CHUNK) : make_uint4(0, 0, 0, 0);
                b[i][tile] = read ? load_once(row_b[tile] + chunk_of(i) * CHUNK) : make_uint4(0, 0, 0, 0);
            }
        }
        if (!waited) wait_for_previous();  // W is nobody's result
        waited = true;
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
                    add_products<T>(sums[tile][group], a[i][tile], b[i][tile],
                                    x_of(group * ROWS, chunk_of(i) * CHUNK), rows - group * ROWS,
                                    chunk_of(i) < chunks);
    }
    if (!waited) wait_for_previous();

#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            share<T>(sums[tile][group], smem + ((warp * TILES + tile) * BLOCK_ROWS + group * ROWS) * OUTPUTS);
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * BLOCK_ROWS * OUTPUTS / 2; i += 32 * WARPS) {
        const int tile = i / (BLOCK_ROWS * OUTPUTS / 2), row = i / 8 % BLOCK_ROWS;
        const int output = first + tile * TILE_ENDS<FINISH> + i % 8;
        if (row >= rows) continue;
        float both[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (bias && output + half * distance < outputs) both[half] = bias[output + half * distance];
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
                both[half] += smem[((w * TILES + tile) * BLOCK_ROWS + row) * OUTPUTS + i % 8 + half * 8];
        }
        U* out = y_of(row);
        if constexpr (GATES<FINISH>) {
            constexpr Gate KIND = static_cast<Gate>(FINISH - GATE_SILU);
            if (output < end) out[output] = from_float<U>(gate<KIND>(both[0], both[1]));
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = output + half * distance;
                if (at >= end) continue;
                if constexpr (FINISH == ADD) both[half] += to_float(out[at]);
                out[at] = from_float<U>(both[half]);
            }
        }
    }
}
