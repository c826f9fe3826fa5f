// The constants and types of an instantiation of decode_block.cuh.
#pragma once
#include "decode_end.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "tile.cuh"

// With WHOLE, each block has a work item to itself: nothing is split, and nothing is merged.
// PRODUCTS says how many warps a team has, which share a ring and have as many rows each; what a
// thread does for what it has written to shared memory before others use that; and what S = Q K^T
// and O += P V of a warp are.
template <class PRODUCTS, class T_, int HEAD_DIM_, int HEAD_DIM_V_, int BM_, int BN_, int STAGES_,
          int WARPS_, bool UNIFIED_, bool WHOLE_, class SCORE, class KV_>
struct DecodeConfig {
    using Products = PRODUCTS;
    using T = T_;
    using Score = SCORE;
    using KV = KV_;
    using Arguments = DecodeArguments<SCORE, KV>;
    static constexpr int HEAD_DIM = HEAD_DIM_, HEAD_DIM_V = HEAD_DIM_V_;
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, WARPS = WARPS_;
    static constexpr bool UNIFIED = UNIFIED_, WHOLE = WHOLE_;

    static constexpr int THREADS = WARPS * 32;
    static constexpr int TEAM = Products::TEAM, TEAMS = WARPS / TEAM, TEAM_THREADS = TEAM * 32;
    static constexpr int WARP_ROWS = BM / TEAM;
    // Pieces of 16 rows, 8 keys and 8 columns.
    static constexpr int MT = WARP_ROWS / 16, NT = BN / 8, OT = HEAD_DIM_V / 8;
    using Q_Tile = SmemTile<BM, HEAD_DIM, sizeof(T)>;
    using K_Tile = SmemTile<BN, HEAD_DIM, sizeof(T)>;
    using V_Tile = SmemTile<BN, HEAD_DIM_V, sizeof(T)>;
    // With one stage, a tile's K is asked for while V of the one before is taken, and all teams ask
    // at once: memory reads what lies together a little faster, if little else comes in between.
    static constexpr bool TOGETHER = STAGES == 1;
    // float32 products leave O's columns in another order, and need m in the units of S, see
    // products_fp32.cuh and softmax.cuh.
    static constexpr bool FP32 = sizeof(T) == 4;
    static_assert(!UNIFIED || (TEAM == 1 && !FP32),
                  "a warp decides alone, on sums of P of 16 bits");

    using Item = WorkItem<Arguments, BN>;
    using Tiles = BlockTiles<Arguments, BN, TEAMS, WHOLE>;
    using Softmax = OnlineSoftmax<MT, FP32>;
    using Results = SplitResults<HEAD_DIM_V>;
    // Shared memory: Q, a ring for each team, and then what the end of an item needs.
    static constexpr int RING = STAGES * (K_Tile::bytes + V_Tile::bytes);
    using End = ItemEnd<T, Softmax, Arguments, BM, HEAD_DIM_V, TEAM, WARPS, TEAMS * RING>;
    static constexpr int SUM = Q_Tile::bytes + TEAMS * RING, STATE = SUM + End::SUM_BYTES;

    static __device__ int lane() { return threadIdx.x % 32; }
    static __device__ int warp() { return __shfl_sync(0xffffffff, threadIdx.x / 32, 0); }
    static __device__ void team_sync(int team) {
        if constexpr (TEAM == 1)
            __syncwarp();
        else
            named_barrier_sync(1 + team, TEAM_THREADS);
    }
};
