// Which keys each block of decode.cu reads. A unit is a sequence, a KV head and a tile of rows. The tiles of BN keys of all
// units, one unit after the other, are cut into equal shares, a block each: blocks end together whatever the lengths are, and
// a unit that is cut leaves a piece with each of its blocks. With `splits`, each unit is cut into that many pieces instead,
// which depend on its own length only.
#pragma once
#include "paged.cuh"

template <int BN>
struct Units {
    const DecodeParams& p;

    __device__ int of_sequence() const { return p.heads_kv * p.row_tiles; }
    __device__ int batch(int unit) const { return unit / of_sequence(); }
    // At least one, in which nothing is seen: a sequence without keys has outputs, too.
    __device__ int tiles_of(int batch) const { return max((sequence_of(p, batch).seq_kv + BN - 1) / BN, 1); }
    __device__ int tiles(int unit) const { return tiles_of(batch(unit)); }

    // Tiles of all units, in every lane of a warp.
    __device__ int total() const {
        if (!p.lengths) return tiles_of(0) * p.batch * of_sequence();
        int sum = 0;
        for (int b = threadIdx.x % 32; b < p.batch; b += 32) sum += tiles_of(b);
        return lanes_sum<32>(sum) * of_sequence();
    }
    // The unit that holds a tile of the list; the tile becomes one of the unit's.
    __device__ int find(int& tile) const {
        int batch = 0;
        if (!p.lengths) {
            batch = tile / (tiles_of(0) * of_sequence());
            tile -= batch * tiles_of(0) * of_sequence();
        } else {
            const int lane = threadIdx.x % 32;
            for (;; batch += 32) {
                const int mine = batch + lane < p.batch ? tiles_of(batch + lane) * of_sequence() : 0;
                int end = mine;  // of this lane's sequence, counted from the first lane's
#pragma unroll
                for (int i = 1; i < 32; i *= 2) {
                    const int of_other = __shfl_up_sync(0xffffffff, end, i);
                    if (lane >= i) end += of_other;
                }
                const uint32_t beyond = __ballot_sync(0xffffffff, end > tile);
                if (beyond || batch + 32 >= p.batch) {
                    const int found = beyond ? __ffs(beyond) - 1 : 31;
                    tile -= __shfl_sync(0xffffffff, end - mine, found);
                    batch += found;
                    break;
                }
                tile -= __shfl_sync(0xffffffff, end, 31);
            }
        }
        const int n = tiles_of(batch), unit = tile / n;
        tile -= unit * n;
        return batch * of_sequence() + unit;
    }
};

// The share of a block: `left` tiles from tile j of a unit on. And where pieces of the unit at hand are, which begins
// `behind` tiles before the share.
template <int BN>
struct Share {
    int unit, j, left;
    int begin, total, blocks;  // of the list of tiles, and those that have a share; not with splits

    __device__ Share(const Units<BN>& units, int block, int blocks) {
        if (units.p.splits) {
            unit = block / units.p.splits;
            const int n = units.tiles(unit), step = (n + units.p.splits - 1) / units.p.splits;
            j = min(block % units.p.splits * step, n), left = min(step, n - j);
            begin = total = this->blocks = 0;
        } else {
            total = units.total(), this->blocks = min(blocks, total);
            if (block >= this->blocks) {
                unit = j = begin = left = 0;
                return;
            }
            begin = first_of(block), left = first_of(block + 1) - begin;
            j = begin, unit = units.find(j);
        }
    }
    __device__ int first_of(int block) const {
        return static_cast<int>(static_cast<long long>(total) * block / blocks);
    }
    // The block whose share holds a tile of the list.
    __device__ int block_of(int tile) const {
        return static_cast<int>(((tile + 1ll) * blocks + total - 1) / total - 1);
    }
};
