// The backward pass, after its products, where several blocks share the query heads of a tile of
// keys: adds up their parts of dK and dV, in a fixed order.
#include "bwd_params.cuh"
#include "bwd_pieces.cuh"
#include "bwd_place.cuh"
#include "ptx.cuh"

constexpr int WARPS = 8;

// A block takes a tile of keys, a warp 16 of them at a time.
template <class T, int HEAD_DIM, int BN, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32)
    bwd_join(const __grid_constant__ BackwardArguments<SCORE, KV> p) {
    using Piece = DqPiece<T, HEAD_DIM, true>;
    using Place = KeyPlace<ROW_UNIT, BN, SCORE, KV>;
    constexpr long long PART = BN * HEAD_DIM;  // dK or dV of a block
    const Place place(p, Place::tile(p, block_index()));
    const int lane = thread_index() % 32;
    float* of_tile = p.kv_sums + block_index() * p.kv_splits * 2 * PART;
    auto join = [&](const Tensor& to, int cols, float* parts, int row) {
        if (!to.data) return;
        T* rows = place.template rows_of<T>(to) + row * to.stride_seq;
        const bool aligned =
            (reinterpret_cast<uint64_t>(rows) | to.stride_seq * sizeof(T)) % 16 == 0;
        for (int piece = 0; piece * 8 < cols; piece += 4) {
            float sums[4][4] = {};
            for (int split = 0; split < p.kv_splits; ++split)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4 x = *reinterpret_cast<const float4*>(
                        Piece::at(parts + split * 2 * PART, row, piece + i) + lane * 4);
                    sums[i][0] += x.x, sums[i][1] += x.y, sums[i][2] += x.z, sums[i][3] += x.w;
                }
            write_pieces(sums, rows, to.stride_seq, place.keys_left() - row, piece, cols, aligned);
        }
    };
    for (int row = thread_index() / 32 * 16; row < BN; row += WARPS * 16) {
        join(p.dk, p.head_dim, of_tile, row);
        join(p.dv, p.head_dim_v, of_tile + PART, row);
    }
}
