// From sums in the order of accumulators, see DqPiece, to rows of a 16-bit array.
#pragma once
#include "bwd_epilogue.cuh"
#include "ptx.cuh"

// Four neighbouring lanes hold a row of four words each: columns after it.
__device__ inline void transpose_4x4(float (&x)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const bool upper = lane & step;
            const float other = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + step], step);
            if (upper)
                x[i] = other;
            else
                x[i + step] = other;
        }
}

// Writes a warp's 16 rows of four pieces, the first `left` rows and `cols` columns. A lane has two
// columns of each piece; four lanes exchange theirs, so that each writes a piece's row.
template <class T>
__device__ void write_pieces(const float (&sums)[4][4], T* rows, long long stride, int left,
                             int piece, int cols, bool aligned) {
    const int lane = thread_index() % 32, col = (piece + lane % 4) * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float chunk[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            chunk[i] = __uint_as_float(pack2<T>(sums[i][2 * h], sums[i][2 * h + 1]));
        transpose_4x4(chunk, lane);
        const int row = h * 8 + lane / 4;
        if (row < left) write_chunk(chunk, rows + row * stride + col, cols - col, aligned);
    }
}
