// From S^T of a tile, as a consumer of a Hopper kernel holds it, to P^T: 64 keys by the tile's
// rows. A thread has the keys `key` and `key` + 8, and two rows of each eight.
#pragma once
#include "bwd_common_sm90.cuh"
#include "score_slope.cuh"

template <class T, class SCORE, class Place, int NT>
struct TurnedScores {
    using Of = Differentiated<SCORE>;
    const Place& place;
    const RowTile& t;
    const int key0;  // the consumer's first key

    __device__ const SCORE& score() const { return place.p; }
    __device__ static int lane() { return reread_thread_index() % 32; }
    __device__ int key() const { return key0 + reread_thread_index() % 128 / 32 * 16 + lane() / 4; }
    __device__ int query(int nt, int i) const {
        return (t.tile * NT + nt) * 8 + lane() % 4 * 2 + i;
    }
    // Whether some of the rows may not see all of the keys.
    __device__ bool masked() const {
        const int q0 = t.tile * NT * 8, last = min(q0 + NT * 8, place.sequence.seq_q) - 1;
        return score().sees(place.sequence, q0).end < key0 + 64 ||
               score().sees(place.sequence, last).first > key0;
    }
    // x of the keys that rows do not see becomes `hidden`; `query` and `key` are the thread's
    // first.
    __device__ void mask(float (&x)[4], int query, int key, float hidden) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Keys seen = score().sees(place.sequence, query + i);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                set_if_less(x[2 * h + i], seen.end - 1, key + 8 * h, hidden);
                if (SCORE::LEFT_EDGE) set_if_less(x[2 * h + i], key + 8 * h, seen.first, hidden);
            }
        }
    }

    // P^T = exp(S^T - lse). Where scores have a derivative, rS becomes P^T times that.
    __device__ void weigh(float (&rS)[NT][4], uint32_t (&rP)[NT / 2][4], uint32_t stats) const {
        const bool masked = this->masked();
        const bool asks = SCORE::PAIRWISE && (!SCORE::MAPPED || place.is_partial(t));
        const uint32_t of_lane = stats + 4 * (lane() % 4 * 2);
        if (!SCORE::CHANGES_EVERY_TILE && masked) {
            const int query = this->query(0, 0), key = this->key();
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) mask(rS[nt], query + nt * 8, key, -INF);
        }
#pragma unroll
        for (int k = 0; k < NT / 2; ++k) {
            float slopes[2][4], kept[2][4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int nt = 2 * k + j;
                float (&x)[4] = rS[nt];
                const float2 lse = lds_2(of_lane + 4 * nt * 8);
                if constexpr (SCORE::CHANGES_EVERY_TILE) {
                    weigh_pairs(x, slopes[j], lse, nt, asks);
                    if (masked) mask(x, query(nt, 0), key(), 0.f);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        x[i] = exp2_approx(
                            fmaf(x[i], place.p.scale_log2, -(i % 2 ? lse.y : lse.x) * LOG2_E));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) kept[j][i] = x[i];
                if constexpr (SCORE::DROPS_WEIGHTS) drop(kept[j], nt);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                rP[k][i] = pack2<T>(kept[i / 2][i % 2 * 2], kept[i / 2][i % 2 * 2 + 1]);
            if constexpr (Of::HAS_SLOPE)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float& x = rS[2 * k + i / 4][i % 4];
                    x = x == 0.f ? 0.f : x * slopes[i / 4][i % 4];
                }
        }
    }

 private:
    // x = 0 for weights that are dropped.
    __device__ void drop(float (&x)[4], int nt) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            bool drops[4] = {};
            Of{place.p}.dropped(drops, place.batch, place.query_head(t), query(nt, i), key() & ~1);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                set_if_equal(x[2 * h + i], lane() / 4 % 2 ? drops[2 * h + 1] : drops[2 * h], true,
                             0.f);
        }
    }
    // The same pair by pair.
    __device__ void weigh_pairs(float (&x)[4], float (&slopes)[4], const float2& lse, int nt,
                                bool asks) const {
        const Of of{place.p};
        const Sequence& sequence = place.sequence;
        const int key = this->key();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Pair pair{sequence, place.batch, place.query_head(t),
                            min(query(nt, i % 2), sequence.seq_q - 1),
                            min(key + i / 2 * 8, sequence.seq_kv - 1)};
            const float of_row = (i % 2 ? lse.y : lse.x) * (SCORE::NATURAL ? 1.f : LOG2_E);
            const float s = of.of(x[i], place.p.scale_log2, pair, slopes[i]);
            x[i] = exp2_approx((s - of_row) * SCORE::TO_LOG2);
            if (asks) set_if_equal(x[i], of.hides(pair), true, 0.f);
        }
    }
};
