// Which output tile a block computes.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

struct Tile {
    int batch, head, q_tile;
};

// A tile of a head. Rank 0 is the longest where lengths differ.
struct Ranked {
    int head, rank;
};

// The i-th tile of all heads. Heads are taken in sections of `section_heads`, whose K and V mostly
// stay in L2. Inside a section, tiles of the same rank in different heads follow each other. The
// `late` highest ranks of all heads follow all sections. These tiles are short. They fill the gaps
// that the long tiles of the last section leave.
__device__ inline Ranked tile_in_order(int i, int heads, int tiles_of_head, int section_heads,
                                       int late) {
    int ranks = tiles_of_head - late, first_rank = 0;
    if (late > 0 && i >= heads * ranks)
        i -= heads * ranks, first_rank = ranks, ranks = late, section_heads = heads;
    const int section_tiles = section_heads * ranks;
    const int first_head = i / section_tiles * section_heads;
    const int heads_here = min(section_heads, heads - first_head);
    const int within = i % section_tiles, rank = within / heads_here;
    return {first_head + within - rank * heads_here, first_rank + rank};
}

// The i-th tile of rows. Where lengths differ (UNEVEN), the tile of the last rows is the longest.
template <bool UNEVEN>
__device__ Tile row_tile(const Params& p, int i) {
    const Ranked found =
        tile_in_order(i, p.heads, p.q_tiles, p.section_heads, UNEVEN ? p.late_rows : 0);
    const int q_tile = UNEVEN ? p.q_tiles - 1 - found.rank : found.rank;
    return {found.head / p.heads_q, found.head % p.heads_q, q_tile};
}

// The first row of this thread's warp, counted from the block's: ROW_WARPS warps share BM rows.
template <int BM, int ROW_WARPS>
__device__ int warp_row() {
    return thread_index() / 32 % ROW_WARPS * (BM / ROW_WARPS);
}
