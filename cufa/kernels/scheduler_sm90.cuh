// Which tiles a block of fa3_wgmma.cu computes one after the other, and how its warpgroups share
// the work.
#pragma once
#include "ptx_sm90.cuh"
#include "scheduler.cuh"
#include "score.cuh"

// The tile whose turn it is where heads come in the order of their sequences' first, all sequences'
// second, and so on.
__device__ inline Tile by_heads(const Params& p, const Tile& tile) {
    const int bh = tile.batch * p.heads_q + tile.head, sequences = p.heads / p.heads_q;
    return {bh % sequences, bh / sequences, tile.q_tile};
}

// The tile that follows `tile`, the round-th of a block. Where tiles differ in length, a block's
// first tile is its own number, and it draws later ones from a counter, one tile ahead: blocks with
// short tiles draw more. With few tiles the second is fixed, too, numbered backwards, so that the
// longest first tile goes with the shortest second: no first tile has ended when the second is
// asked for. The block that draws the last number resets the counter to 0.
template <bool UNEVEN>
__device__ int next_tile(const Params& p, int tile, int tiles, int round) {
    const int blocks = gridDim.x, own = tiles <= 3 * blocks ? 2 : 1;
    if (!UNEVEN) return tile + blocks;
    if (round + 1 < own) return 2 * blocks - 1 - tile;
    if (tiles <= own * blocks) return tiles;
    const int drawn = atomicAdd(p.tiles_drawn, 1);
    if (drawn == tiles - (own - 1) * blocks - 1) *p.tiles_drawn = 0;
    return drawn + own * blocks;
}

// Lengths of a tile's sequence and where it begins, if these are not the same for all.
template <bool ANY>
struct Lengths {
    Sequence sequence;

    __device__ Sequence lengths() const volatile {
        return {sequence.seq_q, sequence.seq_kv, sequence.first_q, sequence.first_k};
    }
    __device__ void set(const Sequence& s) volatile {
        sequence.seq_q = s.seq_q, sequence.seq_kv = s.seq_kv;
        sequence.first_q = s.first_q, sequence.first_k = s.first_k;
    }
};
template <>
struct Lengths<false> {};

// Which tiles of keys a tile visits, if a map says so.
template <bool BLOCKS>
struct VisitsOfTile {
    __device__ Visits<false> visits() const volatile { return {}; }
};
template <>
struct VisitsOfTile<true> {
    const int* entries;

    __device__ Visits<true> visits() const volatile { return {entries}; }
};

// A tile as the producer of fa3_wgmma hands it to the consumers, who are PARTS that visit different
// keys, or one. Later rows see no earlier keys: all of them together visit the tiles of keys from
// the first part's first to the last one's end.
template <int PARTS, bool LENGTHS, bool BLOCKS>
struct Work : Lengths<LENGTHS>, VisitsOfTile<BLOCKS> {
    int q0, head, batch;
    KeyTiles keys[PARTS];  // what each one's rows visit; none after the last tile

    __device__ int first() const volatile { return keys[0].first; }
    __device__ int end() const volatile { return keys[PARTS - 1].end; }
};

// The consumer warpgroups of a block take turns, in order, when ON.
template <int N, bool ON>
struct Turns {
    int mine;

    __device__ explicit Turns(int consumer) : mine(consumer) {
        if (consumer == N - 1) pass();
    }
    __device__ void wait() const {
        if constexpr (ON) named_barrier_sync(1 + mine, 256);
    }
    __device__ void pass() const {
        if constexpr (ON) named_barrier_arrive(1 + (mine + 1) % N, 256);
    }
};
