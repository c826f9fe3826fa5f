// A few rows of attention once more, in plain float32 and without shared memory.
#pragma once
#include "kv.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"
#include "score.cuh"
#include "softmax.cuh"

// A warp computes four rows of the output from `row0` on, 32 columns from `col0` on, and writes the
// `wanted` ones, a bit a row. Eight lanes share a row: each holds S of a key, and four neighbouring
// columns of O. m is the true row maximum, and a key whose P is 0 takes no part: infinite and
// nearly infinite values give the results of NumPy.
template <class SCORE, class KV>
__device__ void attend_rows(const Arguments<SCORE, KV>& p, const Tile& tile, int row0,
                            uint32_t wanted, int col0) {
    using Softmax = OnlineSoftmax<1, true, 0, false, SCORE::NATURAL>;
    constexpr int LANES = 8;
    const SCORE& score = p;
    const Sequence sequence = KV::sequence(p, tile.batch, row0);
    const int lane = reread_thread_index() % LANES, r = reread_thread_index() % 32 / LANES;
    const int row = min(row0 + r, sequence.seq_q - 1), kv_head = tile.head / p.group,
              col = col0 + 4 * lane;
    const float* gQ =
        head_ptr<float>(p.q, tile.batch, tile.head) + (sequence.first_q + row) * p.q.stride_seq;
    const float* gK =
        KV::template rows<float>(p.k, tile.batch, kv_head) + sequence.first_k * p.k.stride_seq;
    const float* gV = KV::template rows<float>(p.v, tile.batch, kv_head) +
                      sequence.first_k * p.v.stride_seq + col;
    const float scale = SCORE::to_log2(p.scale_log2);
    const Keys keys = score.sees(sequence, row);
    const int begin = SCORE::LEFT_EDGE ? max(0, score.sees(sequence, row0).first) : 0;
    const int end = score.sees(sequence, row0 + 32 / LANES - 1).end;

    float m = Softmax::NONE, l = 0.f;
    float rO[4] = {};
#pragma unroll 1
    for (int j = begin; j < end && !__all_sync(0xffffffff, l != l); j += LANES) {  // NaN stays NaN
        // S = Q K^T
        const int key = j + lane;
        const float* k = gK + min(key, end - 1) * p.k.stride_seq;
        float s = 0.f;
#pragma unroll 1
        for (int d = 0; d < p.head_dim; d += 4) {
            const float4 a = *reinterpret_cast<const float4*>(gQ + d),
                         b = *reinterpret_cast<const float4*>(k + d);
            s = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, s))));
        }
        const Pair pair{sequence, tile.batch, tile.head, row, key};
        s = key >= keys.first && key < keys.end ? score.of(s, p.scale_log2, pair) : -INF;

        // P = exp(S - m); m, l and O follow
        const float m_old = m;
        m = fmaxf(m, lanes_max<LANES>(s));
        const float alpha = exp2_approx((m_old - m) * scale), prob = exp2_approx((s - m) * scale);
        l = l * alpha + lanes_sum<LANES>(prob);
#pragma unroll
        for (int n = 0; n < 4; ++n) rO[n] *= alpha;

        // O += P V
#pragma unroll 1
        for (int i = 0; i < min(LANES, end - j); ++i) {
            const float of_key = __shfl_sync(0xffffffff, score.kept(prob, pair), i, LANES);
            if (of_key == 0.f || col >= p.head_dim_v) continue;
            const float4 v = *reinterpret_cast<const float4*>(gV + (j + i) * p.v.stride_seq);
            const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int n = 0; n < 4; ++n) rO[n] = fmaf(of_key, values[n], rO[n]);
        }
    }

    // O = O / l and the log-sum-exp
    if (!(wanted >> r & 1) || row0 + r >= sequence.seq_q) return;
    float* gO = head_ptr<float>(p.o, tile.batch, tile.head) +
                (sequence.first_q + row) * p.o.stride_seq + col;
    const float m_of_sum = SCORE::NATURAL ? m : m * scale;
    float divisor = l, lse = 0.f;
    if constexpr (SCORE::ENDS_ROWS) {
        lse = Softmax::log_sum_exp(m_of_sum, l);
        score.end_row(divisor, lse, tile.head);
    }
    const float factor = divisor == 0.f ? 0.f : 1.f / divisor;
#pragma unroll
    for (int n = 0; n < 4; ++n)
        if (col + n < p.head_dim_v) gO[n] = rO[n] * factor;
    if (p.lse && col == 0)
        p.lse[static_cast<long long>((KV::RAGGED ? 0 : tile.batch) * p.heads_q + tile.head) *
                  p.seq_q +
              sequence.first_q + row] = SCORE::ENDS_ROWS ? lse : Softmax::log_sum_exp(m_of_sum, l);
}
