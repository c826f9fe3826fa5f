// The backward pass, before its products: the sum of dO * O of each row, and its log-sum-exp.
// Sums that the next kernel adds to become zero.
#include "bwd_params.cuh"
#include "chunk.cuh"
#include "ptx.cuh"

constexpr int WARPS = 8;

// A block takes a unit of rows of one head.
template <class T, int HEAD_DIM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32)
    bwd_prepare(const __grid_constant__ BackwardArguments<SCORE, KV> p) {
    using Piece = DqPiece<T, HEAD_DIM>;
    const Tile tile = unit_of_block<KV>(p);
    const Sequence sequence = KV::sequence(p, tile.batch, 0);
    const int q0 = tile.q_tile * ROW_UNIT, thread = thread_index(), lane = thread % 32;
    if (p.turns_drawn && block_index() == 0 && thread == 0) *p.turns_drawn = 0;
    if (q0 >= sequence.seq_q) return;
    const long long row0 = first_row<KV>(p, tile.batch, tile.head) + q0;

    if (p.dq_sums) {
        float4* sums = reinterpret_cast<float4*>(Piece::at(p.dq_sums, row0, 0));
        for (int i = thread; i < ROW_UNIT * HEAD_DIM / 4; i += WARPS * 32)
            sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    if (p.turns && thread < ROW_UNIT / TURN_ROWS) p.turns[row0 / TURN_ROWS + thread] = 0;

    // Some lanes share a row, chunks of 16 bytes; each reads several rows at once. Behind the last
    // row and column they read others, to no effect.
    constexpr int CHUNK = 16 / sizeof(T), CHUNKS = HEAD_DIM / CHUNK;
    constexpr int LANES = CHUNKS >= 32 ? 32 : CHUNKS >= 16 ? 16 : CHUNKS >= 8 ? 8 : 4;
    constexpr int AT_ONCE = WARPS * 32 / LANES, BATCH = AT_ONCE == 64 ? 2 : 4;
    const T* gO = head_ptr<T>(p.o, tile.batch, tile.head) + sequence.first_q * p.o.stride_seq;
    const T* gdO =
        head_ptr<T>(p.d_out, tile.batch, tile.head) + sequence.first_q * p.d_out.stride_seq;
    const float* gLse =
        p.lse +
        static_cast<long long>((KV::RAGGED ? 0 : tile.batch) * p.heads_q + tile.head) * p.seq_q +
        sequence.first_q;
    for (int first = thread / LANES; first < ROW_UNIT; first += BATCH * AT_ONCE) {
        float delta[BATCH] = {}, lse[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            lse[b] = gLse[min(q0 + first + b * AT_ONCE, sequence.seq_q - 1)];
#pragma unroll
        for (int c = 0; c < CHUNKS; c += LANES) {
            const int col = (c + lane % LANES) * CHUNK;
            float o[BATCH][CHUNK], d_out[BATCH][CHUNK];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const long long q = min(q0 + first + b * AT_ONCE, sequence.seq_q - 1);
                const int from = col < p.head_dim_v ? col : 0;
                load_chunk(o[b], gO + q * p.o.stride_seq + from);
                load_chunk(d_out[b], gdO + q * p.d_out.stride_seq + from);
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int i = 0; i < CHUNK; ++i)
                    if (col < p.head_dim_v) delta[b] = fmaf(d_out[b][i], o[b][i], delta[b]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = first + b * AT_ONCE;
            const float sum = lanes_sum<LANES>(delta[b]);
            if (lane % LANES != 0) continue;
            // P = exp(S - LSE) is 0 where there is no row, or no key that it sees.
            const bool sees = q0 + i < sequence.seq_q && lse[b] != -INF;
            p.row_lse[row0 + i] = sees ? lse[b] : INF;
            p.row_delta[row0 + i] = sees ? sum : 0.f;
        }
    }
}
