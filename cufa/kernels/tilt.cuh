// Terms of the score that grow evenly from key to key, such as ALiBi, as a function of the key that
// a lane's scores of a tile begin with: one multiply-add a score then takes it into the exponent.
#pragma once
#include "score.cuh"

// The tilts of the two rows of a lane, where there is ANY.
template <bool ANY>
struct Tilt {
    int pieces = 0;        // as in Score; 0 before any
    bool settled = false;  // whether all earlier keys are on them, too
    int origin = 0;        // the key that the function starts at
    float at_origin[2] = {}, step[2] = {};

    // The pieces that hold all pairs of the warp's rows and the keys from `first` to the last of
    // the BN that `at` names, as far as rows see them; 0 if that is not one of each. Where no query
    // sees keys beyond its own, it is.
    template <int BN, class SCORE>
    static __device__ int pieces_of(const SCORE& score, const Sequence& sequence, const At& at,
                                    int first) {
        if (SCORE::NO_KEYS_AHEAD) return 1;
        const int last_query = sequence.seq_q - 1;  // also for rows beyond it
        return score.pieces(sequence, min(at.query_of(at.row), last_query),
                            min(at.query_of(at.row + 15), last_query), first, at.key + BN - 1);
    }
    // Takes up the pieces of the BN keys that `at` names, if there is one of each. Where no query
    // sees keys beyond its own, they are taken up in front of these, as they may end before the
    // tile does.
    template <int BN, class SCORE>
    __device__ bool find(const SCORE& score, const Sequence& sequence, const At& at) {
        if (settled) return true;
        const int pieces = pieces_of<BN>(score, sequence, at, at.key);
        if (pieces == 0) return false;
        if (pieces == this->pieces) return true;
        auto query_of = [&](int row) { return min(at.query_of(row), sequence.seq_q - 1); };
        const int behind = max(query_of(at.row) + sequence.diagonal() - 1, 0);
        origin = SCORE::NO_KEYS_AHEAD ? behind : at.key;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Pair pair{sequence, at.batch, at.head(0, h), query_of(at.row_of(0, h)), origin};
            at_origin[h] = score.tilt(pair), step[h] = score.step(pair, pieces);
        }
        // Not multiplied: infinite steps, since 0 times them is NaN; steps that a distance could
        // make infinite; and NATURAL ones that are so large that float32 rounds them together with
        // scores, as an exponent would not be rounded so.
        constexpr float LIMIT = SCORE::NATURAL ? 0x1p16f : 0x1p96f;
        const float sum =
            fabsf(at_origin[0]) + fabsf(at_origin[1]) + fabsf(step[0]) + fabsf(step[1]);
        const bool small = __all_sync(0xffffffff, sum < LIMIT);
        this->pieces = small ? pieces : 0;
        settled = small && pieces_of<BN>(score, sequence, at, 0) == pieces;
        return small;
    }
    // The number added to the score of that key.
    __device__ float of(int h, int key) const {
        return fmaf(step[h], static_cast<float>(key - origin), at_origin[h]);
    }
};
template <>
struct Tilt<false> {};
