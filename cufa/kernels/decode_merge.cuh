// The second step of flash-decoding: O of a unit from the pieces of it that blocks leave in global memory.
#pragma once
#include "decode_params.cuh"
#include "softmax.cuh"

// Where pieces lie: two places a block. A piece with the unit's beginning is the last of its block, others are the first.
// A row is PARTS times 64 columns of O, then as often its m and l: each part is for another warp.
template <int HEAD_DIM_V>
struct Partial {
    static constexpr int PARTS = (HEAD_DIM_V + 63) / 64;
    static constexpr int ROW = HEAD_DIM_V + 4 * PARTS;
    float* memory;
    int begin;   // the block with the unit's beginning
    int floats;  // of a place

    __device__ Partial(const DecodeParams& p, int begin, int bm)
        : memory(p.partial), begin(begin), floats(min(p.group.divisor * p.seq_q, bm) * ROW) {}
    __device__ float* others(int block) const { return memory + static_cast<long long>(2 * block) * floats; }
    __device__ float* of(int block) const { return others(block) + (block == begin ? floats : 0); }
    static __device__ int column(int row, int col) { return row * ROW + col; }
    static __device__ int m_and_l(int row, int part) { return row * ROW + HEAD_DIM_V + 4 * part; }
};

// Shares out rows of O among the warps, and hands on a row and which 64 of its columns.
template <int WARPS, int COLS, class Function>
__device__ void for_each_part(int rows, Function function) {
    constexpr int PARTS = (COLS + 63) / 64;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
#pragma unroll 1
    for (int i = warp; i < rows * PARTS; i += WARPS) function(i / PARTS, i % PARTS);
}

// Leaves two numbers of a piece to whoever merges it.
__device__ inline void leave(float* p, float2 x) {
    st_relaxed(p, make_float2(x.x == x.x ? x.x : NAN, x.y == x.y ? x.y : NAN));
}

// How many pieces beyond the last one are looked at, too.
constexpr int PIECES_AT_ONCE = 16;

// Merges the pieces of the blocks [partial.begin, end), in this order, as they come, and leaves NOTHING in their place:
// `writer` is handed a row and a column, and what it returns two numbers of O from there on, and m and l of the row. The time
// is that of one look at L2 for PIECES_AT_ONCE of them. The last of these blocks does it: those that it waits for have begun
// before.
template <int WARPS, int HEAD_DIM_V, class Writer>
__device__ void merge_pieces(const Partial<HEAD_DIM_V>& partial, int end, int rows, float m_to_log2, Writer writer) {
    // Half a warp takes four columns a lane of every other piece.
    constexpr int EACH = PIECES_AT_ONCE / 2;
    const int lane = threadIdx.x % 32, half = lane / 16, step = 4 * partial.floats;
    for_each_part<WARPS, HEAD_DIM_V>(rows, [&](int row, int part) {
        const int col = min(part * 64 + lane % 16 * 4, HEAD_DIM_V - 4);  // lanes beyond the last column repeat it
        const auto write = writer(row, col + 2 * half);
        float m = -INF, l = 0.f;
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int block = partial.begin; block < end; block += PIECES_AT_ONCE) {
            const int n = end - block;
            float* of_state = partial.of(block + min(lane % 16, n - 1)) + partial.m_and_l(row, part);
            float* others = partial.others(block + half) + partial.column(row, col);
            float* first = others + (half == 0 && block == partial.begin ? partial.floats : 0);
            float4 pieces[EACH];
            float2 state;
            uint32_t largest;  // of the bits: those of NOTHING are
            do {
                state = ld_relaxed(of_state);
#pragma unroll
                for (int i = 0; i < EACH; ++i) pieces[i] = ld_relaxed_4(i == 0 ? first : others + i * step);
                largest = larger_bits(state.x, state.y);
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const float4& x = pieces[i];
                    const uint32_t of_piece = max(larger_bits(x.x, x.y), larger_bits(x.z, x.w));
                    largest = 2 * i + half < n ? max(largest, of_piece) : largest;
                }
            } while (__any_sync(0xffffffff, largest == NOTHING));
            const float4 nothing = nothings();
            if (lane < n && lane < PIECES_AT_ONCE) st_relaxed(of_state, make_float2(nothing.x, nothing.y));
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (2 * i + half < n) st_relaxed_4(i == 0 ? first : others + i * step, nothing);

            const float m_old = m;
            m = fmaxf(m, lanes_max<16>(state.x));
            const float weight = exp2_approx((state.x - m) * m_to_log2), alpha = exp2_approx((m_old - m) * m_to_log2);
            l = l * alpha + lanes_sum<16>(lane % 16 < n ? state.y * weight : 0.f);
            o.x *= alpha, o.y *= alpha, o.z *= alpha, o.w *= alpha;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float of_piece = __shfl_sync(0xffffffff, weight, 2 * i + half);
                const float4& x = pieces[i];
                if (2 * i + half < n) {
                    o.x = fmaf(x.x, of_piece, o.x), o.y = fmaf(x.y, of_piece, o.y);
                    o.z = fmaf(x.z, of_piece, o.z), o.w = fmaf(x.w, of_piece, o.w);
                }
            }
        }
        float* of_o[] = {&o.x, &o.y, &o.z, &o.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) *of_o[i] += __shfl_xor_sync(0xffffffff, *of_o[i], 16);
        write(half ? make_float2(o.z, o.w) : make_float2(o.x, o.y), m, l);
    });
}
