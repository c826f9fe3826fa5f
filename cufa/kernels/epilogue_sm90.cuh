// O and the log-sum-exp of fa3_wgmma.cu from registers to global memory.
#pragma once
#include "params.cuh"
#include "scheduler_sm90.cuh"
#include "tile_sm90.cuh"

// The rows that a thread of fa3_wgmma.cu holds: `row` + lane / 4 + {0, 8} of a head's rows, or of
// 2^pack_log2 heads' query by query.
struct PackedRows {
    int lane;
    int query[2], head[2];
    int batch, seq_q, first_q;

    // `batch` is 0 where several sequences are in one array.
    __device__ PackedRows(const Params& p, const Sequence& sequence, int batch, int tile_head,
                          int row)
        : lane(reread_thread_index() % 32),
          batch(batch),
          seq_q(sequence.seq_q),
          first_q(sequence.first_q) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + lane / 4 + 8 * h;
            query[h] = r >> p.pack_log2;
            head[h] = (tile_head << p.pack_log2) + r - (query[h] << p.pack_log2);
        }
    }
};

__device__ inline void store_lse(const float (&lse)[2], const Params& p, const PackedRows& rows) {
    if (rows.lane % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (rows.query[h] < rows.seq_q)
            p.lse[(static_cast<long long>(rows.batch) * (p.heads_q << p.pack_log2) + rows.head[h]) *
                      p.seq_q +
                  rows.first_q + rows.query[h]] = lse[h];
}

// Transposes the 4 x 4 matrix whose columns the four lanes of a quad hold.
__device__ inline void transpose_quad(uint32_t (&v)[4]) {
    const int lane = thread_index() % 32;
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            uint32_t& a = v[i];
            uint32_t& b = v[i + bit];
            const uint32_t other = __shfl_xor_sync(0xffffffff, lane & bit ? a : b, bit);
            (lane & bit ? a : b) = other;
        }
}

// Writes a warp's 16 rows of O straight from its registers, 16 bytes a lane at once. wgmma leaves a
// lane pairs of columns that are eight apart, which four lanes exchange. If O is CONTIGUOUS, a lane
// has eight neighbouring columns of 32 instead, and exchanges nothing: see VTile8.
template <class T, bool CONTIGUOUS = false, int OT>
__device__ void store_o_direct(const float (&rO)[OT][4], const Params& p, const PackedRows& rows) {
    static_assert(!CONTIGUOUS || OT % 4 == 0, "whole groups of 32 columns");
    uint32_t v[2][(OT + 3) / 4][4];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int ot = 0; ot < OT; ot += 4) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                v[h][ot / 4][i] =
                    ot + i < OT ? pack2<T>(rO[ot + i][2 * h], rO[ot + i][2 * h + 1]) : 0;
            if constexpr (!CONTIGUOUS) transpose_quad(v[h][ot / 4]);
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (rows.query[h] >= rows.seq_q) continue;
        const int col0 = rows.lane % 4 * 8;
        T* gRow = head_ptr<T>(p.o, rows.batch, rows.head[h]) +
                  (rows.first_q + rows.query[h]) * p.o.stride_seq + col0;
#pragma unroll
        for (int ot = 0; ot < OT; ot += 4) {
            const uint32_t (&x)[4] = v[h][ot / 4];
            if (col0 + ot * 8 < p.head_dim_v)
                *reinterpret_cast<uint4*>(gRow + ot * 8) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

// Writes a warpgroup's 64 rows of O through its part of `tile` in shared memory; the copy is still
// under way then. Where sequences are RAGGED, all of these rows must be the sequence's: the copy
// knows the end of the array only.
template <class T, class OTile, bool RAGGED, class Work, int OT>
__device__ void store_o_tma(const float (&rO)[OT][4], uint32_t tile, const TensorMap& map,
                            const Params& p, const volatile Work& work, int consumer) {
    const int thread = reread_thread_index(), lane = thread % 32, warp = thread / 32 - 4;
    const uint32_t warp_tile = tile + warp * 16 * OTile::ROW_BYTES;
    const uint32_t lane_offset = OTile::offset(lane % 16, lane / 16);
#pragma unroll
    for (int ot = 0; ot < OT; ot += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            r[i] = pack2<T>(rO[ot + i / 2][i % 2 * 2], rO[ot + i / 2][i % 2 * 2 + 1]);
        stmatrix_x4(warp_tile + OTile::advance(lane_offset, 0, ot), r[0], r[1], r[2], r[3]);
    }
    fence_proxy_async();
    named_barrier_sync(8 + consumer, 128);
    if (threadIdx.x % 128 != 0) return;
    const int query = (work.q0 + consumer * 64) >> p.pack_log2;
    if constexpr (RAGGED) {
        OTile::store(map, tile, consumer * 64, work.sequence.first_q + query, work.head, 0);
        tma_store_commit();
    } else if (query < p.seq_q) {
        OTile::store(map, tile, consumer * 64, query, work.head, work.batch);
        tma_store_commit();
    }
}

// Frees the slot of Q that `store_o_tma` wrote from, when its copy has been read: by the thread
// that has started it, or by ALL.
template <bool ALL, class Ring>
__device__ void release_after_store(const Ring& ring, uint32_t i) {
    const bool has_started = threadIdx.x % 128 == 0;
    if (has_started) tma_store_wait_read();
    if (ALL || has_started) ring.arrive(i);
}
