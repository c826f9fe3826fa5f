// What stands between S = Q K^T and the softmax: which keys a query sees, and what becomes of a score. A Score is made of
// parts. Every kernel, on every path, asks only here; a new mask or score expression is a new part.
#pragma once
#include "divisor.cuh"
#include "params.cuh"
#include "ptx.cuh"

// The sequences that a tile belongs to.
struct Sequence {
    int seq_q, seq_kv;

    // Query i stands at key i + diagonal: aligned bottom-right.
    __device__ int diagonal() const { return seq_kv - seq_q; }
};

struct Keys {
    int first, end;  // [first, end); none where end <= first
};

// What a part may say; it overrides what it changes. Its members are its run-time parameters: they follow Params in the
// kernel's parameter, in the order of the parts, and a part without any takes no place there: for that, the bases of two
// parts must not be of one type.
template <class Self>
struct Part {
    // Whether scores stay proportional to Q K^T, with the scale as the factor. Else the softmax is handed log2 units.
    static constexpr bool LINEAR = true;
    // Whether `sees` leaves out keys before the first, or after the last, that a query sees.
    static constexpr bool LEFT_EDGE = false, RIGHT_EDGE = false;

    // The keys that a query sees. From one query to the next, neither end may fall, or rise by more than one.
    __device__ Keys sees(const Sequence& sequence, int query) const { return {0, sequence.seq_kv}; }
    // A score in log2 units, of a query and a key; of parts that are not LINEAR.
    __device__ float score(float s, int query, int key) const { return s; }
};

struct Causal : Part<Causal> {
    static constexpr bool RIGHT_EDGE = true;
    __device__ Keys sees(const Sequence& sequence, int query) const { return {0, query + 1 + sequence.diagonal()}; }
};

// Aligned top-left: query i stands at key i.
struct TopLeft : Part<TopLeft> {
    static constexpr bool RIGHT_EDGE = true;
    __device__ Keys sees(const Sequence& sequence, int query) const { return {0, query + 1}; }
};

// A window around the key that a query stands at: so many keys before it and after it; fewer than none where negative.
struct WindowLeft : Part<WindowLeft> {
    static constexpr bool LEFT_EDGE = true;
    int window_left;
    __device__ Keys sees(const Sequence& sequence, int query) const {
        return {query + sequence.diagonal() - window_left, sequence.seq_kv};
    }
};
struct WindowRight : Part<WindowRight> {
    static constexpr bool RIGHT_EDGE = true;
    int window_right;
    __device__ Keys sees(const Sequence& sequence, int query) const {
        return {0, query + 1 + sequence.diagonal() + window_right};
    }
};

// c tanh(score / c), in log2 units: by the hardware's tanh, whose error of 2^-11 is a quarter of what bfloat16 leaves of a
// score; in float16, which leaves four times as much, by an exponential and a reciprocal, to some 2^-22 of c; or rightly.
struct Softcap : Part<Softcap> {
    static constexpr bool LINEAR = false;
    float softcap_log2, softcap_inverse;  // c and its reciprocal
    __device__ float score(float s, int query, int key) const { return softcap_log2 * tanh_approx(s * softcap_inverse); }
};
struct FineSoftcap : Part<FineSoftcap> {
    static constexpr bool LINEAR = false;
    float softcap_log2, softcap_inverse;
    __device__ float score(float s, int query, int key) const {
        constexpr float TWO_LOG2_E = 2.885390081777926815f;
        // tanh(x) = 1 - 2 / (e^2x + 1)
        const float power = exp2_approx(s * softcap_inverse * TWO_LOG2_E);
        return fmaf(-2.f * softcap_log2, reciprocal_approx(power + 1.f), softcap_log2);
    }
};
struct ExactSoftcap : Part<ExactSoftcap> {
    static constexpr bool LINEAR = false;
    float softcap_log2, softcap_inverse;
    __device__ float score(float s, int query, int key) const { return softcap_log2 * tanhf(s * softcap_inverse); }
};

// Where the accumulators of m16n8 products are: `row` and `key` are those of the warp's first score. A lane holds the
// rows lane / 4 + {0, 8} and the keys 2 (lane % 4) + {0, 1} of each piece. Rows are those of 2^pack_log2 heads, query by
// query.
struct At {
    int lane, row, key;
    int pack_log2 = 0;

    __device__ int query(int mt, int h) const { return (row + lane / 4 + mt * 16 + h * 8) >> pack_log2; }
    __device__ int key_of(int nt, int i) const { return key + lane % 4 * 2 + nt * 8 + i; }
};

// The same, of rows of any number of heads, query by query.
struct GroupedAt {
    int lane, row, key;
    const Divisor& group;

    __device__ int query(int mt, int h) const { return group.quotient(row + lane / 4 + mt * 16 + h * 8); }
    __device__ int key_of(int nt, int i) const { return key + lane % 4 * 2 + nt * 8 + i; }
};

// The tiles of BN keys that some rows visit, the last first: [first, end). Those of [whole_first, whole_end) need no mask.
struct KeyTiles {
    int first, end;
    int whole_first, whole_end;
};

template <class... Parts>
struct Score : Parts... {
    static constexpr bool LINEAR = (Parts::LINEAR && ...);
    static constexpr bool LEFT_EDGE = (Parts::LEFT_EDGE || ...), RIGHT_EDGE = (Parts::RIGHT_EDGE || ...);

    // The keys that all parts let a query see.
    __device__ Keys sees(const Sequence& sequence, int query) const {
        Keys keys{0, sequence.seq_kv};
        ((keys = both(keys, Parts::sees(sequence, query))), ...);
        return keys;
    }

    // What the queries from `first` to `last` visit. At least one tile if there are keys at all: where none is seen, all
    // of its scores are masked.
    template <int BN>
    __device__ KeyTiles key_tiles(const Sequence& sequence, int first, int last) const {
        const Keys of_first = sees(sequence, first), of_last = sees(sequence, last);
        const int begin = LEFT_EDGE ? max(0, min(of_first.first, sequence.seq_kv - 1)) / BN : 0;
        return {begin, max((of_last.end + BN - 1) / BN, begin + 1), LEFT_EDGE ? (max(0, of_last.first) + BN - 1) / BN : 0,
                max(0, of_first.end) / BN};
    }
    template <class Tiles>  // KeyTiles, or volatile ones
    __device__ static bool needs_mask(Tiles& tiles, int j) {
        return j >= tiles.whole_end || (LEFT_EDGE && j < tiles.whole_first);
    }

    // The score of a query and a key that it sees, from S, in the units that the softmax is handed.
    __device__ float of(float s, float scale_log2, int query, int key) const {
        if constexpr (!LINEAR) {
            s *= scale_log2;
            ((s = Parts::score(s, query, key)), ...);
        }
        return s;
    }

    // The step that every S takes before the softmax. `masked`: whether some rows may not see all of these keys.
    template <class At, int MT, int NT>
    __device__ void apply(float (&rS)[MT][NT][4], const Sequence& sequence, float scale_log2, const At& at,
                          bool masked) const {
        if constexpr (!LINEAR) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        float& s = rS[mt][nt][i];
                        s = of(s, scale_log2, at.query(mt, i / 2), at.key_of(nt, i % 2));
                    }
        }
        if (!masked) return;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Keys keys = sees(sequence, at.query(mt, h));
                const int last = keys.end - 1 - at.key_of(0, 0), first = keys.first - at.key_of(0, 0);
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        set_if_less(rS[mt][nt][2 * h + i], last, nt * 8 + i, -INF);
                        if constexpr (LEFT_EDGE) set_if_less(rS[mt][nt][2 * h + i], nt * 8 + i, first, -INF);
                    }
            }
    }

 private:
    static __device__ Keys both(const Keys& a, const Keys& b) { return {max(a.first, b.first), min(a.end, b.end)}; }
};

// What a launch passes to a kernel: the parameters of all, then those of the score's parts and of the way of finding K and
// V, where these have any.
template <class SCORE, class KV>
struct Arguments : Params, SCORE, KV {};
