// The backward pass, after its products: dQ from the sums in float32.
#include "bwd_epilogue.cuh"
#include "bwd_params.cuh"
#include "ptx.cuh"

constexpr int WARPS = 8;

// Four neighbouring lanes hold a row of four words each: columns after it.
__device__ inline void transpose_4x4(float (&x)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const bool upper = lane & step;
            const float other = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + step], step);
            if (upper)
                x[i] = other;
            else
                x[i + step] = other;
        }
}

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
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = h * 8 + lane / 4;
            T* row_dq = gdQ + row * p.dq.stride_seq;
            const bool inside = warp_row + row < sequence.seq_q;
            if constexpr (sizeof(T) == 4) {  // a lane has eight columns of a row
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int col = piece * 8 + lane % 4 * 8 + n * 4, x = 2 * h + n;
                    const float chunk[4] = {sums[0][x], sums[1][x], sums[2][x], sums[3][x]};
                    if (inside) write_chunk(chunk, row_dq + col, p.head_dim - col, aligned);
                }
            } else {  // two of each piece: four lanes turn theirs into a piece each
                float chunk[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    chunk[i] = __uint_as_float(pack2<T>(sums[i][2 * h], sums[i][2 * h + 1]));
                transpose_4x4(chunk, lane);
                const int col = (piece + lane % 4) * 8;
                if (inside) write_chunk(chunk, row_dq + col, p.head_dim - col, aligned);
            }
        }
    }
}
