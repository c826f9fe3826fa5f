// Dropout of the weights.
#pragma once
#include "part.cuh"
#include "philox.cuh"

// Weights are dropped at random and the others grow by 1 / keep (Dao et al. 2022, algorithm 2), by
// the bits of a counter that names the batch, the head, the query and sixteen keys' pairs: those of
// a lane, whatever the tiles are.
struct Dropout : Part<Dropout> {
    static constexpr bool DROPS_WEIGHTS = true, ENDS_ROWS = true;
    uint64_t dropout_seed;
    uint32_t dropout_threshold;  // of 32 bits, those that are less drop a weight
    float dropout_keep;

    __device__ void dropped(bool (&drops)[4], int batch, int head, int query, int key) const {
        uint32_t words[4] = {static_cast<uint32_t>(key >> 4 << 2 | (key >> 1 & 3)),
                             static_cast<uint32_t>(query), static_cast<uint32_t>(head),
                             static_cast<uint32_t>(batch)};
        philox(words, dropout_seed);
#pragma unroll
        for (int i = 0; i < 4; ++i) drops[i] = words[i] < dropout_threshold;
    }
    __device__ void end_row(float& divisor, float& lse, int head) const { divisor *= dropout_keep; }
};
