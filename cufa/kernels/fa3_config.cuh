// Constants of fa3_wgmma.cu: what follows from its template arguments, and how shared memory is
// laid out. cufa/specs/fa3_wgmma.py computes the same sizes.
#pragma once
#include "kv.cuh"
#include "pair_tiles_sm90.cuh"
#include "scheduler_sm90.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

// Registers of a thread: at launch, at most, and after the producer has left most of its own to the
// consumers. It can do with 32, and keeps up to 40 where theirs, a multiple of 8, leave some.
template <int CONSUMERS, int THREADS>
struct Registers {
    static constexpr int AT_LAUNCH = 65536 / THREADS / 8 * 8, ALL = AT_LAUNCH * (CONSUMERS + 1);
    static constexpr int SHARE = (ALL - 32) / CONSUMERS / 8 * 8;
    static constexpr int CONSUMER = SHARE < 240 ? SHARE : 240, REST = ALL - CONSUMER * CONSUMERS;
    static constexpr int PRODUCER = REST < 40 ? REST : 40;
};

// Tiles in shared memory: slots of Q, rings of K and V, what each warp reads of biases and masks,
// barriers, and the tiles of rows that are under way. O leaves through the slot that its Q came in:
// a warp reads and writes 16 rows of it, which are its own.
template <int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int BLOCKS_PER_SM, class PAIRS>
struct Layout {
    using QTile = WgmmaTile<BM, HEAD_DIM>;
    using KTile = WgmmaTile<BN, HEAD_DIM>;
    using VTile = WgmmaTile<BN, HEAD_DIM_V>;
    using OTile = WgmmaTile<BM, HEAD_DIM_V>;
    static constexpr int SLOT_BYTES = QTile::bytes > OTile::bytes ? QTile::bytes : OTile::bytes;
    static constexpr int RING_BYTES = STAGES * (KTile::bytes + VTile::bytes);
    static constexpr int PAIR_BYTES = BM / 16 * PAIRS::BYTES;
    __device__ static constexpr bool fits(
        int slots) {  // with what the system and the barriers take
        const int bytes = slots * SLOT_BYTES + RING_BYTES + PAIR_BYTES + 1024;
        return bytes * BLOCKS_PER_SM <= 227 * 1024;
    }
    // Up to three slots: with several, the next Q comes early.
    static constexpr int Q_STAGES = fits(3) ? 3 : fits(2) ? 2 : 1;
    // Where each part begins.
    static constexpr int K = Q_STAGES * SLOT_BYTES, V = K + STAGES * KTile::bytes;
    static constexpr int PAIR_TILES = K + RING_BYTES, BARRIERS = PAIR_TILES + PAIR_BYTES;
    static constexpr int WORK = BARRIERS + 16 * Q_STAGES + 32 * STAGES;
};

template <class T_, int HEAD_DIM_, int HEAD_DIM_V_, int BM_, int BN_, int STAGES_, int WARPS,
          int BLOCKS_PER_SM, bool PING_PONG_, class SCORE_, class KV_>
struct Config
    : Layout<HEAD_DIM_, HEAD_DIM_V_, BM_, BN_, STAGES_, BLOCKS_PER_SM, PairTiles<SCORE_, BN_>> {
    using T = T_;
    using SCORE = SCORE_;
    using KV = KV_;
    using Pairs = PairTiles<SCORE, BN_>;  // a warp's, of biases and masks
    using Shared = Layout<HEAD_DIM_, HEAD_DIM_V_, BM_, BN_, STAGES_, BLOCKS_PER_SM, Pairs>;
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, CONSUMERS = BM / 64;  // warpgroups
    static constexpr bool PING_PONG = PING_PONG_;
    static constexpr int HEAD_DIM = HEAD_DIM_, HEAD_DIM_V = HEAD_DIM_V_;
    static constexpr int NT = BN / 8, OT = HEAD_DIM_V / 8;  // 8-column pieces of S and of O
    using RegistersOf = Registers<CONSUMERS, WARPS * 32 * BLOCKS_PER_SM>;
    static_assert(WARPS == 4 * (CONSUMERS + 1), "a producer and BM / 64 consumers");
    static_assert(!Pairs::BYTES || !SCORE::FIRST_TILE_BOUNDS_MAX,
                  "biases and masks are read once: scores must not be computed once more");

    // Row maxima can be done without where a row's first scores tell about the others, and tilts
    // rise by less than STEEP_LOG2 from tile to tile.
    static constexpr bool UNCHECKED = SCORE::FIRST_TILE_BOUNDS_MAX;
    static constexpr float STEEP_LOG2 = 60.f;
    // Whether tiles of rows visit different keys, and whether their consumers do, each for itself:
    // where edges jump, one might skip more tiles than there are stages.
    static constexpr bool UNEVEN = SCORE::LEFT_EDGE || SCORE::RIGHT_EDGE || SCORE::HAS_BLOCK_MAP;
    static constexpr bool APART = UNEVEN && !SCORE::HAS_BLOCK_MAP && !SCORE::JUMPS;
    static constexpr int PARTS = APART ? CONSUMERS : 1;
    // Whether some tiles of rows do not begin with the first keys.
    static constexpr bool FIRST = SCORE::LEFT_EDGE || SCORE::HAS_BLOCK_MAP;
    // Keys may be masked for all rows of a consumer, if not for all of another's: it skips them.
    // With more than one slot of Q it still holds the last V of the tile before.
    static constexpr bool SKIPS = APART && CONSUMERS > 1;
    static constexpr int EDGES = SCORE::LEFT_EDGE + SCORE::RIGHT_EDGE;
    static_assert(!SKIPS || EDGES * ((BM - 64 + BN - 1) / BN) <= STAGES,
                  "as many stages as tiles of keys that are skipped");

    // With fewer than three slots, one is free when the last S has been computed, and O is written
    // from registers, if there are enough: else the next Q but one would wait for it. O is then
    // written after the next Q has come, or two more: so long a tile's Work is kept.
    static constexpr bool O_FROM_REGISTERS =
        Shared::Q_STAGES == 1 || (Shared::Q_STAGES == 2 && CONSUMERS < 3);
    static constexpr int WORK_STAGES = Shared::Q_STAGES * (O_FROM_REGISTERS ? 2 : 1);
    // Whether the first S of a tile is computed together with the last O of the one before.
    static constexpr bool ACROSS = Shared::Q_STAGES > 1;
    using Work = ::Work<PARTS, KV::TAILS, SCORE::HAS_BLOCK_MAP>;
};
