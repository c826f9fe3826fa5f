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
        function(i / PARTS, min(col, COLS - 2));  // by all lanes
    }
}

// Merges the pieces of the blocks [partial.begin, end), in this order: `write` is handed a row and a column, two
// neighbouring numbers of O, and m and l of the row. What is asked for arrives together: the time is that of one look at L2.
template <int WARPS, int BM, int HEAD_DIM_V, class Write>
__device__ void merge_pieces(const Partial<BM, HEAD_DIM_V>& partial, int end, int rows, int cols, float m_to_log2,
                             Write write) {
    constexpr int AT_ONCE = 24;
    for_pairs<WARPS, HEAD_DIM_V>(threadIdx.x / 32, rows, [&](int row, int col) {
        const int lane = threadIdx.x % 32;
        float m = -INF, l = 0.f;
        float2 o = make_float2(0.f, 0.f);
#pragma unroll 1
        for (int block = partial.begin; block < end; block += AT_ONCE) {
            const int n = min(end - block, AT_ONCE);
            const float2 state = __ldcg(partial.m_and_l(block + min(lane, n - 1)) + row);
            float2 pieces[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (i < n) pieces[i] = __ldcg(reinterpret_cast<const float2*>(partial.o(block + i) + row * HEAD_DIM_V + col));
            const float m_old = m;
            m = fmaxf(m, lanes_max<32>(state.x));
            const float weight = exp2_approx((state.x - m) * m_to_log2), alpha = exp2_approx((m_old - m) * m_to_log2);
            l = l * alpha + lanes_sum<32>(lane < n ? state.y * weight : 0.f);
            o.x *= alpha, o.y *= alpha;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float of_piece = __shfl_sync(0xffffffff, weight, i);
                if (i < n) o.x = fmaf(pieces[i].x, of_piece, o.x), o.y = fmaf(pieces[i].y, of_piece, o.y);
            }
        }
        if (col < cols) write(row, col, o, m, l);
    });
}
