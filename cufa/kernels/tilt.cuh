// What grows evenly from key to key, such as ALiBi, as a function of the key that a lane's scores of a tile begin with: one
// multiply-add a score then takes it into the exponent.
#pragma once
#include "score.cuh"

// Of the two rows of a lane, where there is ANY.
template <bool ANY>
struct Tilt {
    int piece = 0;   // of those that the function is made of; 0 before any
    int origin = 0;  // the key that it starts at
    float at_origin[2] = {}, step[2] = {};

    // Takes up the piece on which the warp's rows and BN keys are that `at` names, if there is one. Where no query sees keys
    // beyond its own, there is, and it is taken up in front of these, as it may end before the tile does.
    template <int BN, class SCORE>
    __device__ bool find(const SCORE& score, const Sequence& sequence, const At& at) {
        const int first_query = at.row >> at.pack_log2, last_query = (at.row + 15) >> at.pack_log2;
        const int piece =
            SCORE::BEHIND ? 1 : score.piece(sequence, first_query, last_query, at.key, at.key + BN - 1);
        if (piece == 0) return false;
        if (piece == this->piece) return true;
        // Those of rows that there are not, too, lie behind the query that stands for these.
        const int behind = max(min(first_query, sequence.seq_q - 1) + sequence.diagonal() - 1, 0);
        origin = SCORE::BEHIND ? behind : at.key;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = min(at.query(0, h), sequence.seq_q - 1);
            const Pair pair{sequence, at.batch, at.head(0, h), query, origin};
            at_origin[h] = score.tilt(pair), step[h] = score.step(pair);
        }
        // Infinite ones are not multiplied, for 0 times them is NaN.
        const float sum = fabsf(at_origin[0]) + fabsf(at_origin[1]) + fabsf(step[0]) + fabsf(step[1]);
        if (!__all_sync(0xffffffff, sum < INF)) return false;
        this->piece = piece;
        return true;
    }
    // What is added to the score of that key, log2 units.
    __device__ float of(int h, int key) const { return fmaf(step[h], static_cast<float>(key - origin), at_origin[h]); }
};
template <>
struct Tilt<false> {};
