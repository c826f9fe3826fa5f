// O and the log-sum-exp from registers to global memory.
#pragma once
#include "params.cuh"
#include "scheduler.cuh"
#include "score.cuh"
#include "tile.cuh"

// Where a block's output goes, computed afresh: registers are too scarce to keep it through the
// main loop.
template <int BM, int ROW_WARPS>
struct OutputTile {
    int batch, head, lane, seq_q;
    int first_q;  // the sequence's first row in the array
    int q0;       // first row of the block, counted from it
    int row0;     // first row of the warp, counted from q0

    // `batch` is 0 where several sequences are in one array.
    __device__ OutputTile(Tile tile, const Sequence& sequence, int batch)
        : batch(batch),
          head(tile.head),
          lane(thread_index() % 32),
          seq_q(sequence.seq_q),
          first_q(sequence.first_q),
          q0(tile.q_tile * BM),
          row0(warp_row<BM, ROW_WARPS>()) {}

    // The row of this thread's elements 2 h and 2 h + 1 of the accumulators of piece mt, counted
    // from q0.
    __device__ int row(int mt, int h) const { return row0 + mt * 16 + h * 8 + lane / 4; }
    __device__ bool inside(int row) const { return q0 + row < seq_q; }
};

// Writes O of 16-bit type through shared memory, so that global stores are whole 16-byte chunks of
// a row. `smem` is a free tile; every thread of the block calls this.
template <class T, class OTile, int WARPS, int MT, int OT>
__device__ void store_o_16bit(const float (&rO)[MT][OT][4], uint32_t smem, const Tensor& o,
                              const OutputTile<OTile::ROWS, WARPS>& out, int cols) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int ot = 0; ot < OT; ++ot)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sts_32(smem + OTile::offset(out.row(mt, h), ot) + out.lane % 4 * 4,
                       pack2<T>(rO[mt][ot][2 * h], rO[mt][ot][2 * h + 1]));
    __syncthreads();
    T* gO = head_ptr<T>(o, out.batch, out.head) + (out.first_q + out.q0) * o.stride_seq;
    const bool aligned = (reinterpret_cast<uint64_t>(gO) | o.stride_seq * sizeof(T)) % 16 == 0;
    for (int piece = thread_index(); piece < OTile::ROWS * OTile::CHUNKS; piece += WARPS * 32) {
        const int row = piece / OTile::CHUNKS, chunk = piece % OTile::CHUNKS,
                  col = chunk * OTile::CHUNK;
        if (!out.inside(row) || col >= cols) continue;
        float values[4];
        lds(values, smem + OTile::offset(row, chunk));
        T* dst = gO + row * o.stride_seq + col;
        if (aligned && col + OTile::CHUNK <= cols) {
            *reinterpret_cast<float4*>(dst) =
                make_float4(values[0], values[1], values[2], values[3]);
        } else {
            const T* elements = reinterpret_cast<const T*>(values);
#pragma unroll
            for (int i = 0; i < OTile::CHUNK; ++i)
                if (col + i < cols) dst[i] = elements[i];
        }
    }
}

// Writes O of float32 from the registers of fa2_fp32.cu, where a thread holds eight neighbouring
// columns of each 32: element n of piece i is column 4 n + i, counted from col0.
template <int BM, int ROW_WARPS, int MT, int OT>
__device__ void store_o_fp32(const float (&rO)[MT][OT][4], const Tensor& o,
                             const OutputTile<BM, ROW_WARPS>& out, int col0, int cols) {
    float* gO = head_ptr<float>(o, out.batch, out.head) + (out.first_q + out.q0) * o.stride_seq;
    const bool aligned = (reinterpret_cast<uint64_t>(gO) | o.stride_seq * sizeof(float)) % 16 == 0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!out.inside(out.row(mt, h))) continue;
#pragma unroll
            for (int ot = 0; ot < OT; ot += 4)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int col = col0 + ot * 8 + out.lane % 4 * 8 + n * 4;
                    float* dst = gO + out.row(mt, h) * o.stride_seq + col;
                    if (aligned && col + 4 <= cols) {
                        *reinterpret_cast<float4*>(dst) =
                            make_float4(rO[mt][ot][2 * h + n], rO[mt][ot + 1][2 * h + n],
                                        rO[mt][ot + 2][2 * h + n], rO[mt][ot + 3][2 * h + n]);
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (col + i < cols) dst[i] = rO[mt][ot + i][2 * h + n];
                    }
                }
        }
}

// Writes the log-sum-exp if it is wanted; one lane of a row's four does.
template <int BM, int ROW_WARPS, int MT>
__device__ void store_lse(const float (&lse)[MT][2], const Params& p,
                          const OutputTile<BM, ROW_WARPS>& out) {
    if (!p.lse || out.lane % 4 != 0) return;
    float* gLse = p.lse + static_cast<long long>(out.batch * p.heads_q + out.head) * p.seq_q +
                  out.first_q + out.q0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (out.inside(out.row(mt, h))) gLse[out.row(mt, h)] = lse[mt][h];
}
