// Masks and scores, between S = Q K^T and the softmax: which keys a query sees, and how its scores
// change. A Score is made of parts. Every kernel, on every path, asks only here; a new mask or
// score expression is a new part.
#pragma once
#include "alibi.cuh"
#include "at.cuh"
#include "attention_chunk.cuh"
#include "bias.cuh"
#include "blocks.cuh"
#include "causal.cuh"
#include "dropout.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "sinks.cuh"
#include "softcap.cuh"
#include "window.cuh"

// The tiles of BN keys that some rows visit, the last first: [first, end). Tiles in [whole_first,
// whole_end) need no mask; with a right edge, each row that sees any key has seen one by then.
struct KeyTiles {
    int first, end;
    int whole_first, whole_end;
};

// Whether some rows may not see all of a tile's keys: keys beyond their last, or before their
// first.
struct Masked {
    bool right, left;
};

// Tiles, in shared memory, of the arrays that have a number for each pair: none. See
// pair_tiles_sm90.cuh.
struct NoTiles {
    template <class Part>
    static constexpr bool HAS = false;
};

template <class... Parts>
struct Score : Parts... {
    static constexpr bool LINEAR = (Parts::LINEAR && ...), NATURAL = (Parts::NATURAL || ...),
                          PAIRWISE = (Parts::PAIRWISE || ...);
    static constexpr bool KEY_MAJOR = (Parts::KEY_MAJOR || ...),
                          DROPS_WEIGHTS = (Parts::DROPS_WEIGHTS || ...);
    static constexpr bool ENDS_ROWS = (Parts::ENDS_ROWS || ...),
                          NEEDS_LSE = (Parts::NEEDS_LSE || ...);
    static constexpr bool HAS_BLOCK_MAP = (Parts::HAS_BLOCK_MAP || ...);
    // Whether a map knows all tiles in which pairs are hidden one by one.
    static constexpr bool MAPPED = HAS_BLOCK_MAP && ((!Parts::PAIRWISE || Parts::KEY_MAJOR) && ...);
    // Whether there are tiles in which no pair is asked for; only these are then AFFINE_IN_KEY, or
    // a curve.
    static constexpr bool WHOLE = !PAIRWISE || MAPPED;
    static constexpr bool FIRST_TILE_BOUNDS_MAX =
        (Parts::FIRST_TILE_BOUNDS_MAX && ...) && WHOLE && !DROPS_WEIGHTS;
    // Whether tiles that all rows see take a step, too.
    static constexpr bool CHANGES_EVERY_TILE = !LINEAR || PAIRWISE;
    // Whether all that is not LINEAR are tilts, or a curve, and nothing is asked of each pair.
    static constexpr bool AFFINE_IN_KEY =
        !LINEAR && ((Parts::LINEAR || Parts::AFFINE_IN_KEY) && ...) && WHOLE;
    static constexpr int CURVE_TERMS = (0 + ... + Parts::CURVE_TERMS);
    static constexpr bool CURVES =
        CURVE_TERMS > 0 && ((Parts::LINEAR || Parts::CURVE_TERMS > 0) && ...) && WHOLE;
    // Whether all that is seen of a tilt is its first piece.
    static constexpr bool NO_KEYS_AHEAD =
        (Parts::NO_KEYS_AHEAD || ...) && !(Parts::BREAKS_ELSEWHERE || ...);
    static constexpr bool LEFT_EDGE = (Parts::LEFT_EDGE || ...),
                          RIGHT_EDGE = (Parts::RIGHT_EDGE || ...);
    static constexpr bool JUMPS = (Parts::JUMPS || ...);

    // The keys that all parts let a query see.
    __device__ Keys sees(const Sequence& sequence, int query) const {
        Keys keys{0, sequence.seq_kv};
        ((keys = both(keys, Parts::sees(sequence, query))), ...);
        return keys;
    }

    // The tiles of keys that the queries from `first` to `last` visit. At least one if there are
    // keys at all: where none is seen, all of its scores are masked.
    template <int BN>
    __device__ KeyTiles key_tiles(const Sequence& sequence, int first, int last) const {
        const Keys of_first = sees(sequence, first), of_last = sees(sequence, last);
        const int begin = LEFT_EDGE ? max(0, min(of_first.first, sequence.seq_kv - 1)) / BN : 0;
        return {begin, max((of_last.end + BN - 1) / BN, begin + 1),
                LEFT_EDGE ? (max(0, of_last.first) + BN - 1) / BN : 0,
                max(0, of_first.end - RIGHT_EDGE) / BN};
    }
    // Which edges of the j-th tile of keys need a mask.
    __device__ static Masked masked(const KeyTiles& tiles, int j) {
        return {j >= tiles.whole_end, LEFT_EDGE && j < tiles.whole_first};
    }
    // The map's line for the row_tile-th tile of rows and `seq_kv` keys, with the keys that a short
    // sequence lacks.
    template <int BN>
    __device__ BlockLine block_line(int seq_kv, int batch, int head, int row_tile) const {
        const int tiles = (seq_kv + BN - 1) / BN;
        return {this->block_mask.line(batch, head) + row_tile * 2ll * (tiles + 1), tiles};
    }

    // Factors of scores and their terms, from the softmax's units to log2 units and back.
    static constexpr float TO_LOG2 = NATURAL ? LOG2_E : 1.f, FROM_LOG2 = 1.f / TO_LOG2;
    static __device__ float to_log2(float scale_log2) { return LINEAR ? scale_log2 : TO_LOG2; }

    // The sum that the tilts add to a score; and how much it grows to the next key of these pieces.
    __device__ float tilt(const Pair& pair) const {
        return changed<false, NoTiles>(0.f, 1.f, pair);
    }
    __device__ float step(const Pair& pair, int pieces) const {
        float sum = 0.f;
        ((sum += Parts::AFFINE_IN_KEY ? Parts::step(pair, (pieces >>= 1) & 1 ? -1 : 1) *
                                            (Parts::NATURAL ? 1.f : FROM_LOG2)
                                      : 0.f),
         ...);
        return sum;
    }
    // The linear pieces that hold all pairs that queries see of some keys: 1, and a bit for each
    // tilt; 0 if pairs are on two pieces of a tilt. The pairs that are seen have five corners,
    // where a linear function is least and most.
    __device__ int pieces(const Sequence& sequence, int first_query, int last_query, int first_key,
                          int last_key) const {
        last_key = min(last_key, sequence.seq_kv - 1);
        const int first_sees = min(last_key, sees(sequence, first_query).end - 1);
        const int last_sees = min(last_key, sees(sequence, last_query).end - 1);
        // The first query that sees the last key: where edges jump, any may be it.
        const int sees_last =
            JUMPS ? first_query : min(last_query, first_query + last_key - first_sees);
        const int corners[][2] = {{last_query, first_key},
                                  {first_query, first_sees},
                                  {last_query, last_sees},
                                  {sees_last, last_sees}};
        int pieces = 1, bit = 1;
        bool none = false;
        auto look_at = [&](const auto& part) {
            int least = part.turn({sequence, 0, 0, first_query, first_key}), most = least;
            for (const auto& [query, key] : corners) {
                const int turn = part.turn({sequence, 0, 0, query, key});
                least = min(least, turn), most = max(most, turn);
            }
            pieces += (bit *= 2) * (least < 0), none |= least < 0 && most > 0;
        };
        ((Parts::AFFINE_IN_KEY ? look_at(static_cast<const Parts&>(*this)) : void()), ...);
        return none ? 0 : pieces;
    }
    // The score of a query and a key that are within its `sees`, from S, in the units that the
    // softmax is handed. BEGUN: whether `apply_all` has been there, and `add` of parts with Tiles,
    // which leave this factor.
    template <bool BEGUN = false, class Tiles = NoTiles>
    __device__ float of(float s, float factor, const Pair& pair) const {
        return hidden<Tiles>(changed<BEGUN, Tiles>(s, factor, pair), pair);
    }

    // The step that every S takes before the softmax. `partial`: whether a mask that a map is of
    // may hide some of these keys.
    template <class At, int MT, int NT, class Tiles = NoTiles>
    __device__ void apply(float (&rS)[MT][NT][4], const Sequence& sequence, float scale_log2,
                          const At& at, Masked masked, bool partial = true,
                          const Tiles& tiles = {}) const {
        change(rS, sequence, scale_log2, at, partial, tiles);
        mask(rS, sequence, at, masked);
    }
    // The same, but for the edges of what rows see.
    template <class At, int MT, int NT, class Tiles = NoTiles>
    __device__ void change(float (&rS)[MT][NT][4], const Sequence& sequence, float scale_log2,
                           const At& at, bool partial = true, const Tiles& tiles = {}) const {
        float factor = scale_log2;
        (apply_all<Parts>(rS, sequence, factor, at), ...);
        if constexpr (NATURAL) factor *= FROM_LOG2, (add<Parts>(rS, factor, tiles), ...);
        constexpr bool CHANGES =
            ((!Parts::LINEAR && !Parts::TAKES_WHOLE_TILE && !Tiles::template HAS<Parts>) || ...);
        constexpr bool HIDES = ((Parts::PAIRWISE && !Tiles::template HAS<Parts>) || ...),
                       EACH = HIDES || CHANGES;
        if constexpr (HAS_BLOCK_MAP) {
            if constexpr (CHANGES)
                by_key(rS, sequence, at, [&](float s, const Pair& pair) {
                    return changed<true, Tiles>(s, factor, pair);
                });
            if (HIDES && (partial || !MAPPED))
                by_key(rS, sequence, at,
                       [&](float s, const Pair& pair) { return hidden<Tiles>(s, pair); });
        } else if constexpr (EACH && KEY_MAJOR) {
            by_key(rS, sequence, at,
                   [&](float s, const Pair& pair) { return of<true, Tiles>(s, factor, pair); });
        } else if constexpr (EACH) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int query = min(at.query(mt, h), sequence.seq_q - 1);
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            float& s = rS[mt][nt][2 * h + i];
                            const int key = max(min(at.key_of(nt, i), sequence.seq_kv - 1), 0);
                            s = of<true, Tiles>(s, factor,
                                                {sequence, at.batch, at.head(mt, h), query, key});
                        }
                }
        }
        (hide<Parts>(rS, at, tiles), ...);
    }

    // Hides the keys that rows do not see.
    template <class At, int MT, int NT>
    __device__ void mask(float (&rS)[MT][NT][4], const Sequence& sequence, const At& at,
                         Masked masked) const {
        if (masked.right) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int last = sees(sequence, at.query(mt, h)).end - 1 - at.key_of(0, 0);
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            set_if_less(rS[mt][nt][2 * h + i], last, nt * 8 + i, -INF);
                }
        }
        if (LEFT_EDGE && masked.left) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int first = sees(sequence, at.query(mt, h)).first - at.key_of(0, 0);
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            set_if_less(rS[mt][nt][2 * h + i], nt * 8 + i, first, -INF);
                }
        }
    }

    // The weights of a tile, between the sums of P and O += P V.
    template <class At, int MT, int NT>
    __device__ void drop(float (&rP)[MT][NT][4], const At& at) const {
        if constexpr (DROPS_WEIGHTS) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int nt = 0; nt < NT; nt += 2) {
                        bool drops[4] = {};
                        dropped(drops, at.batch, at.head(mt, h), at.query(mt, h), at.key_of(nt, 0));
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            set_if_equal(rP[mt][nt + i / 2][2 * h + i % 2], drops[i], true, 0.f);
                    }
        }
    }
    // The same of one weight.
    __device__ float kept(float p, const Pair& pair) const {
        if constexpr (DROPS_WEIGHTS) {
            bool drops[4] = {};
            dropped(drops, pair.batch, pair.head, pair.query, pair.key & ~9);
            if (drops[(pair.key >> 3 & 1) * 2 + pair.key % 2]) return 0.f;
        }
        return p;
    }

    // The end of a row: what its O is divided by, and its log-sum-exp, after all parts.
    __device__ void end_row(float& divisor, float& lse, int head) const {
        (Parts::end_row(divisor, lse, head), ...);
    }

 private:
    __device__ void dropped(bool (&drops)[4], int batch, int head, int query, int key) const {
        ((Parts::DROPS_WEIGHTS ? Parts::dropped(drops, batch, head, query, key) : void()), ...);
    }
    template <bool BEGUN, class Tiles>
    __device__ float changed(float s, float factor, const Pair& pair) const {
        if constexpr (!LINEAR) {
            s *= factor;
            ((s = BEGUN || Parts::NATURAL ? s : Parts::score(s, pair)), ...);
            if constexpr (!BEGUN) s *= FROM_LOG2;
            ((s = !Parts::NATURAL || Tiles::template HAS<Parts> ? s : Parts::score(s, pair)), ...);
        }
        return s;
    }
    template <class Tiles>
    __device__ float hidden(float s, const Pair& pair) const {
        if constexpr (((Parts::PAIRWISE && !Tiles::template HAS<Parts>) || ...))
            set_if_equal(s, ((!Tiles::template HAS<Parts> && Parts::hides(pair)) || ...), true,
                         -INF);
        return s;
    }
    // f(score, pair) for all of a tile, the pairs of a key one after the other.
    template <class At, class F, int MT, int NT>
    static __device__ void by_key(float (&rS)[MT][NT][4], const Sequence& sequence, const At& at,
                                  const F& f) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int key = max(min(at.key_of(nt, i), sequence.seq_kv - 1), 0);
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float& s = rS[mt][nt][2 * h + i];
                        const int query = min(at.query(mt, h), sequence.seq_q - 1);
                        s = f(s, {sequence, at.batch, at.head(mt, h), query, key});
                    }
            }
    }
    template <class Part, class At, int MT, int NT>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor,
                              const At& at) const {
        if constexpr (Part::TAKES_WHOLE_TILE) Part::apply_all(rS, sequence, factor, at);
    }
    template <class Part, int MT, int NT, class Tiles>
    __device__ void add(float (&rS)[MT][NT][4], float& factor, const Tiles& tiles) const {
        if constexpr (Tiles::template HAS<Part> && !Part::LINEAR)
            tiles.template add<Part>(rS, factor), factor = 1.f;
    }
    template <class Part, class At, int MT, int NT, class Tiles>
    __device__ void hide(float (&rS)[MT][NT][4], const At& at, const Tiles& tiles) const {
        if constexpr (Tiles::template HAS<Part> && Part::PAIRWISE)
            tiles.template hide<Part>(rS, at.key);
    }
    static __device__ Keys both(const Keys& a, const Keys& b) {
        return {max(a.first, b.first), min(a.end, b.end)};
    }
};

// The arguments of a launch: the parameters of all kernels, then those of the score's parts and of
// the way of finding K and V, where these have any.
template <class SCORE, class KV>
struct Arguments : Params, SCORE, KV {};
