// From S to P in registers: P = exp(S - m), with what the score makes of S in between.
#pragma once
#include "fa3_place.cuh"
#include "rescore_sm90.cuh"
#include "softmax.cuh"
#include "tilt.cuh"

template <class C>
struct Exponent {
    using T = typename C::T;
    using SCORE = typename C::SCORE;
    using Pairs = typename C::Pairs;
    using Here = Place<C>;
    static constexpr int BN = C::BN, NT = BN / 8;  // 8-column pieces of S
    // Whether m is held twice. Not with AFFINE_IN_KEY scores whose O has up to 64 columns, nor with
    // NATURAL scores: both need the registers.
    static constexpr bool TWICE = C::HEAD_DIM_V <= C::SCHEDULE::NARROW && !SCORE::NATURAL &&
                                  !(SCORE::AFFINE_IN_KEY && C::HEAD_DIM_V <= 64);
    // Whether P is packed in either branch of `exponentiate_unchecked`.
    static constexpr bool PACKS_EARLY =
        C::O_FIRST && SCORE::CURVES && SCORE::CURVE_TERMS <= C::SCHEDULE::SHORT_CURVE;

    const SCORE& score;
    const float& scale_log2;  // in the kernel's parameter
    OnlineSoftmax<1, false, PScale<T>::AT_MAX_LOG2, TWICE, SCORE::NATURAL> softmax;
    float rS[1][NT][4];
    uint32_t rP[BN / 16][4];
    Tilt<SCORE::AFFINE_IN_KEY> tilt;  // of this thread's rows
    SumLimits<PScale<T>, SCORE::CURVES> limits;

    __device__ explicit Exponent(const Arguments<SCORE, typename C::KV>& p)
        : score(p), scale_log2(p.scale_log2), softmax(SCORE::to_log2(p.scale_log2)) {}

    // --- the two ways to P ---

    // P = exp(S - m), m being raised to the row maxima where it must. Whether O must follow it.
    __device__ bool exponentiate_checked(const Here& here) {
        if constexpr (Pairs::BYTES) {
            pairs(here).wait();
            apply_score(rS, 0, here.masked(), pairs(here), here);
            if (here.has_next_keys())
                pairs(here).template fill<true>(score, here.next_key_tile() * BN);
        } else if constexpr (SCORE::AFFINE_IN_KEY) {
            const At at = here.at(0);
            const Sequence sequence = here.sequence(at.batch);
            if (!tilt_score(at, here)) change_score(sequence, at, here);
            score.mask(rS, sequence, at, here.masked());
        } else {
            apply_score(rS, 0, here.masked(), NoTiles(), here);
        }
        const bool raised = softmax.update_max(rS);
        softmax.exponentiate(rS);
        follow();
        return raised;
    }

    // P = exp(S - m) without looking for row maxima: m is near the score of a key that the row has
    // seen, or NONE. `too_large` then says whether that was wrong, and `correct` mends it.
    __device__ void exponentiate_unchecked(const Here& here) {
        const Masked masked = here.masked_left();
        if constexpr (SCORE::AFFINE_IN_KEY) {
            const At at = here.at(0);
            if (find_tilt(at, here)) {
                mask(masked, here);
                exponentiate_tilted(at);
                return;
            }
            if constexpr (SCORE::NO_KEYS_AHEAD) {  // `correct` computes these scores
                softmax.l[0][0] += INF, softmax.l[0][1] += INF;
                return;
            }
        }
        if constexpr (SCORE::CURVES) {
            if (limits.curved) {
                const auto curve = score.curve(scale_log2);
                mask(masked, here);
                softmax.exponentiate(
                    rS, [&](float s, float m, int, int) { return fmaf(s, curve(s), -m); });
                if constexpr (PACKS_EARLY) pack_p(here);
                return;
            }
            score.cap(rS, scale_log2);
            mask(masked, here);
        } else if constexpr (SCORE::LINEAR) {
            softmax.scale_log2 = reread_parameter(scale_log2);
            mask(masked, here);
        } else if constexpr (SCORE::AFFINE_IN_KEY) {
            const At at = here.at(0);
            change_score(here.sequence(at.batch), at, here);
            mask(masked, here);
        } else {
            apply_score(rS, 0, masked, NoTiles(), here);
        }
        softmax.exponentiate(rS);
        if constexpr (PACKS_EARLY) pack_p(here);
    }
    __device__ bool too_large() const { return softmax.too_large(limits); }

    // Where P came out too large, m moves by what their sum says, or if that is far too large, by
    // scores computed once more. `l` is what had been summed up before. O must follow m.
    __device__ void correct(const float (&l)[1][2], const Here& here) {
        bool again[1][2];
        softmax.shift_max(rS, limits, again);
        const Masked masked = here.masked_left();
        if (__any_sync(0xffffffff, again[0][0] || again[0][1]))
            exponentiate_again<T, typename C::QTile, typename C::KTile>(
                softmax, rS, again, l, here.smem.q(here.round), here.warp_row(),
                here.smem.k(here.n),
                [&](auto& rS, int column) { apply_score(rS, column, masked, NoTiles(), here); });
        follow();
    }

    // --- when to look for row maxima ---

    // Whether m may have to move a long way at the keys after the present ones: some rows have seen
    // none. The first of two loops ends where all have; with a map, the loops take turns.
    __device__ bool needs_maxima(const Here& here) const {
        if constexpr (!SCORE::FIRST_TILE_BOUNDS_MAX)
            return true;
        else if constexpr (SCORE::HAS_BLOCK_MAP)
            return uniform(here.ahead.is_partial() ||
                           SCORE::masked(here.keys, here.next_key_tile()).right);
        else
            return (SCORE::RIGHT_EDGE && here.j > here.keys.whole_end) || climbs(here);
    }
    // Whether S would be computed again, since tilts rise that far from one tile of keys to the
    // next: looked at in the warpgroup's first row. Next to wider O, a tile of fewer keys and no
    // registers to spare, looking costs more than it saves.
    __device__ bool climbs(const Here& here) const {
        if constexpr (SCORE::AFFINE_IN_KEY && !SCORE::NO_KEYS_AHEAD && C::HEAD_DIM_V <= 64) {
            constexpr float STEEP_LOG2 = 60.f;
            At at = here.at(0);
            at.row = at.row / 64 * 64;
            const Sequence sequence = here.sequence(at.batch);
            const int query = min(at.query_of(at.row), sequence.seq_q - 1);
            const Pair pair{sequence, at.batch, at.head_of(at.row), query,
                            here.next_key_tile() * BN};
            const int pieces = score.pieces(sequence, pair.query, pair.query, pair.key, pair.key);
            return uniform(score.step(pair, pieces) * -BN * SCORE::TO_LOG2 > STEEP_LOG2) != 0;
        }
        return false;
    }

    // --- before and after ---

    // Takes up a tile of rows, and starts to copy what the score reads of its first keys.
    __device__ void begin_tile(const Here& here) {
        if constexpr (SCORE::AFFINE_IN_KEY) tilt = {};
        if constexpr (Pairs::BYTES) {
            if (!here.more) return;
            const At at = here.at(0);
            const Sequence sequence = here.sequence(at.batch);
            pairs(here).aim(score, sequence, at);
            pairs(here).template fill<false>(score, at.key, sequence.seq_kv);
            pairs(here).template fill_others<false>(score, at.key, sequence.seq_kv);
        }
    }
    // P as the operand of P V. S is not needed any more.
    __device__ void pack_p(const Here& here) {
        if constexpr (SCORE::DROPS_WEIGHTS) {
            const volatile typename C::Work& work = here.work();
            const At at{reread_thread_index() % 32,
                        work.q0 + here.warp_row(),
                        here.key_tile() * BN,
                        work.batch,
                        work.head,
                        here.p.pack_log2};
            score.drop(rS, at);
        }
#pragma unroll
        for (int kk = 0; kk < BN / 16; ++kk)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* s = &rS[0][2 * kk + i / 2][i % 2 * 2];
                rP[kk][i] = pack2<T>(s[0], s[1]);
            }
        if constexpr (Pairs::BYTES) {
            if (here.more && here.has_next_keys())
                pairs(here).template fill_others<true>(score, here.next_key_tile() * BN);
        }
    }

 private:
    static __device__ Pairs pairs(const Here& here) {
        return {here.smem.base + C::PAIR_TILES + (reread_thread_index() - 128) / 32 * Pairs::BYTES};
    }
    // Takes the curve while it is right, see SumLimits.
    __device__ void follow() {
        if constexpr (SCORE::CURVES) limits.follow(softmax, score.curve(scale_log2).end);
    }
    __device__ void mask(Masked masked, const Here& here) {
        if (masked.left) {
            const At at = here.at(0);
            score.mask(rS, here.sequence(at.batch), at, masked);
        }
    }
    // The scores of keys from the tile's `column` on, as the softmax takes them. Arrays that
    // have `tiles` are read there.
    template <class Scores, class Tiles>
    __device__ void apply_score(Scores& rS, int column, Masked masked, const Tiles& tiles,
                                const Here& here) const {
        if (!SCORE::CHANGES_EVERY_TILE && !masked.right && !masked.left) return;
        const At at = here.at(column);
        score.apply(rS, here.sequence(at.batch), scale_log2, at, masked, here.visit.is_partial(),
                    tiles);
    }

    // Takes up what grows evenly over the keys at hand, if no more is asked of each pair.
    __device__ bool find_tilt(const At& at, const Here& here) {
        if (SCORE::PAIRWISE && here.visit.is_partial()) return false;
        return tilt.template find<BN>(score, here.sequence(at.batch), at);
    }
    // Adds it to the scores;
    __device__ bool tilt_score(const At& at, const Here& here) {
        if (!find_tilt(at, here)) return false;
        const float factor = reread_parameter(scale_log2) * SCORE::FROM_LOG2;
        const float first[2] = {tilt.of(0, at.key_of(0, 0)), tilt.of(1, at.key_of(0, 0))};
#pragma unroll
        for (int i = 0; i < NT * 4; ++i) {
            const int h = i / 2 % 2, column = i / 4 * 8 + i % 2;
            float& s = rS[0][i / 4][i % 4];
            s = fmaf(s, factor, fmaf(tilt.step[h], static_cast<float>(column), first[h]));
        }
        return true;
    }
    // or to the exponents.
    __device__ void exponentiate_tilted(const At& at) {
        const float factor = reread_parameter(scale_log2);
        const float first[2] = {tilt.of(0, at.key_of(0, 0)), tilt.of(1, at.key_of(0, 0))};
        softmax.exponentiate(rS, [&](float s, float m, int h, int column) {
            return fmaf(s, factor,
                        fmaf(tilt.step[h] * SCORE::TO_LOG2, static_cast<float>(column),
                             (first[h] - m) * SCORE::TO_LOG2));
        });
    }
    // Else scores are computed one by one, 16 keys at a time as S moves past, or all at once: that
    // is rare, and code takes time to compile. At once with three consumers, which spill 52 to 76
    // bytes more otherwise, and next to wide O, if it is for infinite ones alone: 1.03 otherwise.
    __device__ void change_score(const Sequence& sequence, At at, const Here& here) {
        if constexpr (C::CONSUMERS == 3 || (C::ONE_LOOP && SCORE::NO_KEYS_AHEAD)) {
            score.change(rS, sequence, scale_log2, at, here.visit.is_partial());
        } else {
#pragma unroll 1
            for (int i = 0; i < NT / 2; ++i, at.key += 16) {
                float some[1][2][4];
#pragma unroll
                for (int e = 0; e < 8; ++e) some[0][e / 4][e % 4] = rS[0][e / 4][e % 4];
                score.change(some, sequence, scale_log2, at, here.visit.is_partial());
#pragma unroll
                for (int e = 0; e < NT * 4 - 8; ++e) rS[0][e / 4][e % 4] = rS[0][e / 4 + 2][e % 4];
#pragma unroll
                for (int e = 0; e < 8; ++e) rS[0][NT - 2 + e / 4][e % 4] = some[0][e / 4][e % 4];
            }
        }
    }
};
