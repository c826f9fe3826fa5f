// The end of a unit of decode_block.cuh: O of the block's teams is added up, divided by the rows'
// sums and written, or left as a piece for whoever merges it.
#pragma once
#include "decode_merge.cuh"
#include "decode_scheduler.cuh"

// Writes rows of O, and their log-sum-exps, if asked for.
template <class T, class Softmax, class ARGUMENTS>
struct RowWriter {
    static constexpr bool FP32 = sizeof(T) == 4;
    const ARGUMENTS& p;
    const float m_to_log2;

    // Adds the sink to l of a row, and returns the number that its log-sum-exp is found from.
    __device__ float conclude(const UnitRows& tile, int row, float m, float& l) const {
        if (!FP32) l = Softmax::beyond(m, l);
        float lse = m * m_to_log2;
        if constexpr (ARGUMENTS::NEEDS_LSE)
            lse = Softmax::log_sum_exp(lse, l), p.end_row(l, lse, tile.head(p, row));
        return lse;
    }
    __device__ void write_lse(const UnitRows& tile, int row, float lse, float l) const {
        p.lse[static_cast<long long>(tile.batch * p.heads_q + tile.head(p, row)) * p.seq_q +
              tile.query(p, row)] = ARGUMENTS::NEEDS_LSE ? lse : Softmax::log_sum_exp(lse, l);
    }
    // Whether `columns` columns of any row can be written at once, from a multiple of them on.
    __device__ bool can_write(int columns) const {
        const long long strides = p.o.stride_batch | p.o.stride_head | p.o.stride_seq;
        return (reinterpret_cast<unsigned long long>(p.o.data) / sizeof(T) | strides |
                p.head_dim_v) %
                   columns ==
               0;
    }
    // Writes O / l of two columns of a row, `col`, which is even, and the next, to `of_row`; with
    // column 0 also the log-sum-exp.
    __device__ void write(const UnitRows& tile, int row, int col, T* of_row, const float (&o)[2],
                          float m, float l) const {
        const float lse = conclude(tile, row, m, l), inverse = FP32 ? 0.f : reciprocal_approx(l);
        auto divided = [&](int i) { return l == 0.f ? 0.f : FP32 ? o[i] / l : o[i] * inverse; };
        if (!can_write(2)) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (col + i < p.head_dim_v) of_row[i] = narrow<T>(divided(i));
        } else if (col < p.head_dim_v) {
            if constexpr (FP32)
                *reinterpret_cast<float2*>(of_row) = make_float2(divided(0), divided(1));
            else
                *reinterpret_cast<uint32_t*>(of_row) = pack2<T>(divided(0), divided(1));
        }
        if (p.lse && col == 0) write_lse(tile, row, lse, l);
    }
};

// Adds up O of a block's teams, which have seen different keys, in shared memory: FEW rows at a
// time behind the teams' rings of RING_BYTES, or all rows of a tile in place of the rings, if the
// block has no other unit.
template <class T, class Softmax, class ARGUMENTS, int BM, int HEAD_DIM_V, int TEAM, int WARPS,
          int RING_BYTES, bool SCALED>
struct UnitEnd {
    using Piece = Partial<HEAD_DIM_V>;
    static constexpr bool FP32 = sizeof(T) == 4, MANY = BM > 16;
    static_assert(!MANY || !FP32, "of many rows O is written in 16 bits");
    static constexpr float NO_KEYS = -1.f;  // in place of what O of a row is multiplied by
    static constexpr int TEAMS = WARPS / TEAM, PITCH = HEAD_DIM_V + 8;
    // Enough to give each warp something to do
    static constexpr int LEAST = WARPS / Piece::PARTS > 4 ? WARPS / Piece::PARTS : 4,
                         FEW = BM * TEAM / 8 > LEAST ? BM * TEAM / 8 : LEAST;
    static constexpr int SUM_BYTES = TEAMS * FEW * PITCH * 4;
    static constexpr bool ALL_FIT =
        MANY && BM > FEW && TEAMS * BM * PITCH * 4 <= RING_BYTES + SUM_BYTES;

    // m or l of a row, of each team
    struct alignas(TEAMS % 4 == 0 ? 16 : TEAMS % 2 == 0 ? 8 : 4) OfTeams {
        float of[TEAMS];
    };

    const RowWriter<T, Softmax, ARGUMENTS> writer;
    float* sSum;       // [TEAMS][FEW][PITCH]; [TEAMS][BM][PITCH] from the first ring on
    OfTeams *sM, *sL;  // [BM] each; with many rows then the weights of the teams' O, and in
                       // sL.of[0] the factor of O, or NO_KEYS
    T** sO;            // [BM]: where many rows of O begin, in place of Q when it has been used

    // `last` says that no keys of another unit are on their way; `one`, that the unit is in one
    // piece, which else is left as `partial`.
    template <int MT, int OT>
    __device__ void hand_on(const float (&rO)[MT][OT][4], const Softmax& softmax,
                            const UnitRows& tile, const Piece& partial, int block, bool one,
                            bool last, int warp, int lane) const {
        const int rows = tile.rows, team = warp / TEAM, first_row = warp % TEAM * (BM / TEAM);
#pragma unroll
        for (int i = 0; i < MT * 2; ++i) {
            const float l = lanes_sum<4>(softmax.l[i / 2][i % 2]);
            const int row = first_row + i * 8 + lane / 4;
            if (lane % 4 == 0)
                sM[row].of[team] = softmax.m[i / 2][i % 2].value(), sL[row].of[team] = l;
        }
        const bool all = ALL_FIT && last && rows > FEW;
        const int at_once = all ? BM : FEW;
        float* sum = all ? sSum - RING_BYTES / 4 : sSum;
        if (MANY) {
            __syncthreads();
            find_weights(tile, partial, block, one, warp, lane);
        }
#pragma unroll 1
        for (int begin = 0; begin < rows; begin += at_once) {
            const int some = min(rows - begin, at_once);
            if (begin > 0) __syncthreads();
#pragma unroll
            for (int i = 0; i < MT * 2; ++i) {
                const int row = first_row + i * 8 + lane / 4 - begin;
                if (row < 0 || row >= some) continue;
                float* of_row = sum + (team * at_once + row) * PITCH;
#pragma unroll
                for (int ot = 0; ot < OT; ++ot) {
                    const float x = rO[i / 2][ot][i % 2 * 2], y = rO[i / 2][ot][i % 2 * 2 + 1];
                    const int n = lane % 4 * 2;
                    if constexpr (SCALED) {  // columns of two pieces take turns: products_8bit.cuh
                        if (ot % 2 == 0)
                            *reinterpret_cast<float4*>(of_row + ot * 8 + 2 * n) =
                                make_float4(x, rO[i / 2][ot + 1][i % 2 * 2], y,
                                            rO[i / 2][ot + 1][i % 2 * 2 + 1]);
                    } else if constexpr (FP32)
                        of_row[ot / 4 * 32 + 4 * n + ot % 4] = x,
                                                          of_row[ot / 4 * 32 + 4 * n + 4 + ot % 4] =
                                                              y;
                    else
                        *reinterpret_cast<float2*>(of_row + ot * 8 + n) = make_float2(x, y);
                }
            }
            __syncthreads();
            if constexpr (MANY)
                add_up_many(sum, begin, some, at_once, partial, block, one, warp, lane);
            else
                add_up(sum, begin, some, at_once, tile, partial, block, one, lane);
        }
    }

 private:
    // A thread finds the numbers of a row: the weights of the teams' O, in place of m; and, if O is
    // written, its factor, in place of l, and where the row begins. (With threadIdx.x here, the
    // main loop of sixteen warps spills registers.)
    __device__ void find_weights(const UnitRows& tile, const Piece& partial, int block, bool one,
                                 int warp, int lane) const {
#pragma unroll 1
        for (int row = warp * 32 + lane; row < tile.rows; row += WARPS * 32) {
            float m = Softmax::NONE, l = 0.f;
            OfTeams of_row = sM[row];
            const OfTeams ls = sL[row];
#pragma unroll
            for (int t = 0; t < TEAMS; ++t) m = fmaxf(m, of_row.of[t]);
#pragma unroll
            for (int t = 0; t < TEAMS; ++t)
                of_row.of[t] = exp2_approx((of_row.of[t] - m) * writer.m_to_log2),
                l = fmaf(ls.of[t], of_row.of[t], l);
            sM[row] = of_row;
            if (one) {
                const float lse = writer.conclude(tile, row, m, l);
                // Without keys O may be anything, and is zero.
                sL[row].of[0] = l == 0.f ? NO_KEYS : reciprocal_approx(l),
                sO[row] = tile.template of<T>(writer.p, writer.p.o, row);
                if (writer.p.lse) writer.write_lse(tile, row, lse, l);
            } else {
#pragma unroll
                for (int part = 0; part < Piece::PARTS; ++part)
                    leave(partial.of(block) + partial.m_and_l(row, part), make_float2(m, l));
            }
        }
    }

    // Adds a team's numbers to columns of a row. Each is handed on once: a number that came again
    // after the merging block took it would stay there for the next launch.
    template <int COLS>
    static __device__ void add(float (&o)[COLS], const float* sum, int of_some, int at_once,
                               int col, int t, float weight) {
        const float* of_team = sum + (t * at_once + of_some) * PITCH + col;
#pragma unroll
        for (int i = 0; i < COLS; ++i) o[i] = fmaf(of_team[i], weight, t == 0 ? 0.f : o[i]);
    }
    template <int COLS>
    static __device__ void leave_columns(const Piece& partial, int block, int row, int col,
                                         const float (&o)[COLS]) {
#pragma unroll
        for (int i = 0; i < COLS; i += 2)
            leave(partial.of(block) + partial.column(row, col + i), make_float2(o[i], o[i + 1]));
    }

    // With many rows, a lane has four columns of some rows at once, and a warp a whole row, half of
    // a wide one, or several rows.
    __device__ void add_up_many(const float* sum, int begin, int some, int at_once,
                                const Piece& partial, int block, bool one, int warp,
                                int lane) const {
        constexpr int HALVES = HEAD_DIM_V > 128 ? 2 : 1, LANES = HEAD_DIM_V / HALVES / 4,
                      ROWS = 32 / LANES;
        static_assert(WARPS % HALVES == 0, "a warp has the same half of all its rows");
        constexpr int AT_ONCE = TEAMS > 2 ? 2 : 4;
        const ARGUMENTS& p = writer.p;
        const int col = (warp % HALVES * LANES + lane % LANES) * 4;
#pragma unroll 1
        for (int group = warp; group / HALVES * ROWS < some; group += WARPS * AT_ONCE) {
            // All rows are read before any is handed on: else each would wait for its own. (For a
            // piece, inverse and of_row mean nothing.)
            float o[AT_ONCE][4], inverse[AT_ONCE];
            T* of_row[AT_ONCE];
            auto of_some = [&](int i) {
                return (group + i * WARPS) / HALVES * ROWS + lane / LANES;
            };
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = min(of_some(i), some - 1);
                const OfTeams weights = sM[begin + at];
#pragma unroll
                for (int t = 0; t < TEAMS; ++t) add(o[i], sum, at, at_once, col, t, weights.of[t]);
                inverse[i] = sL[begin + at].of[0], of_row[i] = sO[begin + at] + col;
            }
            const bool has = lane < ROWS * LANES;
            if (!one) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (of_some(i) < some && has)
                        leave_columns(partial, block, begin + of_some(i), col, o[i]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE * 4; ++i)
                o[i / 4][i % 4] =
                    inverse[i / 4] == NO_KEYS ? 0.f : o[i / 4][i % 4] * inverse[i / 4];
            if (!writer.can_write(4)) {
#pragma unroll
                for (int i = 0; i < AT_ONCE * 4; ++i)
                    if (of_some(i / 4) < some && has && col + i % 4 < p.head_dim_v)
                        of_row[i / 4][i % 4] = narrow<T>(o[i / 4][i % 4]);
            } else {
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const uint2 four =
                        make_uint2(pack2<T>(o[i][0], o[i][1]), pack2<T>(o[i][2], o[i][3]));
                    if (of_some(i) < some && has && col < p.head_dim_v)
                        *reinterpret_cast<uint2*>(of_row[i]) = four;
                }
            }
        }
    }

    // A lane has two columns of a row, and a warp 64.
    __device__ void add_up(const float* sum, int begin, int some, int at_once, const UnitRows& tile,
                           const Piece& partial, int block, bool one, int lane) const {
        for_each_part<WARPS, HEAD_DIM_V>(some, [&](int of_some, int part) {
            const int row = begin + of_some, col = part * 64 + lane * 2;
            if (HEAD_DIM_V % 64 > 0 && col >= HEAD_DIM_V) return;
            const OfTeams ms = sM[row], ls = sL[row];
            float o[2], m = Softmax::NONE, l = 0.f;
#pragma unroll
            for (int t = 0; t < TEAMS; ++t) m = fmaxf(m, ms.of[t]);
#pragma unroll
            for (int t = 0; t < TEAMS; ++t) {
                const float weight = exp2_approx((ms.of[t] - m) * writer.m_to_log2);
                l = fmaf(ls.of[t], weight, l), add(o, sum, of_some, at_once, col, t, weight);
            }
            if (one) {
                writer.write(tile, row, col, tile.template of<T>(writer.p, writer.p.o, row) + col,
                             o, m, l);
                return;
            }
            leave_columns(partial, block, row, col, o);
            if (lane == 0) leave(partial.of(block) + partial.m_and_l(row, part), make_float2(m, l));
        });
    }
};
