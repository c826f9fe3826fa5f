// Which tiles of keys are visited, by the lists of a cufa.BlockMask.
#pragma once
#include "beside.cuh"

// The tiles of keys that a tile of rows visits are counted from the first one on: all of them,
template <bool BLOCKS>
struct Visits {
    // The number of one among all tiles of keys, and whether PAIRWISE parts may hide some pairs of it.
    __device__ static int tile(int visit) { return visit; }
    __device__ static bool is_partial(int visit) { return true; }
};
// or those of a line of a map: how many are visited before each of so many tiles, and before their end; then which they are,
// twice their number, and 1 more if partial; and at the end of the line a tile beyond all keys, for rows that visit none.
template <>
struct Visits<true> {
    const int* line;
    int tiles;

    __device__ int tile(int visit) const { return line[tiles + 1 + visit] >> 1; }
    __device__ bool is_partial(int visit) const { return line[tiles + 1 + visit] & 1; }
    // Makes of tiles from `first` to `end` visits.
    __device__ void count(int& first, int& end) const {
        first = line[first], end = line[end];
        if (first >= end) first = tiles, end = tiles + 1;
    }
};

// Which tiles of keys are visited, a line for each tile of rows of (batch, heads).
struct Blocks : Part<Blocks> {
    static constexpr bool BLOCKS = true, STEADY = false;
    OfHeads<int> block_mask;
};
