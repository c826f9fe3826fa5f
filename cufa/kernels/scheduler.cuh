// Which output tile a block computes.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

struct Tile {
    int batch, head, q_tile;
};

// Heads are taken in sections of `section_heads`. Inside a section, tiles that share a row range of
// different heads follow each other; where their lengths are UNEVEN the longest rows (the last
// tiles) come first, so that the short ones fill the gaps at the end. A section's K and V stay in
// L2 while its tiles run.
template <bool UNEVEN>
__device__ Tile tile_of_block(const Params& p, int block) {
    const int section_tiles = p.section_heads * p.q_tiles;
    const int section = block / section_tiles;
    const int first_head = section * p.section_heads;
    const int heads = min(p.section_heads, p.heads - first_head);
    const int within = block - section * section_tiles;
    const int row = within / heads;
    const int bh = first_head + within - row * heads;
    return {bh / p.heads_q, bh % p.heads_q, UNEVEN ? p.q_tiles - 1 - row : row};
}

// The first row of this thread's warp, counted from the block's: ROW_WARPS warps share BM rows.
template <int BM, int ROW_WARPS>
__device__ int warp_row() {
    return thread_index() / 32 % ROW_WARPS * (BM / ROW_WARPS);
}
