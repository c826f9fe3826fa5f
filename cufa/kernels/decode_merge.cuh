// The second step of flash-decoding: O of a unit from the pieces of it that blocks left behind.
#pragma once
#include "decode_params.cuh"
#include "softmax.cuh"

// Where pieces lie: two places a block. A piece with the unit's beginning is the last of its block, others are the first.
template <int BM, int HEAD_DIM_V>
struct Partial {
    static constexpr int FLOATS = BM * (HEAD_DIM_V + 2), M_AND_L = BM * HEAD_DIM_V;
    float* memory;
    int begin;  // the block with the unit's beginning

    __device__ float* others(int block) const { return memory + static_cast<long long>(2 * block) * FLOATS; }
    __device__ float* of(int block) const { return others(block) + (block == begin ? FLOATS : 0); }
};

// Shares out rows of O among the warps, and hands on a row and the first of two columns. Lanes beyond the last column
// repeat it.
template <int WARPS, int COLS, class Function>
__device__ void for_each_pair(int rows, Function function) {
    constexpr int PARTS = (COLS + 63) / 64;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
#pragma unroll 1
    for (int i = warp; i < rows * PARTS; i += WARPS)
        function(i / PARTS, min(i % PARTS * 64 + static_cast<int>(threadIdx.x) % 32 * 2, COLS - 2));
}

// Merges the pieces of the blocks [partial.begin, end), in this order: `write` is handed a row and a column, two
// numbers of O from there on, and m and l of the row. AT_ONCE pieces are asked for together: the time is that of one look at
// L2. Each warp has an `sWeight` of its own.
template <int WARPS, int AT_ONCE, int BM, int HEAD_DIM_V, class Write>
__device__ void merge_pieces(const Partial<BM, HEAD_DIM_V>& partial, int end, int rows, float m_to_log2, float* sWeight,
                             Write write) {
    auto fetched = [](const float* p) { return __ldcg(reinterpret_cast<const float2*>(p)); };
    constexpr int STEP = 2 * Partial<BM, HEAD_DIM_V>::FLOATS;
    for_each_pair<WARPS, HEAD_DIM_V>(rows, [&](int row, int col) {
        const int lane = threadIdx.x % 32;
        float m = -INF, l = 0.f;
        float2 o = make_float2(0.f, 0.f);
#pragma unroll 1
        for (int block = partial.begin; block < end; block += AT_ONCE) {
            const int n = min(end - block, AT_ONCE);
            const float2 state = fetched(partial.of(block + min(lane, n - 1)) + partial.M_AND_L + 2 * row);
            const float *first = partial.of(block) + row * HEAD_DIM_V + col,
                        *others = partial.others(block) + row * HEAD_DIM_V + col;
            float2 pieces[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (i < n) pieces[i] = fetched(i == 0 ? first : others + i * STEP);
            const float m_old = m;
            m = fmaxf(m, lanes_max<32>(state.x));
            const float weight = exp2_approx((state.x - m) * m_to_log2), alpha = exp2_approx((m_old - m) * m_to_log2);
            __syncwarp();
            if (lane < AT_ONCE) sWeight[lane] = weight;
            l = l * alpha + lanes_sum<32>(lane < n ? state.y * weight : 0.f);
            __syncwarp();
            o.x *= alpha, o.y *= alpha;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (i < n) o.x = fmaf(pieces[i].x, sWeight[i], o.x), o.y = fmaf(pieces[i].y, sWeight[i], o.y);
        }
        write(row, col, o, m, l);
    });
}
