// The constants that follow from the template arguments of fa3_wgmma.cu; those of fp8_wgmma.cu
// build on them.
#pragma once
#include "fa3_schedule.cuh"
#include "fa3_smem.cuh"
#include "kv.cuh"
#include "pair_tiles_sm90.cuh"
#include "scheduler_sm90.cuh"
#include "score.cuh"

template <class T_, int HEAD_DIM_, int HEAD_DIM_V_, int BM_, int BN_, int STAGES_,
          int BLOCKS_PER_SM, bool PING_PONG_, class SCHEDULE_, class SCORE_, class KV_>
struct Config
    : Layout<HEAD_DIM_, HEAD_DIM_V_, BM_, BN_, STAGES_, BLOCKS_PER_SM, PairTiles<SCORE_, BN_>> {
    using T = T_;
    using SCHEDULE = SCHEDULE_;
    using SCORE = SCORE_;
    using KV = KV_;
    using Pairs = PairTiles<SCORE, BN_>;  // a warp's, of biases and masks
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, CONSUMERS = BM / 64;  // warpgroups
    static constexpr int HEAD_DIM_V = HEAD_DIM_V_, Q_STAGES = Config::Layout::Q_STAGES;
    static constexpr bool PING_PONG = PING_PONG_;
    static_assert(!Pairs::BYTES || !SCORE::FIRST_TILE_BOUNDS_MAX,
                  "biases and masks are read once: scores must not be computed once more");

    // Whether tiles of rows visit different keys (UNEVEN), and whether the consumers of a tile do
    // (APART): not where edges jump, as one might then skip more tiles than there are stages.
    static constexpr bool UNEVEN = SCORE::LEFT_EDGE || SCORE::RIGHT_EDGE || SCORE::HAS_BLOCK_MAP;
    static constexpr bool APART = UNEVEN && !SCORE::HAS_BLOCK_MAP && !SCORE::JUMPS;
    static constexpr int PARTS = APART ? CONSUMERS : 1;
    using Work = ::Work<PARTS, KV::TAILS, SCORE::HAS_BLOCK_MAP>;
    // Whether some tiles of rows do not begin with the first keys.
    static constexpr bool FIRST = SCORE::LEFT_EDGE || SCORE::HAS_BLOCK_MAP;
    // Whether a consumer skips tiles of keys that are masked for all its rows, but not for those of
    // another. With more than one slot of Q it still holds the last V of the tile before.
    static constexpr bool SKIPS = APART && CONSUMERS > 1;
    static_assert(!SKIPS ||
                      (SCORE::LEFT_EDGE + SCORE::RIGHT_EDGE) * ((BM - 64 + BN - 1) / BN) <= STAGES,
                  "as many stages as tiles of keys that are skipped");

    // Whether O is written from registers, and not through a slot of Q. With fewer than three slots
    // it is, if there are enough registers: the slot is then free when the last S has been
    // computed, and the next Q but one does not wait for O. As O is then written only after the
    // next one or two Q have arrived, Work has twice as many slots as Q.
    static constexpr bool O_FROM_REGISTERS = Q_STAGES == 1 || (Q_STAGES == 2 && CONSUMERS < 3);
    // Whether every thread frees a slot of Q, and the tile's Work with it; else one thread of each
    // consumer does, which has waited for the others. That takes less time with several consumers;
    // with one, racecheck does not see that it is enough.
    static constexpr bool ALL_FREE_Q = O_FROM_REGISTERS || CONSUMERS == 1;
    // Whether the first S of a tile is computed together with the last O of the one before.
    static constexpr bool ACROSS = Q_STAGES > 1;

    // The schedule's choices, where they are possible.
    static constexpr bool FOLDED = SCHEDULE::FOLDED && ACROSS;
    static constexpr bool ONE_LOOP = HEAD_DIM_V > SCHEDULE::NARROW && !FOLDED;
    static constexpr bool O_FIRST = CONSUMERS >= SCHEDULE::BUSY_CONSUMERS;
};
