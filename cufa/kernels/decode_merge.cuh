// The second step of flash-decoding: O of a unit from the pieces of it that blocks left behind.
#pragma once
#include "decode_params.cuh"
#include "softmax.cuh"

// Where pieces lie: two places a block. A piece with the unit's beginning is the last of its block, others are the first.
template <int BM, int HEAD_DIM_V>
struct Partial {
    static constexpr int FLOATS = BM * (HEAD_DIM_V + 2);
    float* memory;
    int begin;  // the block with the unit's beginning

    __device__ float* o(int block) const {
        return memory + static_cast<long long>(2 * block + (block == begin)) * FLOATS;
    }
    __device__ float2* m_and_l(int block) const { return reinterpret_cast<float2*>(o(block) + BM * HEAD_DIM_V); }
};

// Shares out rows of O among the warps, and hands on a row and the first of two neighbouring columns.
template <int WARPS, int COLS, class Function>
__device__ void for_pairs(int warp, int rows, Function function) {
    constexpr int PARTS = (COLS + 63) / 64;
#pragma unroll 1
    for (int i = warp; i < rows * PARTS; i += WARPS) {
        const int col = i % PARTS * 64 + threadIdx.x % 32 * 2;
        if (COLS % 64 == 0 || col < COLS) function(i / PARTS, col);
    }
}

// Merges the pieces of the blocks [partial.begin, end), in this order: `write` is handed a row and a column, two
// neighbouring numbers of O, and m and l of the row. `sWeight` holds a number for each piece and row, sM and sL for each row.
template <int WARPS, int BM, int HEAD_DIM_V, class Write>
__device__ void merge_pieces(const Partial<BM, HEAD_DIM_V>& partial, int end, int rows, int cols, float m_to_log2,
                             float* sWeight, float* sM, float* sL, Write write) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = partial.begin;
#pragma unroll 1
    for (int row = warp; row < rows; row += WARPS) {
        float m = -INF, l = 0.f;
#pragma unroll 1
        for (int block = begin + lane; block < end; block += 32) m = fmaxf(m, __ldcg(partial.m_and_l(block) + row).x);
        m = lanes_max<32>(m);
#pragma unroll 1
        for (int block = begin + lane; block < end; block += 32) {
            const float2 piece = __ldcg(partial.m_and_l(block) + row);
            const float weight = exp2_approx((piece.x - m) * m_to_log2);
            l += piece.y * weight;
            sWeight[(block - begin) * BM + row] = weight;
        }
        l = lanes_sum<32>(l);
        if (lane == 0) sM[row] = m, sL[row] = l;
    }
    __syncthreads();
    for_pairs<WARPS, HEAD_DIM_V>(warp, rows, [&](int row, int col) {
        if (col >= cols) return;
        float2 o = make_float2(0.f, 0.f);
#pragma unroll 8
        for (int block = begin; block < end; ++block) {
            const float2 piece = __ldcg(reinterpret_cast<const float2*>(partial.o(block) + row * HEAD_DIM_V + col));
            const float weight = sWeight[(block - begin) * BM + row];
            o.x = fmaf(piece.x, weight, o.x), o.y = fmaf(piece.y, weight, o.y);
        }
        write(row, col, o, sM[row], sL[row]);
    });
}
