// What stands between S = Q K^T and the softmax: which keys a query sees, and what becomes of a score. A Score is made of
// parts. Every kernel, on every path, asks only here; a new mask or score expression is a new part.
#pragma once
#include "divisor.cuh"
#include "params.cuh"
#include "philox.cuh"
#include "ptx.cuh"
#include "ptx_convert.cuh"

// The sequences that a tile belongs to: how long they are, and where they begin in arrays of several.
struct Sequence {
    int seq_q, seq_kv;
    int first_q = 0, first_k = 0;

    // Query i stands at key i + diagonal: aligned bottom-right.
    __device__ int diagonal() const { return seq_kv - seq_q; }
};

struct Keys {
    int first, end;  // [first, end); none where end <= first
};

// Whose score it is; a query and a key that there are.
struct Pair {
    const Sequence& sequence;
    int batch, head, query, key;
};

// What a part may say; it overrides what it changes. Its members are its run-time parameters: they follow Params in the
// kernel's parameter, in the order of the parts, and a part without any takes no place there: for that, the bases of two
// parts must not be of one type.
template <class Self>
struct Part {
    // Whether scores stay proportional to Q K^T, with the scale as the factor. Else the softmax is handed log2 units.
    static constexpr bool LINEAR = true;
    // Whether all scores of a warp are handed over together, to `apply_all`. It brings them to log2 units, from those in which
    // they are by `factor`, and makes that 1. So do the parts before it in a score.
    static constexpr bool TOGETHER = false;
    // Whether what it adds grows evenly from key to key, by `step`, in pieces: see tilt.cuh.
    static constexpr bool TILTS = false;
    // Whether a query sees no keys beyond the one it stands at.
    static constexpr bool BEHIND = false;
    // Whether scores are multiplied by a polynomial of them as long as they are small: by `curve`; of one that is TOGETHER.
    static constexpr bool CURVES = false;
    // Whether the first scores of a row tell about where the others are; where not, row maxima are looked for everywhere.
    static constexpr bool STEADY = true;
    // Whether each pair must be asked for.
    static constexpr bool PAIRWISE = false;
    // Whether the scores of a key follow each other, and not those of a query: what is the same for all queries is then not
    // kept in registers.
    static constexpr bool BY_KEY = false;
    // Whether a head has a logit beside those of its keys.
    static constexpr bool SINKS = false;
    // Whether weights are dropped, after they have been added up.
    static constexpr bool DROPS = false;
    // Whether a map says which tiles of keys are visited.
    static constexpr bool BLOCKS = false;
    // Whether `sees` leaves out keys before the first, or after the last, that a query sees.
    static constexpr bool LEFT_EDGE = false, RIGHT_EDGE = false;

    // The keys that a query sees. From one query to the next, neither end may fall, or rise by more than one.
    __device__ Keys sees(const Sequence& sequence, int query) const { return {0, sequence.seq_kv}; }
    // A score in log2 units; of parts that are not LINEAR.
    __device__ float score(float s, const Pair& pair) const { return s; }
    // By how much it grows from that key to the next, log2 units; and on which piece, 1 or 2, all queries and keys of a range are,
    // 0 if on none; of parts with TILTS.
    __device__ float step(const Pair& pair) const { return 0.f; }
    __device__ int piece(const Sequence& sequence, int first_query, int last_query, int first_key, int last_key) const {
        return 1;
    }
    // Whether the query does not see the key; of parts that are PAIRWISE.
    __device__ bool hides(const Pair& pair) const { return false; }
    // That logit; of parts with SINKS.
    __device__ float sink(int head) const { return -INF; }
};

struct Causal : Part<Causal> {
    static constexpr bool RIGHT_EDGE = true, BEHIND = true;
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

// An even polynomial of S, by which S is multiplied. Right up to a product of `end`, log2 units, in magnitude; beyond, the product
// is larger still.
template <int TERMS>
struct Curve {
    float terms[TERMS];
    float end;

    __device__ float operator()(float s) const {
        const float square = s * s;
        float sum = terms[TERMS - 1];
#pragma unroll
        for (int t = TERMS - 2; t >= 0; --t) sum = fmaf(sum, square, terms[t]);
        return sum;
    }
};

// c tanh(score / c), in log2 units. The special function unit has its hands full with exponentials: where all scores of a
// warp are less than 3/4 c, as they nearly always are, a polynomial on the multiply-add units takes the place of tanh.
template <class Self, int TERMS>
struct Capping : Part<Self> {
    static constexpr bool LINEAR = false, TOGETHER = true, CURVES = true;
    static constexpr float LIMIT = 0.75f, TANH_LIMIT = 0.635148952f;
    float softcap_log2, softcap_inverse;  // c and its reciprocal

    __device__ Curve<TERMS> curve(float scale_log2) const {
        const float inverse = scale_log2 * softcap_inverse;
        Curve<TERMS> curve;
        float power = softcap_log2 * inverse;
#pragma unroll
        for (int i = 0; i < TERMS; ++i) curve.terms[i] = Self::TANH[i] * power, power *= inverse * inverse;
        // Of other factors, powers would leave float32's range.
        curve.end = inverse > 0x1p-12f && inverse < 0x1p12f ? TANH_LIMIT * softcap_log2 : 0.f;
        return curve;
    }
    template <class At, int MT, int NT>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor, const At& at) const {
        const float scale_log2 = factor;
        const Curve<TERMS> curve = this->curve(scale_log2);
        constexpr int CHAINS = 8;  // a maximum waits for the one before
        float largest[CHAINS] = {};
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i)
            largest[i % CHAINS] = fmaxf(largest[i % CHAINS], fabsf(rS[i / (NT * 4)][i / 4 % NT][i % 4]));
#pragma unroll
        for (int i = 1; i < CHAINS; ++i) largest[0] = fmaxf(largest[0], largest[i]);
        if (__all_sync(0xffffffff, curve.end > 0.f && largest[0] * scale_log2 * softcap_inverse <= LIMIT)) {
#pragma unroll
            for (int i = 0; i < MT * NT * 4; ++i) {
                float& s = rS[i / (NT * 4)][i / 4 % NT][i % 4];
                s *= curve(s);
            }
        } else {
#pragma unroll
            for (int i = 0; i < MT * NT * 4; ++i) {
                float& s = rS[i / (NT * 4)][i / 4 % NT][i % 4];
                s = static_cast<const Self*>(this)->capped(s * scale_log2);
            }
        }
        factor = 1.f;
    }
    __device__ float score(float s, const Pair& pair) const { return static_cast<const Self*>(this)->capped(s); }
};
// By the hardware's tanh, whose error of 2^-11 is a quarter of what bfloat16 leaves of a score; the polynomial's is 2^-12.
struct Softcap : Capping<Softcap, 3> {
    static constexpr float TANH[] = {0.9997853637f, -0.3262980283f, 0.0973573104f};
    __device__ float capped(float s) const { return softcap_log2 * tanh_approx(s * softcap_inverse); }
};
// By an exponential and a reciprocal, to some 2^-22 of c, as float16 leaves four times as much; the polynomial's is 2^-20 of
// the score.
struct FineSoftcap : Capping<FineSoftcap, 5> {
    static constexpr float TANH[] = {0.9999994636f, -0.3332825303f, 0.1325899065f, -0.0500564910f, 0.0129297795f};
    __device__ float capped(float s) const {
        constexpr float TWO_LOG2_E = 2.885390081777926815f;
        // tanh(x) = 1 - 2 / (e^2x + 1)
        const float power = exp2_approx(s * softcap_inverse * TWO_LOG2_E);
        return fmaf(-2.f * softcap_log2, reciprocal_approx(power + 1.f), softcap_log2);
    }
};
struct ExactSoftcap : Part<ExactSoftcap> {
    static constexpr bool LINEAR = false, TOGETHER = true;
    float softcap_log2, softcap_inverse;

    template <class At, int MT, int NT>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor, const At& at) const {
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i) {
            float& s = rS[i / (NT * 4)][i / 4 % NT][i % 4];
            s = softcap_log2 * tanhf(s * factor * softcap_inverse);
        }
        factor = 1.f;
    }
    __device__ float score(float s, const Pair& pair) const { return softcap_log2 * tanhf(s * softcap_inverse); }
};

// An array beside Q, K and V, (batch, heads) or (batch, heads, seq_q, seq_kv). Strides are in elements, 0 along an axis on
// which nothing depends.
template <class T>
struct OfHeads {
    const T* data;
    long long stride_batch, stride_head;

    __device__ const T* line(int batch, int head) const { return data + batch * stride_batch + head * stride_head; }
    __device__ T at(int batch, int head) const { return *line(batch, head); }
};
template <class T>
struct OfPairs {
    const T* data;
    long long stride_batch, stride_head, stride_query, stride_key;

    __device__ const T* row(const Pair& pair) const {
        return data + pair.batch * stride_batch + pair.head * stride_head + pair.query * stride_query;
    }
    __device__ T at(const Pair& pair) const { return row(pair)[pair.key * stride_key]; }
};

constexpr float LOG2_E = 1.442695040888963407f;

// Attention with linear biases (Press et al. 2022): the further a key is from where its query stands, the less it counts.
struct Alibi : Part<Alibi> {
    static constexpr bool LINEAR = false, TOGETHER = true, TILTS = true;
    OfHeads<float> alibi_slopes;

    // Distances are counted on in float32: the conversion of an integer takes as long as an exponential.
    template <class At, int MT, int NT>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor, const At& at) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float slope = LOG2_E * alibi_slopes.at(at.batch, at.head(mt, h));
                const float first = static_cast<float>(at.query(mt, h) + sequence.diagonal() - at.key_of(0, 0));
#pragma unroll
                for (int i = 0; i < NT * 2; ++i) {
                    float& s = rS[mt][i / 2][2 * h + i % 2];
                    s = fmaf(s, factor, -slope * fabsf(first - static_cast<float>(i / 2 * 8 + i % 2)));
                }
            }
        factor = 1.f;
    }
    __device__ float score(float s, const Pair& pair) const {
        const float distance = fabsf(static_cast<float>(pair.query + pair.sequence.diagonal() - pair.key));
        return fmaf(-LOG2_E * alibi_slopes.at(pair.batch, pair.head), distance, s);
    }
    __device__ float step(const Pair& pair) const {
        const float slope = LOG2_E * alibi_slopes.at(pair.batch, pair.head);
        return pair.key < pair.query + pair.sequence.diagonal() ? slope : -slope;
    }
    __device__ int piece(const Sequence& sequence, int first_query, int last_query, int first_key, int last_key) const {
        if (last_key <= first_query + sequence.diagonal()) return 1;
        return first_key >= last_query + sequence.diagonal() ? 2 : 0;
    }
};

// What is added to a score.
template <class T>
struct Bias : Part<Bias<T>> {
    static constexpr bool LINEAR = false, STEADY = false;  // -inf hides keys
    OfPairs<T> bias;
    __device__ float score(float s, const Pair& pair) const { return fmaf(to_float(bias.at(pair)), LOG2_E, s); }
};
using BiasFloat16 = Bias<float16>;
using BiasBfloat16 = Bias<bfloat16>;
using BiasFloat32 = Bias<float>;

// Which keys are seen: a byte each, or a bit, the highest of a byte first; `stride_key` is that of bytes.
struct Mask : Part<Mask> {
    static constexpr bool PAIRWISE = true;
    OfPairs<unsigned char> mask;
    __device__ bool hides(const Pair& pair) const { return !mask.at(pair); }
};
struct MaskBits : Part<MaskBits> {
    static constexpr bool PAIRWISE = true;
    OfPairs<unsigned char> mask;
    __device__ bool hides(const Pair& pair) const {
        return !(mask.row(pair)[(pair.key >> 3) * mask.stride_key] >> (7 - pair.key % 8) & 1);
    }
};

// A logit of each head that takes part in the softmax, and has no value (gpt-oss).
struct Sinks : Part<Sinks> {
    static constexpr bool SINKS = true;
    const float* sinks;
    long long stride_head;
    __device__ float sink(int head) const { return sinks[head * stride_head]; }
};

// The tiles of keys that a tile of rows visits are counted from the first one on: all of them,
template <bool BLOCKS>
struct Visits {
    // The number of one among all tiles of keys, and whether PAIRWISE parts may hide some pairs of it.
    __device__ static int tile(int visit) { return visit; }
    __device__ static bool is_partial(int visit) { return true; }
};
// or those of a line of a map: how many are visited before each of so many tiles, and before their end; then which they are,
// twice their number, and 1 more if partial; and at the end of the line a tile beyond all keys, for rows that visit none.
template <>
struct Visits<true> {
    const int* line;
    int tiles;

    __device__ int tile(int visit) const { return line[tiles + 1 + visit] >> 1; }
    __device__ bool is_partial(int visit) const { return line[tiles + 1 + visit] & 1; }
    // Makes of tiles from `first` to `end` visits.
    __device__ void count(int& first, int& end) const {
        first = line[first], end = line[end];
        if (first >= end) first = tiles, end = tiles + 1;
    }
};

// Which tiles of keys are visited, a line for each tile of rows of (batch, heads).
struct Blocks : Part<Blocks> {
    static constexpr bool BLOCKS = true, STEADY = false;
    OfHeads<int> block_mask;
};

// Weights are dropped at random and the others grow by 1 / keep (Dao et al. 2022, algorithm 2), by the bits of a counter that
// names the batch, the head, the query and sixteen keys' pairs: those of a lane, whatever the tiles are.
struct Dropout : Part<Dropout> {
    static constexpr bool DROPS = true;
    uint64_t dropout_seed;
    uint32_t dropout_threshold;  // of 32 bits, those that are less drop a weight
    float dropout_keep;

    // Whether the keys `key` + {0, 1, 8, 9} are dropped; `key` is even, and less than 8 beyond a multiple of 16.
    __device__ void dropped(bool (&drops)[4], int batch, int head, int query, int key) const {
        uint32_t words[4] = {static_cast<uint32_t>(key >> 4 << 2 | (key >> 1 & 3)), static_cast<uint32_t>(query),
                             static_cast<uint32_t>(head), static_cast<uint32_t>(batch)};
        philox(words, dropout_seed);
#pragma unroll
        for (int i = 0; i < 4; ++i) drops[i] = words[i] < dropout_threshold;
    }
    __device__ bool drops(const Pair& pair) const {
        bool drops[4];
        dropped(drops, pair.batch, pair.head, pair.query, pair.key & ~9);
        return drops[(pair.key >> 3 & 1) * 2 + pair.key % 2];
    }
};

// Where the accumulators of m16n8 products are: `row` and `key` are those of the warp's first score. A lane holds the
// rows lane / 4 + {0, 8} and the keys 2 (lane % 4) + {0, 1} of each piece. Rows are those of 2^pack_log2 heads, query by
// query: of a pack of them.
struct At {
    int lane, row, key;
    int batch, pack;
    int pack_log2 = 0;

    __device__ int query(int mt, int h) const { return query_of(row_of(mt, h)); }
    __device__ int head(int mt, int h) const { return head_of(row_of(mt, h)); }
    __device__ int query_of(int row) const { return row >> pack_log2; }
    __device__ int head_of(int row) const { return (pack << pack_log2) + row % (1 << pack_log2); }
    __device__ int row_of(int mt, int h) const { return row + lane / 4 + mt * 16 + h * 8; }
    __device__ int key_of(int nt, int i) const { return key + lane % 4 * 2 + nt * 8 + i; }
};

// The same, of rows of any number of heads, query by query.
struct GroupedAt {
    int lane, row, key;
    const Divisor& group;
    int batch, first_head;

    __device__ int query(int mt, int h) const { return group.quotient(row_of(mt, h)); }
    __device__ int head(int mt, int h) const { return first_head + group.remainder(row_of(mt, h)); }
    __device__ int row_of(int mt, int h) const { return row + lane / 4 + mt * 16 + h * 8; }
    __device__ int key_of(int nt, int i) const { return key + lane % 4 * 2 + nt * 8 + i; }
};

// The tiles of BN keys that some rows visit, the last first: [first, end). Those of [whole_first, whole_end) need no mask.
struct KeyTiles {
    int first, end;
    int whole_first, whole_end;
};

// Whether some rows may not see all of a tile's keys: keys beyond their last, or before their first.
struct Masked {
    bool right, left;
};

// Of the arrays that have a number for each pair, those that a kernel has brought nearer: none. See pair_tiles_sm90.cuh.
struct NoTiles {
    template <class Part>
    static constexpr bool HAS = false;
    // Whether scores are handed to the softmax as what is added to them is, in natural units, and not in log2 units.
    static constexpr bool NATURAL = false;
};

template <class... Parts>
struct Score : Parts... {
    static constexpr bool LINEAR = (Parts::LINEAR && ...), PAIRWISE = (Parts::PAIRWISE || ...);
    static constexpr bool BY_KEY = (Parts::BY_KEY || ...), SINKS = (Parts::SINKS || ...), DROPS = (Parts::DROPS || ...);
    static constexpr bool BLOCKS = (Parts::BLOCKS || ...);
    static constexpr bool STEADY = (Parts::STEADY && ...) && !PAIRWISE && !DROPS;
    // Whether tiles that all rows see take a step, too.
    static constexpr bool EVERYWHERE = !LINEAR || PAIRWISE;
    // Whether all that is not LINEAR are tilts, or a curve, and nothing is asked of each pair.
    static constexpr bool TILTS = !LINEAR && ((Parts::LINEAR || Parts::TILTS) && ...) && !PAIRWISE;
    static constexpr bool CURVES = (Parts::CURVES || ...) && ((Parts::LINEAR || Parts::CURVES) && ...) && !PAIRWISE;
    static constexpr bool BEHIND = (Parts::BEHIND || ...);
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
    // What of the j-th tile of keys needs a mask.
    __device__ static Masked masked(const KeyTiles& tiles, int j) {
        return {j >= tiles.whole_end, LEFT_EDGE && j < tiles.whole_first};
    }
    // What the row_tile-th tile of rows visits of `seq_kv` keys, those included that a short sequence lacks.
    template <int BN>
    __device__ Visits<BLOCKS> visits(int seq_kv, int batch, int head, int row_tile) const {
        if constexpr (BLOCKS) {
            const int tiles = (seq_kv + BN - 1) / BN;
            return {this->block_mask.line(batch, head) + row_tile * 2ll * (tiles + 1), tiles};
        } else {
            return {};
        }
    }

    // What the tilts add to a score, in log2 units; how much more it is at the next key; and the piece they are on.
    __device__ float tilt(const Pair& pair) const {
        float sum = 0.f;
        ((sum = Parts::TILTS ? Parts::score(sum, pair) : sum), ...);
        return sum;
    }
    __device__ float step(const Pair& pair) const { return (0.f + ... + Parts::step(pair)); }
    __device__ int piece(const Sequence& sequence, int first_query, int last_query, int first_key, int last_key) const {
        int piece = 1;  // no two parts have several
        ((piece *= Parts::TILTS ? Parts::piece(sequence, first_query, last_query, first_key, last_key) : 1), ...);
        return piece;
    }
    // The score of a query and a key that are within its `sees`, from S, in the units that the softmax is handed. BEGUN:
    // whether `apply_all` has been there, which leaves this factor; parts with Tiles are then left out.
    template <bool BEGUN = false, class Tiles = NoTiles>
    __device__ float of(float s, float factor, const Pair& pair) const {
        return hidden<Tiles>(changed<BEGUN, Tiles>(s, factor, pair), pair);
    }

    // The step that every S takes before the softmax. `partial`: whether a mask that a map is of may hide some of these keys.
    template <class At, int MT, int NT, class Tiles = NoTiles>
    __device__ void apply(float (&rS)[MT][NT][4], const Sequence& sequence, float scale_log2, const At& at, Masked masked,
                          bool partial = true, const Tiles& tiles = {}) const {
        float factor = Tiles::NATURAL ? scale_log2 * (1.f / LOG2_E) : scale_log2;
        (apply_all<Parts>(rS, sequence, factor, at, tiles), ...);
        constexpr bool CHANGES = ((!Parts::LINEAR && !Parts::TOGETHER && !Tiles::template HAS<Parts>) || ...);
        constexpr bool HIDES = ((Parts::PAIRWISE && !Tiles::template HAS<Parts>) || ...), EACH = HIDES || CHANGES;
        if constexpr (BLOCKS) {
            if constexpr (CHANGES)
                by_key(rS, sequence, at, [&](float s, const Pair& pair) { return changed<true, Tiles>(s, factor, pair); });
            constexpr bool MAPPED = ((!Parts::PAIRWISE || Parts::BY_KEY) && ...);  // no other mask is there
            if (HIDES && (partial || !MAPPED))
                by_key(rS, sequence, at, [&](float s, const Pair& pair) { return hidden<Tiles>(s, pair); });
        } else if constexpr (EACH && BY_KEY) {
            by_key(rS, sequence, at, [&](float s, const Pair& pair) { return of<true, Tiles>(s, factor, pair); });
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
                            s = of<true, Tiles>(s, factor, {sequence, at.batch, at.head(mt, h), query, key});
                        }
                }
        }
        (hide<Parts>(rS, at, tiles), ...);
        mask(rS, sequence, at, masked);
    }

    // Hides the keys that rows do not see.
    template <class At, int MT, int NT>
    __device__ void mask(float (&rS)[MT][NT][4], const Sequence& sequence, const At& at, Masked masked) const {
        if (masked.right) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int last = sees(sequence, at.query(mt, h)).end - 1 - at.key_of(0, 0);
#pragma unroll
                    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                        for (int i = 0; i < 2; ++i) set_if_less(rS[mt][nt][2 * h + i], last, nt * 8 + i, -INF);
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
                        for (int i = 0; i < 2; ++i) set_if_less(rS[mt][nt][2 * h + i], nt * 8 + i, first, -INF);
                }
        }
    }

    // Between P, which has been added up, and O += P V.
    template <class At, int MT, int NT>
    __device__ void drop(float (&rP)[MT][NT][4], const At& at) const {
        if constexpr (DROPS) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int nt = 0; nt < NT; nt += 2) {
                        bool drops[4];
                        this->dropped(drops, at.batch, at.head(mt, h), at.query(mt, h), at.key_of(nt, 0));
#pragma unroll
                        for (int i = 0; i < 4; ++i) set_if_equal(rP[mt][nt + i / 2][2 * h + i % 2], drops[i], true, 0.f);
                    }
        }
    }
    // The same of one weight.
    __device__ float kept(float p, const Pair& pair) const {
        if constexpr (DROPS)
            if (this->drops(pair)) return 0.f;
        return p;
    }

    // At the end of a row: what its O is divided by, and its log-sum-exp, with what is beside its keys. A row that saw none
    // keeps its divisor of 0. Beyond 2^100 times the others' sum, nothing of O is left.
    static constexpr bool CONCLUDES = SINKS || DROPS;
    __device__ void conclude(float& divisor, float& lse, int head) const {
        if constexpr (SINKS) {
            float logit = -INF;
            ((logit = Parts::SINKS ? Parts::sink(head) : logit), ...);
            const float beside = (logit - lse) * LOG2_E;
            if (lse == -INF) {
                lse = logit;
            } else if (logit != -INF) {
                divisor *= fminf(1.f + exp2f(beside), 0x1p100f);
                lse = fmaxf(lse, logit) + log1pf(exp2f(-fabsf(beside)));
            }
        }
        if constexpr (DROPS) divisor *= this->dropout_keep;
    }

 private:
    template <bool BEGUN, class Tiles>
    __device__ float changed(float s, float factor, const Pair& pair) const {
        if constexpr (!LINEAR) {
            s *= factor;
            ((s = (BEGUN && Parts::TOGETHER) || Tiles::template HAS<Parts> ? s : Parts::score(s, pair)), ...);
        }
        return s;
    }
    template <class Tiles>
    __device__ float hidden(float s, const Pair& pair) const {
        if constexpr (((Parts::PAIRWISE && !Tiles::template HAS<Parts>) || ...))
            set_if_equal(s, ((!Tiles::template HAS<Parts> && Parts::hides(pair)) || ...), true, -INF);
        return s;
    }
    // f(score, pair) for all of a tile, the pairs of a key one after the other.
    template <class At, class F, int MT, int NT>
    static __device__ void by_key(float (&rS)[MT][NT][4], const Sequence& sequence, const At& at, const F& f) {
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
    template <class Part, class At, int MT, int NT, class Tiles>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor, const At& at,
                              const Tiles& tiles) const {
        if constexpr (Part::TOGETHER) Part::apply_all(rS, sequence, factor, at);
        if constexpr (Tiles::template HAS<Part> && !Part::LINEAR) tiles.template add<Part>(rS, factor), factor = 1.f;
    }
    template <class Part, class At, int MT, int NT, class Tiles>
    __device__ void hide(float (&rS)[MT][NT][4], const At& at, const Tiles& tiles) const {
        if constexpr (Tiles::template HAS<Part> && Part::PAIRWISE) tiles.template hide<Part>(rS, at.key);
    }
    static __device__ Keys both(const Keys& a, const Keys& b) { return {max(a.first, b.first), min(a.end, b.end)}; }
};

// What a launch passes to a kernel: the parameters of all, then those of the score's parts and of the way of finding K and
// V, where these have any.
template <class SCORE, class KV>
struct Arguments : Params, SCORE, KV {};
