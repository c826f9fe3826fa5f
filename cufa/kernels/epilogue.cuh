// O and the log-sum-exp from registers to global memory.
#pragma once
#include "params.cuh"
#include "scheduler.cuh"
#include "tile_sm90.cuh"

// Where a block's output goes, computed afresh: registers are too scarce to keep it through the main loop.
template <int BM, int ROW_WARPS>
struct OutputTile {
    int batch, head, lane, seq_q;
    int q0;    // first row of the block
    int row0;  // first row of the warp, counted from q0

    __device__ OutputTile(const Params& p, Tile tile)
        : batch(tile.batch),
          head(tile.head),
          lane(thread_index() % 32),
          seq_q(p.seq_q),
          q0(tile.q_tile * BM),
          row0(warp_row<BM, ROW_WARPS>()) {}

    // The row of this thread's elements 2 h and 2 h + 1 of the accumulators of piece mt, counted from q0.
    __device__ int row(int mt, int h) const { return row0 + mt * 16 + h * 8 + lane / 4; }
    __device__ bool inside(int row) const { return q0 + row < seq_q; }
};

// Writes O of 16-bit type through shared memory, so that global stores are whole 16-byte chunks of a row.
// `smem` is a free tile; every thread of the block calls this.
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
    T* gO = head_ptr<T>(o, out.batch, out.head) + out.q0 * o.stride_seq;
    const bool aligned = (reinterpret_cast<uint64_t>(gO) | o.stride_seq * sizeof(T)) % 16 == 0;
    for (int piece = thread_index(); piece < OTile::ROWS * OTile::CHUNKS; piece += WARPS * 32) {
        const int row = piece / OTile::CHUNKS, chunk = piece % OTile::CHUNKS, col = chunk * OTile::CHUNK;
        if (!out.inside(row) || col >= cols) continue;
        float values[4];
        lds(values, smem + OTile::offset(row, chunk));
        T* dst = gO + row * o.stride_seq + col;
        if (aligned && col + OTile::CHUNK <= cols) {
            *reinterpret_cast<float4*>(dst) = make_float4(values[0], values[1], values[2], values[3]);
        } else {
            const T* elements = reinterpret_cast<const T*>(values);
#pragma unroll
            for (int i = 0; i < OTile::CHUNK; ++i)
                if (col + i < cols) dst[i] = elements[i];
        }
    }
}

// Writes O of float32 from the registers of fa2_fp32.cu, where a thread holds eight neighbouring columns of each 32:
// element n of piece i is column 4 n + i, counted from col0.
template <int BM, int ROW_WARPS, int MT, int OT>
__device__ void store_o_fp32(const float (&rO)[MT][OT][4], const Tensor& o, const OutputTile<BM, ROW_WARPS>& out,
                             int col0, int cols) {
    float* gO = head_ptr<float>(o, out.batch, out.head) + out.q0 * o.stride_seq;
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
                            make_float4(rO[mt][ot][2 * h + n], rO[mt][ot + 1][2 * h + n], rO[mt][ot + 2][2 * h + n],
                                        rO[mt][ot + 3][2 * h + n]);
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
__device__ void store_lse(const float (&lse)[MT][2], const Params& p, const OutputTile<BM, ROW_WARPS>& out) {
    if (!p.lse || out.lane % 4 != 0) return;
    float* gLse = p.lse + static_cast<long long>(out.batch * p.heads_q + out.head) * p.seq_q + out.q0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (out.inside(out.row(mt, h))) gLse[out.row(mt, h)] = lse[mt][h];
}

// The rows that a thread of fa3_wgmma.cu holds: `row` + lane / 4 + {0, 8} of a head's rows, or of `pack` heads' query by
// query.
struct PackedRows {
    int lane;
    int query[2], head[2];
    int batch;

    __device__ PackedRows(const Params& p, int batch, int tile_head, int row)
        : lane(thread_index_anew() % 32), batch(batch) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + lane / 4 + 8 * h;
            query[h] = p.pack == 1 ? r : r / p.pack;
            head[h] = tile_head * p.pack + r - query[h] * p.pack;
        }
    }
};

__device__ inline void store_lse(const float (&lse)[2], const Params& p, const PackedRows& rows) {
    if (!p.lse || rows.lane % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (rows.query[h] < p.seq_q)
            p.lse[static_cast<long long>(rows.batch * p.heads_q * p.pack + rows.head[h]) * p.seq_q + rows.query[h]] = lse[h];
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

// Writes a warp's 16 rows of O straight from its registers: four lanes exchange theirs, so that each writes 16 bytes.
template <class T, int OT>
__device__ void store_o_direct(const float (&rO)[OT][4], const Params& p, const PackedRows& rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        T* gRow = head_ptr<T>(p.o, rows.batch, rows.head[h]) + rows.query[h] * p.o.stride_seq;
#pragma unroll
        for (int ot = 0; ot < OT; ot += 4) {
            uint32_t v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = ot + i < OT ? pack2<T>(rO[ot + i][2 * h], rO[ot + i][2 * h + 1]) : 0;
            transpose_quad(v);
            const int col = (ot + rows.lane % 4) * 8;
            if (rows.query[h] < p.seq_q && col < p.head_dim_v)
                *reinterpret_cast<uint4*>(gRow + col) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

// Writes a warpgroup's 64 rows of O through its part of `tile` in shared memory; the copy is still under way then.
template <class T, class OTile, int OT>
__device__ void store_o_tma(const float (&rO)[OT][4], uint32_t tile, const TensorMap& map, const Params& p,
                            const volatile Work& work, int consumer) {
    const int thread = thread_index_anew(), lane = thread % 32, warp = thread / 32 - 4;
    const uint32_t warp_tile = tile + warp * 16 * OTile::ROW_BYTES;
    const uint32_t lane_offset = OTile::offset(lane % 16, lane / 16);
#pragma unroll
    for (int ot = 0; ot < OT; ot += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = pack2<T>(rO[ot + i / 2][i % 2 * 2], rO[ot + i / 2][i % 2 * 2 + 1]);
        stmatrix_x4(warp_tile + OTile::advance(lane_offset, 0, ot), r[0], r[1], r[2], r[3]);
    }
    fence_proxy_async();
    named_barrier_sync(8 + consumer, 128);
    if (threadIdx.x % 128 != 0) return;
    const int query = (work.q0 + consumer * 64) / p.pack;
    if (query < p.seq_q) {
        OTile::store(map, tile, consumer * 64, query, work.head, work.batch);
        tma_store_commit();
    }
}
// Frees the slot of Q that `store_o_tma` wrote from, when its copy has been read.
template <class Ring>
__device__ void release_after_store(const Ring& ring, uint32_t i) {
    if (threadIdx.x % 128 != 0) return;
    tma_store_wait_read();
    mbarrier_arrive(ring.empty + 8 * ring.slot(i));
}
