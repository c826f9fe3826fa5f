// The backward pass, after its products: dQ from the sums in float32.
#include "bwd_epilogue.cuh"
#include "bwd_params.cuh"
#include "bwd_pieces.cuh"
#include "ptx.cuh"

constexpr int WARPS = 8;

// A block takes a unit of rows of one head, a warp 16 of them.
template <class T, int HEAD_DIM, bool QUADS, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32)
    bwd_finish(const __grid_constant__ BackwardArguments<SCORE, KV> p) {
    using Piece = DqPiece<T, HEAD_DIM, QUADS>;
    static_assert(ROW_UNIT == WARPS * 16, "a warp takes 16 rows");
    const Tile tile = unit_of_block<KV>(p);
    const Sequence sequence = KV::sequence(p, tile.batch, 0);
    const int warp_row = tile.q_tile * ROW_UNIT + thread_index() / 32 * 16,
              lane = thread_index() % 32;
    if (warp_row >= sequence.seq_q) return;
    const long long row0 = first_row<KV>(p, tile.batch, tile.head) + warp_row;
    T* gdQ =
        head_ptr<T>(p.dq, tile.batch, tile.head) + (sequence.first_q + warp_row) * p.dq.stride_seq;

    const bool aligned = (reinterpret_cast<uint64_t>(gdQ) | p.dq.stride_seq * sizeof(T)) % 16 == 0;
    for (int piece = 0; piece < HEAD_DIM / 8; piece += 4) {
        if (piece * 8 >= p.head_dim) return;
        float sums[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            sums[i / 4][i % 4] =
                Piece::at(p.dq_sums, row0, piece + i / 4)[Piece::index(i % 4, lane)] * p.dq_factor;
        if constexpr (sizeof(T) == 4) {  // a lane has eight columns of a row
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int row = x / 2 * 8 + lane / 4, col = piece * 8 + lane % 4 * 8 + x % 2 * 4;
                const float chunk[4] = {sums[0][x], sums[1][x], sums[2][x], sums[3][x]};
                if (warp_row + row < sequence.seq_q)
                    write_chunk(chunk, gdQ + row * p.dq.stride_seq + col, p.head_dim - col,
                                aligned);
            }
        } else {
            write_pieces(sums, gdQ, p.dq.stride_seq, sequence.seq_q - warp_row, piece, p.head_dim,
                         aligned);
        }
    }
}
