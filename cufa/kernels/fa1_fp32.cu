// FlashAttention forward as first published (Dao et al. 2022, algorithm 1), in float32 on CUDA
// cores. The outer loop is over tiles of keys and the inner one over tiles of queries, so m, l and
// O of every row live in global memory between its visits, and O is divided by l at each of them.
// One block computes one head. It is here to be read and to be compared with: FlashAttention-2
// swaps the two loops, see fa2_fp32.cu.
#include "kv.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "score.cuh"

constexpr int LANES = 16;  // threads that share a row of scores: half a warp
constexpr int PAD = 4;     // floats after a row in shared memory: 16-byte reads of eight rows then
                           // touch all banks once

__device__ inline float row_max(float x) {
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lanes));
    return x;
}
__device__ inline float row_sum(float x) {
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
    return x;
}

// exp(scale (s - m)) for a score s and a maximum m >= s, and 0 when both are -inf. The difference
// is taken before the scale: it is small, and 0 for the largest score, where exp matters most.
__device__ inline float exp_difference(float s, float m, float scale_log2) {
    return exp2_approx((s - (m == -INF ? 0.f : m)) * scale_log2);
}

__device__ inline float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

// Starts the copy of a tile. Rows from `rows` on and columns from `cols` on are filled with zeros
// and not read.
template <int ROWS, int COLS, int PITCH, int THREADS>
__device__ void load_tile(float* tile, const float* gmem, long long stride, int rows, int cols) {
    for (int chunk = threadIdx.x; chunk < ROWS * COLS / 4; chunk += THREADS) {
        const int row = chunk / (COLS / 4), col = chunk % (COLS / 4) * 4;
        cp_async_16(smem_address(tile + row * PITCH + col), gmem + row * stride + col,
                    row < rows && col < cols);
    }
}

// S = Q K^T, for every ROW_STEP-th row of sQ from this thread's first on, and every LANES-th key of
// sK.
template <int HEAD_DIM, int ROW_STEP, int ROWS, int KEYS>
__device__ void qk(float (&rS)[ROWS][KEYS], const float* sQ, const float* sK) {
    constexpr int PITCH = HEAD_DIM + PAD;
#pragma unroll 1
    for (int d0 = 0; d0 < HEAD_DIM; d0 += 16) {
        float rSum[ROWS][KEYS] = {};  // short sums round less
#pragma unroll
        for (int d = d0; d < d0 + 16; d += 4) {
            float4 rQ[ROWS], rK[KEYS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) rQ[r] = load4(sQ + r * ROW_STEP * PITCH + d);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) rK[n] = load4(sK + n * LANES * PITCH + d);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int n = 0; n < KEYS; ++n) {
                    rSum[r][n] = fmaf(rQ[r].x, rK[n].x, rSum[r][n]);
                    rSum[r][n] = fmaf(rQ[r].y, rK[n].y, rSum[r][n]);
                    rSum[r][n] = fmaf(rQ[r].z, rK[n].z, rSum[r][n]);
                    rSum[r][n] = fmaf(rQ[r].w, rK[n].w, rSum[r][n]);
                }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int n = 0; n < KEYS; ++n) rS[r][n] += rSum[r][n];
    }
}

// P V for the same rows of sP, and every LANES-th column of sV.
template <int HEAD_DIM_V, int BN, int ROW_STEP, int ROWS, int COLS>
__device__ void pv(float (&rPV)[ROWS][COLS], const float* sP, const float* sV) {
    for (int key = 0; key < BN; key += 4) {
        float4 rP[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rP[r] = load4(sP + r * ROW_STEP * (BN + PAD) + key);
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
            const float* column = sV + key * HEAD_DIM_V + c * LANES;
            const float v0 = column[0], v1 = column[HEAD_DIM_V];
            const float v2 = column[2 * HEAD_DIM_V], v3 = column[3 * HEAD_DIM_V];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                rPV[r][c] = fmaf(rP[r].x, v0, rPV[r][c]);
                rPV[r][c] = fmaf(rP[r].y, v1, rPV[r][c]);
                rPV[r][c] = fmaf(rP[r].z, v2, rPV[r][c]);
                rPV[r][c] = fmaf(rP[r].w, v3, rPV[r][c]);
            }
        }
    }
}

// Maximum and sum of a row, for the keys so far or for one tile.
struct RowState {
    float m, l;  // m of unscaled scores
};

// P = exp(S - m) for a thread's keys of a row, the first of which is `key`. The row's other threads
// have its other keys.
template <int KEYS>
__device__ RowState exponentiate(float (&rS)[KEYS], float* sP, const Keys& keys, int key,
                                 float scale_log2) {
    float m = -INF;
#pragma unroll
    for (int n = 0; n < KEYS; ++n) {
        if (key + n * LANES < keys.first || key + n * LANES >= keys.end) rS[n] = -INF;
        m = fmaxf(m, rS[n]);
    }
    m = row_max(m);
    float l = 0.f;
#pragma unroll
    for (int n = 0; n < KEYS; ++n) {
        const float rP = exp_difference(rS[n], m, scale_log2);
        sP[n * LANES] = rP;
        l += rP;
    }
    return {m, row_sum(l)};
}

// A row's state with the tile's keys, and the factors by which the old O and P V go into the new O.
struct RowUpdate {
    float m, l, o_factor, pv_factor;

    __device__ RowUpdate() {}
    __device__ RowUpdate(const RowState& before, const RowState& tile, float scale_log2) {
        m = fmaxf(before.m, tile.m);
        const float alpha = exp_difference(before.m, m, scale_log2);
        const float beta = exp_difference(tile.m, m, scale_log2);
        l = alpha * before.l + beta * tile.l;
        const float inverse = l == 0.f ? 0.f : 1.f / l;
        o_factor = inverse * (alpha * before.l);
        pv_factor = inverse * beta;
    }
};

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    fa1_fp32(const __grid_constant__ Arguments<SCORE, KV> p) {
    constexpr int THREADS = WARPS * 32;
    constexpr int ROW_STEP = THREADS / LANES;  // a thread holds every ROW_STEP-th row of a tile,
    constexpr int ROWS = BM / ROW_STEP;
    constexpr int KEYS = BN / LANES;          // every LANES-th key of its scores
    constexpr int COLS = HEAD_DIM_V / LANES;  // and every LANES-th column of its output
    constexpr int PITCH = HEAD_DIM + PAD, P_PITCH = BN + PAD;
    static_assert(STAGES == 1, "tiles are not prefetched");
    static_assert(
        BM % ROW_STEP == 0 && BN % LANES == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM_V % LANES == 0,
        "threads share a tile evenly");

    extern __shared__ __align__(16) float smem[];
    float* sQ = smem;                  // [BM, HEAD_DIM]
    float* sK = sQ + BM * PITCH;       // [BN, HEAD_DIM]
    float* sV = sK + BN * PITCH;       // [BN, HEAD_DIM_V]
    float* sP = sV + BN * HEAD_DIM_V;  // [BM, BN]

    const int lane = threadIdx.x % LANES, row0 = threadIdx.x / LANES;
    const int batch = blockIdx.x / p.heads_q, head = blockIdx.x % p.heads_q;
    const T* gQ = head_ptr<T>(p.q, batch, head);
    const T* gK = head_ptr<T>(p.k, batch, head / p.group);
    const T* gV = head_ptr<T>(p.v, batch, head / p.group);
    T* gO = head_ptr<T>(p.o, batch, head);
    const long long head_rows = static_cast<long long>(blockIdx.x) * p.seq_q;
    float* gM = p.workspace + head_rows;  // of unscaled scores
    float* gL = gM + static_cast<long long>(p.heads) * p.seq_q;
    const Sequence sequence = KV::sequence(p, batch, 0);

    // O = 0, l = 0, m = -inf
    for (int row = row0; row < p.seq_q; row += ROW_STEP)
        for (int col = lane; col < p.head_dim_v; col += LANES) gO[row * p.o.stride_seq + col] = 0.f;
    for (int row = threadIdx.x; row < p.seq_q; row += THREADS) gM[row] = -INF, gL[row] = 0.f;

    for (int kv0 = 0; kv0 < p.seq_kv; kv0 += BN) {
        __syncthreads();  // every thread is done with the previous K and V
        load_tile<BN, HEAD_DIM, PITCH, THREADS>(sK, gK + kv0 * p.k.stride_seq, p.k.stride_seq,
                                                p.seq_kv - kv0, p.head_dim);
        load_tile<BN, HEAD_DIM_V, HEAD_DIM_V, THREADS>(
            sV, gV + kv0 * p.v.stride_seq, p.v.stride_seq, p.seq_kv - kv0, p.head_dim_v);

        for (int q0 = 0; q0 < p.seq_q; q0 += BM) {
            if (static_cast<const SCORE&>(p).sees(sequence, q0 + BM - 1).end <= kv0)
                continue;     // none of these rows sees these keys
            __syncthreads();  // every thread is done with the previous Q
            load_tile<BM, HEAD_DIM, PITCH, THREADS>(sQ, gQ + q0 * p.q.stride_seq, p.q.stride_seq,
                                                    p.seq_q - q0, p.head_dim);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();  // Q, K and V are here, and so are m and l of the previous visit

            // S = Q K^T
            float rS[ROWS][KEYS] = {};
            qk<HEAD_DIM, ROW_STEP>(rS, sQ + row0 * PITCH, sK + lane * PITCH);

            // S = mask(S), m_ij = rowmax(S), P = exp(S - m_ij), l_ij = rowsum(P); m and l are
            // brought up to date
            RowUpdate update[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int row = q0 + row0 + r * ROW_STEP;
                const Keys keys = static_cast<const SCORE&>(p).sees(sequence, row);
                const RowState tile =
                    exponentiate(rS[r], sP + (row0 + r * ROW_STEP) * P_PITCH + lane, keys,
                                 kv0 + lane, p.scale_log2);
                const RowState before{row < p.seq_q ? gM[row] : -INF,
                                      row < p.seq_q ? gL[row] : 0.f};
                update[r] = RowUpdate(before, tile, p.scale_log2);
            }
            __syncwarp();  // a row's threads are in one warp: its P is here, and all have read its
                           // m and l

            // P V
            float rPV[ROWS][COLS] = {};
            pv<HEAD_DIM_V, BN, ROW_STEP>(rPV, sP + row0 * P_PITCH, sV + lane);

            // O = (l exp(m - m_new) O + exp(m_ij - m_new) P V) / l_new, m = m_new, l = l_new
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int row = q0 + row0 + r * ROW_STEP;
                if (row >= p.seq_q) break;
                if (update[r].l == 0.f) continue;  // it saw no key: O stays 0, and 0 V may be NaN
                T* gRow = gO + row * p.o.stride_seq + lane;
#pragma unroll
                for (int c = 0; c < COLS; ++c)
                    if (lane + c * LANES < p.head_dim_v)
                        gRow[c * LANES] =
                            update[r].o_factor * gRow[c * LANES] + update[r].pv_factor * rPV[r][c];
                if (lane == 0) gM[row] = update[r].m, gL[row] = update[r].l;
            }
        }
    }

    // The log-sum-exp, natural. A row that saw no key still has l = 0 and O = 0.
    if (!p.lse) return;
    __syncthreads();  // m and l are final
    for (int row = threadIdx.x; row < p.seq_q; row += THREADS)
        p.lse[head_rows + row] =
            gL[row] == 0.f ? -INF
                           : (gM[row] * p.scale_log2 + log2f(gL[row])) * 0.693147180559945309f;
}
