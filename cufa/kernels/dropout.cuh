// Dropout of the weights.
#pragma once
#include "part.cuh"
#include "philox.cuh"

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
