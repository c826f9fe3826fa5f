// The backward pass, after its products: dQ from the sums in float32.
#include "bwd_params.cuh"
#include "chunk.cuh"
#include "ptx.cuh"

constexpr int WARPS = 8;

// A block takes a unit of rows of one head, a warp 16 of them.
template <class T, int HEAD_DIM, bool QUADS, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32)
    bwd_finish(const __grid_constant__ BackwardArguments<SCORE, KV> p) {
    using Piece = DqPiece<T, HEAD_DIM, QUADS>;
    static_assert(ROW_UNIT == WARPS * 16, "a warp takes 16 rows");
    // A lane holds two neighbouring columns of a piece, or, of every fourth, two of each of four.
    constexpr int PIECES = sizeof(T) == 4 ? 4 : 1, TIMES = sizeof(T) == 4 ? 2 : 1,
                  COLS = sizeof(T) == 4 ? 4 : 2;
    const Tile tile = unit_of_block<KV>(p);
    const Sequence sequence = KV::sequence(p, tile.batch, 0);
    const int warp_row = tile.q_tile * ROW_UNIT + thread_index() / 32 * 16,
              lane = thread_index() % 32;
    if (warp_row >= sequence.seq_q) return;
    const long long row0 = first_row<KV>(p, tile.batch, tile.head) + warp_row;
    T* gdQ =
        head_ptr<T>(p.dq, tile.batch, tile.head) + (sequence.first_q + warp_row) * p.dq.stride_seq;

    for (int piece = 0; piece < HEAD_DIM / 8; piece += PIECES) {
        if (piece * 8 >= p.head_dim) return;
        float sums[PIECES][4];
#pragma unroll
        for (int i = 0; i < PIECES * 4; ++i)
            sums[i / 4][i % 4] =
                Piece::at(p.dq_sums, row0, piece + i / 4)[Piece::index(i % 4, lane)] * p.dq_factor;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = h * 8 + lane / 4;
            if (warp_row + row >= sequence.seq_q) continue;
#pragma unroll
            for (int n = 0; n < TIMES; ++n) {
                const int col = piece * 8 + (lane % 4 * TIMES + n) * COLS;
#pragma unroll
                for (int i = 0; i < COLS; ++i)
                    if (col + i < p.head_dim)
                        gdQ[row * p.dq.stride_seq + col + i] =
                            from_float<T>(sums[i % PIECES][2 * h + (PIECES == 4 ? n : i)]);
            }
        }
    }
}
