// The types and numbers that follow from the template arguments of the kernels that decode.
#pragma once
#include "decode_end.cuh"
#include "decode_scales.cuh"
#include "softmax.cuh"
#include "tile.cuh"

// The base of products on K and V of Q's type.
struct InTypeOfQ {
    template <class T>
    using Element = T;
    static constexpr bool SCALED = false, INTEGERS = false;
    template <class T, class QTile, int MT>
    struct Factors {};
};

template <class PRODUCTS_, class T_, int HEAD_DIM_, int HEAD_DIM_V_, int BM_, int BN_, int STAGES_,
          int WARPS_, bool UNIFIED_, bool WHOLE_, class SCORE_, class KV_, class PARAMS_>
struct DecodeConfig {
    using PRODUCTS = PRODUCTS_;
    using T = T_;  // of Q and O
    using SCORE = SCORE_;
    using KV = KV_;
    using ARGUMENTS = DecodeArguments<SCORE, KV, PARAMS_>;
    // Elements of K and V, and whether they have 8 bits and scales.
    using Element = typename PRODUCTS::template Element<T>;
    static constexpr bool SCALED = PRODUCTS::SCALED;
    // Whether S is a product of integers, for which Q is split: see products_int8.cuh.
    static constexpr bool INTEGERS = PRODUCTS::INTEGERS;
    static constexpr int HEAD_DIM = HEAD_DIM_, HEAD_DIM_V = HEAD_DIM_V_, BM = BM_, BN = BN_;
    static constexpr int STAGES = STAGES_, WARPS = WARPS_, THREADS = WARPS * 32;
    static constexpr bool UNIFIED = UNIFIED_, WHOLE = WHOLE_;
    static constexpr int TEAM = PRODUCTS::TEAM, TEAMS = WARPS / TEAM, TEAM_THREADS = TEAM * 32;
    // 16-row, 8-key and 8-column pieces of a warp's S and O
    static constexpr int WARP_ROWS = BM / TEAM, MT = WARP_ROWS / 16, NT = BN / 8,
                         OT = HEAD_DIM_V / 8;
    // float32 products leave O's columns in another order, and need m in the units of S, see
    // products_fp32.cuh and softmax.cuh.
    static constexpr bool FP32 = sizeof(T) == 4;
    static_assert(!UNIFIED || (TEAM == 1 && !FP32),
                  "a warp decides alone, on sums of P of 16 bits");
    // With one stage, a tile's K is asked for while V of the one before is taken, and all teams ask
    // at once: memory reads what lies together a little faster, if little else comes in between.
    static constexpr bool TOGETHER = STAGES == 1;
    using Unit = ::Unit<ARGUMENTS, BN>;
    using Share = ::Share<ARGUMENTS, BN, TEAMS, WHOLE>;
    using Softmax = OnlineSoftmax<MT, FP32>;
    using Piece = Partial<HEAD_DIM_V>;

    using Values = ValueScales<SCALED>;

    // Shared memory: Q, the teams' rings, O of some rows for each team, and their m and l. Behind
    // the tiles of a ring are their keys' scales.
    using QTile = SmemTile<BM, HEAD_DIM, sizeof(T)>;
    using KTile = SmemTile<BN, HEAD_DIM, sizeof(Element)>;
    using VTile = SmemTile<BN, HEAD_DIM_V, sizeof(Element)>;
    using Factors = typename PRODUCTS::template Factors<T, QTile, MT>;  // of Q's rows
    static constexpr int SCALE_BYTES = SCALED ? BN * 4 : 0;             // of a tile of K, or of V
    static constexpr int RING = STAGES * (KTile::bytes + VTile::bytes + 2 * SCALE_BYTES);
    using End = UnitEnd<T, Softmax, ARGUMENTS, BM, HEAD_DIM_V, TEAM, WARPS, TEAMS * RING, SCALED>;
    static constexpr int Q_BYTES = QTile::bytes + (INTEGERS ? BM * HEAD_DIM : 0);
    static constexpr int SUM = Q_BYTES + TEAMS * RING, STATE = SUM + End::SUM_BYTES;
    static constexpr int LOOK_BYTES = 12;  // two lengths and a page that a thread looks at again
    static_assert(End::SUM_BYTES >= THREADS * LOOK_BYTES, "what is looked at again comes there");
};
