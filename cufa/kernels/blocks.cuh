// Which tiles of keys are visited, by the lists of a cufa.BlockMask.
#pragma once
#include "score_arrays.cuh"

// A tile of keys without a map: its number.
template <bool BLOCKS>
struct Visit {
    // Its number among all tiles of keys, and whether PAIRWISE parts may hide some pairs of it.
    __device__ static int tile(int number) { return number; }
    __device__ static bool is_partial() { return true; }
};
// With a map, an entry: twice the number, and 1 more if partial.
template <>
struct Visit<true> {
    int entry;

    __device__ int tile(int) const { return entry >> 1; }
    __device__ bool is_partial() const { return entry & 1; }
};

// The tiles of keys that a tile of rows visits, counted from the first one on: all of them,
template <bool BLOCKS>
struct Visits {
    __device__ static Visit<false> visit(int) { return {}; }
    __device__ static int tile(int number) { return number; }
};
// or those of a map.
template <>
struct Visits<true> {
    const int* entries;

    __device__ Visit<true> visit(int number) const { return {entries[number]}; }
    __device__ int tile(int number) const { return visit(number).tile(number); }
};

// A map's line for a tile of rows. It holds the number of visited tiles of keys before each tile,
// and before the end; then the visited tiles; and last a tile beyond all keys, for rows that visit
// none.
struct BlockLine {
    const int* line;
    int tiles;

    __device__ Visits<true> visits() const { return {line + tiles + 1}; }
    // Makes of tiles from `first` to `end` visits.
    __device__ void count(int& first, int& end) const {
        first = line[first], end = line[end];
        if (first >= end) first = tiles, end = tiles + 1;
    }
};

// Which tiles of keys are visited, a line for each tile of rows of (batch, heads).
struct Blocks : Part<Blocks> {
    static constexpr bool HAS_BLOCK_MAP = true;
    OfHeads<int> block_mask;
};
