// Which keys each block of decode.cu reads. A unit is a sequence, a KV head and a tile of rows. The tiles of BN keys of all
// units, one unit after the other, are cut into equal shares, a block each: blocks end together whatever the lengths are, and
// a unit that is cut leaves a piece with each of its blocks. With `splits`, each unit is cut into that many pieces instead,
// which depend on its own length only.
#pragma once
#include "paged.cuh"

// A unit, and where its tiles lie in a block's share: from `zero` on, which is less than 0 if it began before. A sequence
// without keys has a tile, too, in which nothing is seen: it has outputs.
template <int BN>
struct Unit {
    int batch, index;  // of a sequence's units
    int zero, tiles;

    __device__ int end() const { return zero + tiles; }
    __device__ void next(const DecodeParams& p) {
        zero += tiles;
        if (++index == p.heads_kv * p.row_tiles.divisor) index = 0, tiles = tiles_of(p, ++batch);
    }
    __device__ int kv_head(const DecodeParams& p) const { return p.row_tiles.quotient(index); }
    __device__ int row_tile(const DecodeParams& p) const { return p.row_tiles.remainder(index); }

    static __device__ int tiles_of(const DecodeParams& p, int batch) {
        return max((sequence_of(p, batch).seq_kv + BN - 1) / BN, 1);
    }
};

// The share of a block: `count` tiles, the first of which belongs to `unit`.
template <int BN>
struct Share {
    Unit<BN> unit;
    int count;
    int first, each, more;  // of the list; `more` of the blocks have one tile more than `each`; not with splits

    __device__ Share(const DecodeParams& p, int block, int blocks) {
        const int of_sequence = p.heads_kv * p.row_tiles.divisor, lane = threadIdx.x % 32;
        if (p.splits) {
            const int number = block / p.splits, part = block % p.splits;
            unit.batch = number / of_sequence, unit.index = number % of_sequence;
            unit.tiles = Unit<BN>::tiles_of(p, unit.batch);
            const int step = (unit.tiles + p.splits - 1) / p.splits;
            unit.zero = -min(part * step, unit.tiles), count = min(step, unit.end());
            first = each = more = 0;
            return;
        }
        int total = 0;
        if (!p.lengths) {
            total = Unit<BN>::tiles_of(p, 0) * p.batch;
        } else {
#pragma unroll 1
            for (int batch = lane; batch < p.batch; batch += 32) total += Unit<BN>::tiles_of(p, batch);
            total = lanes_sum<32>(total);
        }
        total *= of_sequence;
        each = total / blocks, more = total % blocks;
        first = block * each + min(block, more), count = each + (block < more);
        if (count == 0) return;
        int tile = first;
        if (!p.lengths) {
            unit.tiles = Unit<BN>::tiles_of(p, 0), unit.batch = tile / (unit.tiles * of_sequence);
            tile -= unit.batch * unit.tiles * of_sequence;
        } else {
#pragma unroll 1
            for (unit.batch = 0;; unit.batch += 32) {  // 32 sequences at a time
                const int mine = unit.batch + lane < p.batch ? Unit<BN>::tiles_of(p, unit.batch + lane) * of_sequence : 0;
                int end = mine;
#pragma unroll
                for (int i = 1; i < 32; i *= 2) {
                    const int of_other = __shfl_up_sync(0xffffffff, end, i);
                    if (lane >= i) end += of_other;
                }
                const uint32_t beyond = __ballot_sync(0xffffffff, end > tile);
                if (beyond) {
                    const int found = __ffs(beyond) - 1;
                    tile -= __shfl_sync(0xffffffff, end - mine, found);
                    unit.batch += found;
                    break;
                }
                tile -= __shfl_sync(0xffffffff, end, 31);
            }
            unit.tiles = Unit<BN>::tiles_of(p, unit.batch);
        }
        unit.index = tile / unit.tiles;
        unit.zero = unit.index * unit.tiles - tile;
    }

    // The blocks that have pieces of a unit of this share: from `begin` to the one before `end`.
    struct Pieces {
        int begin, end;
    };
    __device__ Pieces pieces(const DecodeParams& p, const Unit<BN>& unit, int block) const {
        if (p.splits) {
            const int begin = block - block % p.splits, step = (unit.tiles + p.splits - 1) / p.splits;
            return {begin, begin + (unit.tiles + step - 1) / step};
        }
        if (unit.zero >= 0 && unit.end() <= count) return {block, block + 1};
        return {block_of(first + unit.zero), block_of(first + unit.end() - 1) + 1};
    }

 private:
    __device__ int block_of(int tile) const {
        const int larger = more * (each + 1);  // the tiles of the blocks that have one more
        return tile < larger ? tile / (each + 1) : more + (tile - larger) / each;
    }
};
