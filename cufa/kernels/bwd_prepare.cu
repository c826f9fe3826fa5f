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

    // Some lanes share a row, a chunk of 16 bytes each.
    constexpr int CHUNK = 16 / sizeof(T), CHUNKS = HEAD_DIM / CHUNK;
    constexpr int LANES = CHUNKS >= 32 ? 32 : CHUNKS >= 16 ? 16 : CHUNKS >= 8 ? 8 : 4;
    constexpr int AT_ONCE = WARPS * 32 / LANES;
    const T* gO = head_ptr<T>(p.o, tile.batch, tile.head) + sequence.first_q * p.o.stride_seq;
    const T* gdO =
        head_ptr<T>(p.d_out, tile.batch, tile.head) + sequence.first_q * p.d_out.stride_seq;
    const float* gLse =
        p.lse +
        static_cast<long long>((KV::RAGGED ? 0 : tile.batch) * p.heads_q + tile.head) * p.seq_q +
        sequence.first_q;
#pragma unroll 4
    for (int i = thread / LANES; i < ROW_UNIT; i += AT_ONCE) {
        const int q = q0 + i;
        const bool inside = q < sequence.seq_q;
        float delta = 0.f;
        if (inside)
            for (int col = lane % LANES * CHUNK; col < p.head_dim_v; col += LANES * CHUNK) {
                float o[CHUNK], d_out[CHUNK];
                load_chunk(o, gO + q * p.o.stride_seq + col);
                load_chunk(d_out, gdO + q * p.d_out.stride_seq + col);
#pragma unroll
                for (int c = 0; c < CHUNK; ++c) delta = fmaf(d_out[c], o[c], delta);
            }
        delta = lanes_sum<LANES>(delta);
        if (lane % LANES != 0) continue;
        // P = exp(S - LSE) is 0 where there is no row, or no key that it sees.
        const float lse = inside ? gLse[q] : -INF;
        p.row_lse[row0 + i] = lse == -INF ? INF : lse;
        p.row_delta[row0 + i] = lse == -INF ? 0.f : delta;
    }
}
