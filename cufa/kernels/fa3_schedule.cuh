// How fa3_wgmma.cu orders its work: choices that change how long a kernel runs or compiles, and not
// what it computes. All are made here, from a kernel's Config; figures are those of an H200.
#pragma once
#include "fa3_config.cuh"

template <class CONFIG>
struct Schedule : CONFIG {
    using SCORE = typename CONFIG::SCORE;
    using KV = typename CONFIG::KV;
    static constexpr int CONSUMERS = CONFIG::CONSUMERS;

    // Whether a tile's first K is asked for in front of its Q, whose only slot is free later: not
    // where consumers free some of the tile before when they take up its Q, nor with the widest
    // rows and a mask, which wait for Q longer, nor with three consumers, which would spill more.
    static constexpr bool K_FIRST = CONFIG::Q_STAGES == 1 && CONSUMERS < 3 && !CONFIG::FIRST &&
                                    !(SCORE::RIGHT_EDGE && CONFIG::HEAD_DIM > 192);
    // Whether keys that need row maxima, a tile's first ones, and those of a block's first tile
    // share a step. That takes two thirds of the time to compile, and up to 1.02 of it to run: for
    // wide tiles whose scores take long to compile.
    static constexpr bool FOLDED =
        CONFIG::ACROSS && CONFIG::BN > 64 && (!SCORE::LINEAR || CONFIG::FIRST || KV::RAGGED);
    // Else, where O is wide, one loop over the keys: two take long to compile. In it O is waited
    // for after the exponentials, which then run under the one consumer's own O, if there is but
    // one on the multiprocessor.
    static constexpr bool ONE_LOOP = CONFIG::HEAD_DIM_V > 128 && !FOLDED;
    // Whether O is waited for in front of the softmax: with three consumers, the others keep the
    // tensor cores busy.
    static constexpr bool O_FIRST = CONSUMERS == 3;
    // Whether P is packed in either branch, where it comes out of the curve or of its substitute:
    // ptxas does not mix what follows a branch with the exponentials, which leave room for that if
    // O is waited for first. Not in float16, whose curve takes more registers.
    static constexpr bool PACKS_EARLY =
        O_FIRST && !ONE_LOOP && SCORE::CURVES && SCORE::CURVE_TERMS == 3;
    static_assert(!PACKS_EARLY || !SCORE::AFFINE_IN_KEY, "lines do not pack");
    // Whether each thread frees a slot of Q, or one of each consumer for all that it has waited
    // for, and the tile's Work with it. The second takes less time where there are several
    // consumers; with one, racecheck does not see that it is enough.
    static constexpr bool ALL_FREE_Q = CONFIG::O_FROM_REGISTERS || CONSUMERS == 1;
    // The round of the first tile. For sequences of unequal lengths, a round -1 without keys takes
    // it up, 0.3 us later: the code that looks for tiles then exists once. With two copies, kernels
    // spill 28 to 44 bytes more, have a tenth more code and take 1.08 of the time to compile.
    static constexpr uint32_t START = KV::RAGGED ? -1u : 0;
    // Whether m is held twice: wide O leaves no registers for it, nor do tilts in tiles as wide as
    // those of narrow O.
    static constexpr bool TWICE =
        CONFIG::HEAD_DIM_V <= 128 && !(SCORE::AFFINE_IN_KEY && CONFIG::HEAD_DIM_V <= 64);
    // Whether to look ahead for steep tilts. Next to wide O, a tile of fewer keys and no registers
    // to spare, it costs more than it saves.
    static constexpr bool LOOKS_FOR_STEEP =
        SCORE::AFFINE_IN_KEY && !SCORE::NO_KEYS_AHEAD && CONFIG::HEAD_DIM_V <= 64;
    // Whether scores that are computed one by one next to tilts are so all at once, or 16 keys at a
    // time: that is rare, and code takes time to compile. At once with three consumers, which spill
    // 52 to 76 bytes more otherwise, and next to wide O, if it is for infinite ones alone: 1.03
    // otherwise.
    static constexpr bool CHANGES_AT_ONCE = CONSUMERS == 3 || (ONE_LOOP && SCORE::NO_KEYS_AHEAD);
};
