// A part of a score: what it may say of the keys that a query sees, and of a score.
#pragma once
#include "ptx.cuh"

// The sequences that a tile belongs to: how long they are, and where they begin in arrays of
// several.
struct Sequence {
    int seq_q, seq_kv;
    int first_q = 0, first_k = 0;

    // Query i stands at key i + diagonal: aligned bottom-right.
    __device__ int diagonal() const { return seq_kv - seq_q; }
};

struct Keys {
    int first, end;  // [first, end); none where end <= first
};

// The query and the key that a score is of; both exist.
struct Pair {
    const Sequence& sequence;
    int batch, head, query, key;
};

// The base of a part, which overrides what it changes. Its members are its run-time parameters:
// they follow Params in the kernel's parameter, in the order of the parts. A part without any takes
// no place there: for that, the bases of two parts must not be of one type.
template <class Self>
struct Part {
    // Whether scores stay proportional to Q K^T, with the scale as the factor. Else the softmax is
    // handed log2 units, or natural ones, and `score` is in these: where a part adds numbers of any
    // size, such as -1e9 or float32's lowest number, sums are then those of float32.
    static constexpr bool LINEAR = true, NATURAL = false;
    // Whether all scores of a warp are handed over together, to `apply_all`. It brings them to log2
    // units, from those in which they are by `factor`, and makes that 1. So do the parts before it
    // in a score; those that are NATURAL come after it.
    static constexpr bool TAKES_WHOLE_TILE = false;
    // Whether what it adds grows evenly from key to key, by `step`, in one piece or two: see
    // tilt.cuh.
    static constexpr bool AFFINE_IN_KEY = false;
    // Whether its two pieces may meet at another key than the one that a query stands at.
    static constexpr bool BREAKS_ELSEWHERE = false;
    // Whether a query sees no keys beyond the one it stands at.
    static constexpr bool NO_KEYS_AHEAD = false;
    // Terms of the polynomial `curve` by which small scores are multiplied; for a part that is
    // TAKES_WHOLE_TILE.
    static constexpr int CURVE_TERMS = 0;
    // Whether the first scores of a row tell about where the others are; where not, row maxima are
    // looked for everywhere.
    static constexpr bool FIRST_TILE_BOUNDS_MAX = true;
    // Whether each pair must be asked for.
    static constexpr bool PAIRWISE = false;
    // Whether the scores of a key follow each other, and not those of a query: what is the same for
    // all queries is then not kept in registers.
    static constexpr bool KEY_MAJOR = false;
    // Whether weights are dropped after they have been added up, by `dropped`.
    static constexpr bool DROPS_WEIGHTS = false;
    // Whether it changes a row's divisor and log-sum-exp after the last keys, by `end_row`; and
    // whether it asks for the latter.
    static constexpr bool ENDS_ROWS = false, NEEDS_LSE = false;
    // Whether a map says which tiles of keys are visited.
    static constexpr bool HAS_BLOCK_MAP = false;
    // Whether `sees` leaves out keys before the first, or after the last, that a query sees.
    static constexpr bool LEFT_EDGE = false, RIGHT_EDGE = false;
    // Whether these may rise by more than one from one query to the next.
    static constexpr bool JUMPS = false;

    // The keys that a query sees. From one query to the next, neither end may fall, or rise by more
    // than one, unless it JUMPS.
    __device__ Keys sees(const Sequence& sequence, int query) const { return {0, sequence.seq_kv}; }
    // A score in log2 units, or natural ones; for parts that are not LINEAR.
    __device__ float score(float s, const Pair& pair) const { return s; }
    // For parts with AFFINE_IN_KEY: the growth of what it adds from key to key on the piece of that
    // side, 1 or -1, in the units of `score`; and a number that is linear in query and key, whose
    // sign is the side.
    __device__ float step(const Pair& pair, int side) const { return 0.f; }
    __device__ int turn(const Pair& pair) const { return 0; }
    // Whether the query does not see the key; for parts that are PAIRWISE.
    __device__ bool hides(const Pair& pair) const { return false; }
    // Whether the weights of the keys `key` + {0, 1, 8, 9} are dropped; `key` is even, and less
    // than 8 beyond a multiple of 16.
    __device__ void dropped(bool (&drops)[4], int batch, int head, int query, int key) const {}
    // Changes what O is divided by, and the log-sum-exp.
    __device__ void end_row(float& divisor, float& lse, int head) const {}
};
