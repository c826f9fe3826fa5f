// The derivative of a score with respect to what its parts were handed, and to arrays that they
// read: one hook a part.
#pragma once
#include "array_sums.cuh"
#include "bias_sums.cuh"
#include "score.cuh"

// The slope of a part, from the score in front of it and the one behind it. A caller's own part has
// a method `slope`; parts that only add to a score, or hide keys, have none: it is 1.
template <class Part, class = void>
struct Slope {
    static constexpr bool ONE = true;
    static __device__ float of(const Part& part, float s, float changed, const Pair& pair) {
        return 1.f;
    }
};
template <class Part>
struct Slope<Part, decltype(&Part::slope, void())> {
    static constexpr bool ONE = false;
    static __device__ float of(const Part& part, float s, float changed, const Pair& pair) {
        return part.slope(s, changed, pair);
    }
};
// The derivative of c tanh(s / c): 1 - tanh^2.
struct SlopeOfTanh {
    static constexpr bool ONE = false;
    template <class Part>
    static __device__ float of(const Part& part, float s, float changed, const Pair& pair) {
        const float tanh = changed * part.softcap_inverse;
        return fmaf(-tanh, tanh, 1.f);
    }
};
template <>
struct Slope<Softcap> : SlopeOfTanh {};
template <>
struct Slope<FineSoftcap> : SlopeOfTanh {};
template <>
struct Slope<ExactSoftcap> : SlopeOfTanh {};

// A score behind a part, from what it was in front of it by `factor`.
template <class Part>
struct Behind {
    static __device__ float of(const Part& part, float s, float factor, const Pair& pair) {
        return part.score(s * factor, pair);
    }
};
// Rounded as `apply_all` does: the log-sum-exp of distant keys is that of the same large numbers.
template <>
struct Behind<Alibi> {
    static __device__ float of(const Alibi& part, float s, float factor, const Pair& pair) {
        return fmaf(s, factor, part.score(0.f, pair));
    }
};

// A score as the backward pass asks for it.
template <class SCORE>
struct Differentiated;
template <class... Parts>
struct Differentiated<Score<Parts...>> {
    using Whole = Score<Parts...>;
    static constexpr bool HAS_SLOPE = (!Slope<Parts>::ONE || ...);
    // Whether gradients of arrays are added up, in a fixed order, and warps then one by one.
    static constexpr bool HAS_SUMS = ((Sums<Parts>::COUNT > 0) || ...),
                          IN_TURN = (IS_IN_TURN<Parts> || ...),
                          WARPS_IN_TURN = IN_TURN && (Sums<Parts>::COLLIDES || ...);
    // The sums of a warp, part by part.
    template <int MT, int NT>
    struct ArraySums : SumsOfPart<Parts, Sums<Parts>::COUNT, MT, NT, IN_TURN>... {};

    const Whole& score;

    // The score of a pair from S, natural or in log2 units as in Score, and its derivative by
    // `factor` times S.
    __device__ float of(float s, float factor, const Pair& pair, float& slope) const {
        slope = 1.f;
        (step<false, Parts>(s, factor, pair, slope), ...);
        s *= factor, s *= Whole::FROM_LOG2, factor = 1.f;
        (step<true, Parts>(s, factor, pair, slope), ...);
        return s;
    }
    // From the gradient of a score back through the parts: returns the gradient of `factor` times
    // S, and adds up those of arrays. `key` and `query` as in SumsOfRead.
    template <int MT, int NT>
    __device__ float back(float dS, float s, float factor, const Pair& pair,
                          ArraySums<MT, NT>& sums, int key, int query) const {
        return step_back<false, Parts...>(dS, s * factor, pair, sums, key, query);
    }
    // Behind all pairs of a tile.
    template <int MT, int NT, class PairOf>
    __device__ void end_sums(ArraySums<MT, NT>& sums, const PairOf& pair) const {
        (static_cast<OfPart<Parts, MT, NT>&>(sums).end(part<Parts>(), pair), ...);
    }
    // Whether a part hides the key from the query.
    __device__ bool hides(const Pair& pair) const {
        return ((Parts::PAIRWISE && part<Parts>().hides(pair)) || ...);
    }
    // Which weights are dropped, as `dropped` of a part.
    __device__ void dropped(bool (&drops)[4], int batch, int head, int query, int key) const {
        ((Parts::DROPS_WEIGHTS ? part<Parts>().dropped(drops, batch, head, query, key) : void()),
         ...);
    }
    // The factor of weights that are not dropped.
    __device__ float growth() const {
        float keep = 1.f, lse = 0.f;
        ((Parts::DROPS_WEIGHTS ? part<Parts>().end_row(keep, lse, 0) : void()), ...);
        return 1.f / keep;
    }

 private:
    template <class Part, int MT, int NT>
    using OfPart = SumsOfPart<Part, Sums<Part>::COUNT, MT, NT, IN_TURN>;

    template <class Part>
    __device__ const Part& part() const {
        return score;
    }
    // Through those parts, and behind them through those of natural units.
    template <bool NATURAL, class First, class... Rest, int MT, int NT>
    __device__ float step_back(float dS, float s, const Pair& pair, ArraySums<MT, NT>& sums,
                               int key, int query) const {
        constexpr bool CHANGES = !First::LINEAR && First::NATURAL == NATURAL;
        float changed = s;
        if constexpr (CHANGES) changed = part<First>().score(s, pair);
        if constexpr (sizeof...(Rest) > 0)
            dS = step_back<NATURAL, Rest...>(dS, changed, pair, sums, key, query);
        else if constexpr (!NATURAL)
            dS = step_back<true, Parts...>(dS, changed * Whole::FROM_LOG2, pair, sums, key, query);
        if constexpr (CHANGES) {
            static_cast<OfPart<First, MT, NT>&>(sums).add(part<First>(), dS, s, pair, key, query);
            if constexpr (!Slope<First>::ONE)
                dS = dS == 0.f ? 0.f : dS * Slope<First>::of(part<First>(), s, changed, pair);
        }
        return dS;
    }
    template <bool NATURAL, class Part>
    __device__ void step(float& s, float& factor, const Pair& pair, float& slope) const {
        if constexpr (!Part::LINEAR && Part::NATURAL == NATURAL) {
            const float changed = Behind<Part>::of(part<Part>(), s, factor, pair);
            if constexpr (!Slope<Part>::ONE)
                slope *= Slope<Part>::of(part<Part>(), s * factor, changed, pair);
            s = changed, factor = 1.f;
        }
    }
};
