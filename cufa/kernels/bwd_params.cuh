// The parameter of the kernels of the backward pass, and where rows are in their workspace.
#pragma once
#include "kv.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"
#include "score.cuh"

// Rows of the workspace come in units, none of which two sequences share. A multiple of all BM.
constexpr int ROW_UNIT = 128;
// Rows of the workspace for each counter of turns.
constexpr int TURN_ROWS = 16;

// `o` and `lse` are those of the forward pass; `q_tiles` counts units of rows. A gradient whose
// address is null is not written. cufa/specs/backward.py holds the same layout as a NumPy dtype.
struct BackwardParams : Params {
    Tensor d_out, dq, dk, dv;
    // For each row, (batch, heads_q, workspace_rows): the log-sum-exp, and the sum of dO *
    // O.
    float *row_lse, *row_delta;
    float* dq_sums;  // dQ / scale, in pieces, see DqPiece; null if dQ is not asked for
    int* turns;      // for a fixed order of sums, (batch, heads_q, workspace_rows / TURN_ROWS): how
                     // many tiles of keys have added to some of the rows; null for any order
    int* turns_drawn;    // how many blocks have begun
    float* kv_sums;      // parts of dK and dV, of some query heads each, see bwd_join.cu
    const float* sinks;  // (heads_q,)
    long long stride_sinks;
    float* d_sinks;      // (heads_q,)
    float scale;         // of scores, > 0
    float dq_factor;     // factor of dQ's sums: the scale, or minus it where Q comes negated
    int workspace_rows;  // of one head
    int kv_tiles;        // of keys, of one head
    // bwd_wgmma only: blocks that share the query heads of a tile of keys, and how many one takes.
    int kv_splits, split_heads;
};

// The same, then the parameters of the score's parts, and of the way of finding K and V.
template <class SCORE, class KV>
struct BackwardArguments : BackwardParams, SCORE, KV {};

// The first row of a head in the workspace.
template <class KV, class Arguments>
__device__ long long first_row(const Arguments& p, int batch, int head) {
    if constexpr (KV::RAGGED) {
        const int first = min(max(p.cu_seqlens_q[batch], 0), p.seq_q);
        return head * static_cast<long long>(p.workspace_rows) +
               (first / ROW_UNIT + batch) * static_cast<long long>(ROW_UNIT);
    } else {
        return (batch * p.heads_q + head) * static_cast<long long>(p.workspace_rows);
    }
}

// The unit of rows that a block works on.
template <class KV, class Arguments>
__device__ Tile unit_of_block(const Arguments& p) {
    const int head = block_index() / p.q_tiles, unit = block_index() % p.q_tiles;
    if constexpr (KV::RAGGED)
        return KV::template tile_of_head<ROW_UNIT>(p.cu_seqlens_q, p.seq_q, p.sequences, head,
                                                   unit);
    else
        return {head / p.heads_q, head % p.heads_q, unit};
}

// dQ is added up in pieces of 16 rows and eight columns, accumulator by accumulator, so that a warp
// adds to 128 bytes in a row; or, in QUADS, lane by lane, for copies that add. Pieces of float32
// are of each fourth column, see store_o_fp32.
template <class T, int HEAD_DIM, bool QUADS = false>
struct DqPiece {
    static constexpr int SIZE = 16 * 8, PIECES = HEAD_DIM / 8;

    // The place of a lane's i-th accumulator in a piece.
    static __device__ int index(int i, int lane) { return QUADS ? lane * 4 + i : i * 32 + lane; }

    // The place of a piece, from a row of the workspace on that is a multiple of 16.
    static __device__ float* at(float* sums, long long row, int piece) {
        return sums + (row / 16 * PIECES + piece) * SIZE;
    }
};
