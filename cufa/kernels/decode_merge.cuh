// The second step of flash-decoding: O of a unit from the pieces of it that blocks leave in global
// memory.
#pragma once
#include "decode_params.cuh"
#include "softmax.cuh"

// Where pieces lie: two places a block. A piece with the unit's beginning is the last of its block,
// others are the first. A row is PARTS times 64 columns of O, then as often its m and l: each part
// is for another warp.
template <int HEAD_DIM_V>
struct Partial {
    static constexpr int PARTS = (HEAD_DIM_V + 63) / 64;
    static constexpr int ROW = HEAD_DIM_V + 4 * PARTS;
    float* memory;
    int begin;   // the block with the unit's beginning
    int floats;  // of a place

    __device__ Partial(const DecodeParams& p, int begin, int bm)
        : memory(p.partial), begin(begin), floats(min(p.group.divisor * p.seq_q, bm) * ROW) {}
    __device__ float* others(int block) const {
        return memory + static_cast<long long>(2 * block) * floats;
    }
    __device__ float* of(int block) const { return others(block) + (block == begin ? floats : 0); }
    static __device__ int column(int row, int col) { return row * ROW + col; }
    static __device__ int m_and_l(int row, int part) { return row * ROW + HEAD_DIM_V + 4 * part; }
};

// Shares out rows of O among the warps of `blocks` blocks, this one among them, and hands on a row
// and which 64 of its columns.
template <int WARPS, int COLS, class Function>
__device__ void for_each_part(int rows, Function function, int block = 0, int blocks = 1) {
    constexpr int PARTS = (COLS + 63) / 64;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
#pragma unroll 1
    for (int i = block * WARPS + warp; i < rows * PARTS; i += blocks * WARPS)
        function(i / PARTS, i % PARTS);
}

// Leaves two numbers of a piece to whoever merges it.
__device__ inline void leave(float* p, float2 x) {
    st_relaxed(p, make_float2(x.x == x.x ? x.x : NAN, x.y == x.y ? x.y : NAN));
}

// The pieces of a row that are looked at in the time of one look at L2.
constexpr int PIECES_AT_ONCE = 16;

// Merges the pieces of the blocks [partial.begin, end), in this order, as they come, and leaves
// NOTHING in their place. Takes the rows of one share of `shares`. `place` says where a row and a
// column of O are; `write` gets that place, two numbers of O from there on, and m and l of the row.
// A warp has ROWS rows at a time.
template <int WARPS, int ROWS, int HEAD_DIM_V, class Place, class Write>
__device__ void merge_pieces(const Partial<HEAD_DIM_V>& partial, int end, int rows, int share,
                             int shares, float m_to_log2, Place place, Write write) {
    // Half a warp takes four columns a lane of every other piece.
    constexpr int EACH = PIECES_AT_ONCE / 2;
    static_assert(PIECES_AT_ONCE == 16, "each lane of half a warp has m and l of one");
    const int lane = threadIdx.x % 32, half = lane / 16, step = 4 * partial.floats;
    auto merge = [&](int some, int part) {
        const int col = min(part * 64 + lane % 16 * 4,
                            HEAD_DIM_V - 4);  // lanes beyond the last column repeat it
        auto row = [&](int r) {
            return min(some * ROWS + r, rows - 1);
        };  // and those beyond the last row that
        float m[ROWS], l[ROWS];
        float4 o[ROWS];
        decltype(place(0, 0)) of_row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            m[r] = -INF, l[r] = 0.f, o[r] = make_float4(0.f, 0.f, 0.f, 0.f),
            of_row[r] = place(row(r), col + 2 * half);
            computed_here(of_row[r]);  // while pieces are on their way
        }
#pragma unroll 1
        for (int block = partial.begin; block < end; block += PIECES_AT_ONCE) {
            const int n = end - block;
            float* of_state = partial.of(block + min(lane % 16, n - 1));
            float* others = partial.others(block + half);
            float* first = others + (half == 0 && block == partial.begin ? partial.floats : 0);
            auto state_of = [&](int r) { return of_state + partial.m_and_l(row(r), part); };
            auto piece_of = [&](int r, int i) {
                return (i == 0 ? first : others + i * step) + partial.column(row(r), col);
            };
            float4 pieces[ROWS][EACH];
            float2 state[ROWS];
            uint32_t largest;  // of the bits: those of NOTHING are
            do {
                largest = 0;
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    state[r] = ld_relaxed(state_of(r));
#pragma unroll
                    for (int i = 0; i < EACH; ++i)
                        pieces[r][i] = 2 * i + half < n ? ld_relaxed_4(piece_of(r, i))
                                                        : make_float4(0.f, 0.f, 0.f, 0.f);
                }
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    largest = max(largest, larger_bits(state[r].x, state[r].y));
#pragma unroll
                    for (int i = 0; i < EACH; ++i) {
                        const float4& x = pieces[r][i];
                        largest = max(largest, max(larger_bits(x.x, x.y), larger_bits(x.z, x.w)));
                    }
                }
            } while (__any_sync(0xffffffff, largest == NOTHING));
            const float4 nothing = nothings();
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (lane < n && lane < PIECES_AT_ONCE)
                    st_relaxed(state_of(r), make_float2(nothing.x, nothing.y));
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    if (2 * i + half < n) st_relaxed_4(piece_of(r, i), nothing);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float m_old = m[r];
                m[r] = fmaxf(m_old, lanes_max<16>(state[r].x));
                const float weight = exp2_approx((state[r].x - m[r]) * m_to_log2),
                            alpha = exp2_approx((m_old - m[r]) * m_to_log2);
                l[r] = l[r] * alpha + lanes_sum<16>(lane % 16 < n ? state[r].y * weight : 0.f);
                o[r].x *= alpha, o[r].y *= alpha, o[r].z *= alpha, o[r].w *= alpha;
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const float of_piece = __shfl_sync(0xffffffff, weight, 2 * i + half);
                    const float4& x = pieces[r][i];
                    if (2 * i + half < n) {
                        o[r].x = fmaf(x.x, of_piece, o[r].x), o[r].y = fmaf(x.y, of_piece, o[r].y);
                        o[r].z = fmaf(x.z, of_piece, o[r].z), o[r].w = fmaf(x.w, of_piece, o[r].w);
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float* of_o[] = {&o[r].x, &o[r].y, &o[r].z, &o[r].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) *of_o[i] += __shfl_xor_sync(0xffffffff, *of_o[i], 16);
            const float2 two = half ? make_float2(o[r].z, o[r].w) : make_float2(o[r].x, o[r].y);
            write(of_row[r], row(r), col + 2 * half, two, m[r], l[r]);
        }
    };
    for_each_part<WARPS, HEAD_DIM_V>((rows + ROWS - 1) / ROWS, merge, share, shares);
}

// The same for `n` pieces: two, each read by half of a warp, or up to four, each read by a quarter.
// Long units are often cut so, and the steps for more pieces take as long as all else then. A lane
// reads four of 64 columns of its piece, or eight. Lanes of the same place in their parts pass each
// other what they do not keep, so that each has two columns of all pieces. With four pieces, a lane
// of the first half keeps the first four of its eight columns, and one of an even part the first
// two of these.
template <int WARPS, int ROWS, int PIECES, int HEAD_DIM_V, class Place, class Write>
__device__ void merge_few_pieces(const Partial<HEAD_DIM_V>& partial, int n, int rows, int share,
                                 int shares, float m_to_log2, Place place, Write write) {
    constexpr int LANES = 32 / PIECES, FOURS = PIECES / 2;  // of a piece; of a lane's columns
    const int lane = threadIdx.x % 32, own = lane / LANES;
    const bool has = PIECES == 2 || own < n;
    float* of_piece = partial.of(partial.begin + (has ? own : 0));
    auto merge = [&](int some, int part) {
        auto col = [&](int four) {  // lanes beyond the last column repeat it
            return min(part * 64 + (four * LANES + lane % LANES) * 4, HEAD_DIM_V - 4);
        };
        auto row = [&](int r) {
            return min(some * ROWS + r, rows - 1);
        };  // and those beyond the last row that
        float4 x[ROWS][FOURS];
        float2 state[ROWS];
        auto look = [&] {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                state[r] = has ? ld_relaxed(of_piece + partial.m_and_l(row(r), part))
                               : make_float2(-INF, 0.f);
#pragma unroll
                for (int i = 0; i < FOURS; ++i)
                    x[r][i] = has ? ld_relaxed_4(of_piece + partial.column(row(r), col(i)))
                                  : make_float4(0.f, 0.f, 0.f, 0.f);
            }
        };
        auto some_are_missing = [&] {
            uint32_t largest = 0;  // of the bits: those of NOTHING are
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (has) largest = max(largest, larger_bits(state[r].x, state[r].y));
#pragma unroll
                for (int i = 0; i < FOURS; ++i)
                    largest = max(largest, max(larger_bits(x[r][i].x, x[r][i].y),
                                               larger_bits(x[r][i].z, x[r][i].w)));
            }
            return __any_sync(0xffffffff, largest == NOTHING);
        };
        look();
        const int own_col =
            col(own / 2) +
            own % 2 * 2;  // of the two that this lane will have of all pieces together
        decltype(place(0, 0)) of_row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) of_row[r] = place(row(r), own_col), computed_here(of_row[r]);
        while (some_are_missing()) look();
        const float4 nothing = nothings();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (has && lane % LANES == 0)
                st_relaxed(of_piece + partial.m_and_l(row(r), part),
                           make_float2(nothing.x, nothing.y));
#pragma unroll
            for (int i = 0; i < FOURS; ++i)
                if (has) st_relaxed_4(of_piece + partial.column(row(r), col(i)), nothing);
        }
        // Adds the other lane's part of the column that this lane keeps, and gives away its own
        // part of the other's.
        auto exchanged = [&](float low, float high, bool keeps_high, int distance) {
            return (keeps_high ? high : low) +
                   __shfl_xor_sync(0xffffffff, keeps_high ? low : high, distance);
        };
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float m = state[r].x;
#pragma unroll
            for (int i = LANES; i < 32; i *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, i));
            const float weight = has ? exp2_approx((state[r].x - m) * m_to_log2) : 0.f;
            float l = state[r].y * weight;
#pragma unroll
            for (int i = LANES; i < 32; i *= 2) l += __shfl_xor_sync(0xffffffff, l, i);
            float4 o = x[r][0];
            o.x *= weight, o.y *= weight, o.z *= weight, o.w *= weight;
            if constexpr (PIECES == 4) {
                const float4& y = x[r][1];
                const bool high = own / 2;
                o = make_float4(
                    exchanged(o.x, y.x * weight, high, 16), exchanged(o.y, y.y * weight, high, 16),
                    exchanged(o.z, y.z * weight, high, 16), exchanged(o.w, y.w * weight, high, 16));
            }
            const float2 two = make_float2(exchanged(o.x, o.z, own % 2, LANES),
                                           exchanged(o.y, o.w, own % 2, LANES));
            write(of_row[r], row(r), own_col, two, m, l);
        }
    };
    for_each_part<WARPS, HEAD_DIM_V>((rows + ROWS - 1) / ROWS, merge, share, shares);
}

// Which of the blocks [begin, end) merge the pieces of a unit. The last one does: those that it
// waits for have begun before. Where rows are many, all blocks but the first share the rows out, if
// they see, after they have left their pieces, that the last one has begun: then all have begun,
// and may wait for each other. Each writes into a word of its place what it does.
template <int WARPS, int HEAD_DIM_V>
struct MergingBlocks {
    const Partial<HEAD_DIM_V> partial;
    const int block, end;
    const bool many;

    __device__ MergingBlocks(const Partial<HEAD_DIM_V>& partial, int block, int end, bool many_rows)
        : partial(partial),
          block(block),
          end(end),
          many(many_rows && count() > 1 && count() <= WARPS * 32) {}

    // When the block begins
    __device__ void begin() const {
        if (many && is_last() && threadIdx.x == 0) say(block, 1.f);
    }
    // When the block has left its pieces: calls `merge` for each of its shares of the rows.
    template <class Merge>
    __device__ void each_share(Merge merge) const {
        const int shares = many ? count() : 1;
        int share = shares - 1;
        if (!is_last()) {
            if (!many) return;
            bool helps = false;
            if (threadIdx.x == 0) helps = !is_nothing(said(end - 1)), say(block, helps);
            if (!__syncthreads_or(helps)) return;
            share = block - partial.begin - 1;
        }
        bool left = false;  // the share of the block that this thread has asked
#pragma unroll 1
        for (int asked = -1;; share = asked) {
            merge(share, shares);
            if (!many || !is_last()) return;
            if (asked < 0) {
                const int other = partial.begin + 1 + threadIdx.x;
                if (other < block) {
                    float helps;
                    do helps = said(other);
                    while (is_nothing(helps));
                    say(other, nothings().x);
                    left = helps == 0.f;
                }
                if (!__syncthreads_or(left)) break;
            }
            do ++asked;
            while (asked < shares && !__syncthreads_or(threadIdx.x == asked && left));
            if (asked == shares) break;
        }
        if (threadIdx.x == 0) say(block, nothings().x);
    }

 private:
    __device__ int count() const { return end - partial.begin - 1; }
    __device__ bool is_last() const { return block == end - 1; }
    __device__ float* word(int block) const {
        return partial.of(block) + partial.m_and_l(0, 0) + 2;
    }
    static __device__ bool is_nothing(float x) { return __float_as_uint(x) == NOTHING; }
    __device__ float said(int block) const { return ld_relaxed(word(block)).x; }
    __device__ void say(int block, float x) const { st_relaxed(word(block), make_float2(x, x)); }
};
