// The unit of decode.cu's work: a sequence, a KV head and a tile of rows.
#pragma once
#include "decode_params.cuh"
#include "paged.cuh"

// A unit, and where its tiles lie in a block's share: from `begin` on, which is less than 0 if it
// began before. Tiles in front of a window do not belong to the unit. A sequence without keys has a
// tile, too, in which nothing is seen, since it has outputs.
template <class ARGUMENTS, int BN>
struct Unit {
    int batch, index;      // of a sequence's units
    int keys, keys_next;   // of the sequence, and of the next one, fetched ahead
    int zero;              // where the sequence's first tile is, or would be
    int first = 0, tiles;  // that it visits

    __device__ int begin() const { return zero + first; }
    __device__ int end() const { return begin() + tiles; }
    __device__ void begin_at(int place) { zero = place - first; }
    __device__ void next(const ARGUMENTS& p) {
        const int place = end();
        // Not beyond the last sequence, even if lengths change between two looks at them, before
        // the kernel in front has ended
        if (++index == p.units.divisor)
            index = 0, batch = min(batch + 1, p.batch - 1), set_keys(p, keys_next), look_ahead(p);
        begin_at(place);
    }
    __device__ void look_ahead(const DecodeParams& p) {
        keys_next = keys_of(p, min(batch + 1, p.batch - 1));
    }
    __device__ int kv_head(const DecodeParams& p) const { return p.row_tiles.quotient(index); }
    __device__ int row_tile(const DecodeParams& p) const { return p.row_tiles.remainder(index); }
    __device__ void set_keys(const ARGUMENTS& p, int n) {
        keys = n, first = first_of(p, n), tiles = tiles_of(p, n);
    }
    __device__ int first_key(const ARGUMENTS& p) const { return first_key_of(p, keys); }
    // Whether it visits the same tiles if the sequence has `n` keys.
    __device__ bool is_same_with(const ARGUMENTS& p, int n) const {
        return tiles_of(p, n) == tiles && first_of(p, n) == first;
    }

    static __device__ int tiles_of(const ARGUMENTS& p, int keys) {
        return max((static_cast<uint32_t>(keys) + BN - 1) / BN, 1u) - first_of(p, keys);
    }
    static __device__ int first_of(const ARGUMENTS& p, int keys) {
        return ARGUMENTS::LEFT_EDGE ? max(0, min(first_key_of(p, keys), keys - 1)) / BN : 0;
    }
    // The first key that the first query sees: no query sees one before it.
    static __device__ int first_key_of(const ARGUMENTS& p, int keys) {
        return p.sees(Sequence{p.seq_q, keys}, 0).first;
    }
};

// The rows of a unit's tile: those of the heads that share the KV head, query by query.
struct UnitRows {
    int batch, first_head, first, rows;

    template <class ARGUMENTS, int BN>
    __device__ UnitRows(const DecodeParams& p, const Unit<ARGUMENTS, BN>& unit, int bm)
        : batch(unit.batch),
          first_head(unit.kv_head(p) * p.group.divisor),
          first(unit.row_tile(p) * bm),
          rows(min(p.group.divisor * p.seq_q - first, bm)) {}
    __device__ int query(const DecodeParams& p, int row) const {
        return p.group.quotient(first + row);
    }
    __device__ int head(const DecodeParams& p, int row) const {
        return first_head + p.group.remainder(first + row);
    }
    template <class T>
    __device__ T* of(const DecodeParams& p, const Tensor& t, int row) const {
        return head_ptr<T>(t, batch, head(p, row)) + query(p, row) * t.stride_seq;
    }
};

// The blocks that have pieces of a unit: from `begin` to the one before `end`.
struct Pieces {
    int begin, end;

    __device__ bool one() const { return end - begin == 1; }
};

// The sum of what this lane and those before it have.
__device__ inline int lanes_end(int own) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const int of_other = __shfl_up_sync(0xffffffff, own, i);
        if (threadIdx.x % 32 >= i) own += of_other;
    }
    return own;
}

// An element of a ragged list, in which each sequence has some.
struct OfSequence {
    int sequence, i, all;  // its sequence, its number there, and how many there are

    // Returns the sequence of element `i`, and its number there; `of` says how many elements a
    // lane's sequence has. Beyond the last element, the sequence is the number of sequences.
    template <class Of>
    static __device__ OfSequence find(int batch, int i, Of of) {
#pragma unroll 1
        for (int first = 0; first < batch; first += 32) {  // 32 sequences at a time
            const int other = first + threadIdx.x % 32, own = other < batch ? of(other) : 0,
                      end = lanes_end(own);
            const uint32_t beyond = __ballot_sync(0xffffffff, end > i);
            if (beyond) {
                const int found = __ffs(beyond) - 1;
                return {first + found, i - __shfl_sync(0xffffffff, end - own, found),
                        __shfl_sync(0xffffffff, own, found)};
            }
            i -= __shfl_sync(0xffffffff, end, 31);
        }
        return {batch, i, 0};
    }
};
