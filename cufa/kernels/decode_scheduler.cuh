// Which keys each block of decode.cu reads. A unit is a sequence, a KV head and a tile of rows. The tiles of BN keys of all
// units, one unit after the other, are cut into equal shares, a block each: blocks end together whatever the lengths are, and
// a unit that is cut leaves a piece with each of its blocks. Where lengths differ little, all units are cut into equally
// many pieces instead, a block each, and so they are with `splits`, where pieces depend on the own length only.
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

// The rows of a unit's tile: those of the heads that share the KV head, query by query.
struct UnitRows {
    int batch, first_head, first, rows;

    template <int BN>
    __device__ UnitRows(const DecodeParams& p, const Unit<BN>& unit, int bm)
        : batch(unit.batch), first_head(unit.kv_head(p) * p.group.divisor), first(unit.row_tile(p) * bm),
          rows(min(p.group.divisor * p.seq_q - first, bm)) {}
    __device__ int query(const DecodeParams& p, int row) const { return p.group.quotient(first + row); }
    __device__ int head(const DecodeParams& p, int row) const { return first_head + p.group.remainder(first + row); }
    template <class T>
    __device__ T* of(const DecodeParams& p, const Tensor& t, int row) const {
        return head_ptr<T>(t, batch, head(p, row)) + query(p, row) * t.stride_seq;
    }
};

// The share of a block: `count` tiles, the first of which belongs to `unit`.
template <int BN>
struct Share {
    Unit<BN> unit;
    int count;

    __device__ Share(const DecodeParams& p, int block, int blocks) : splits(p.splits) {
        const uint32_t of_sequence = p.heads_kv * p.row_tiles.divisor, units = p.batch * of_sequence;
        const int lane = threadIdx.x % 32;
        uint32_t total = Unit<BN>::tiles_of(p, 0), longest = total;
        if (!splits && p.lengths) {
            total = longest = 0;
#pragma unroll 4
            for (int batch = lane; batch < p.batch; batch += 32) {
                const uint32_t tiles = Unit<BN>::tiles_of(p, batch);
                total += tiles, longest = max(longest, tiles);
            }
            total = __reduce_add_sync(0xffffffff, total), longest = __reduce_max_sync(0xffffffff, longest);
        } else {
            total *= p.batch;
        }
        total *= of_sequence;
        each = total / blocks, more = total % blocks;
        // Equal parts of each unit, where that takes hardly longer than equal shares of all: two pieces a block take longer.
        if (!splits && units <= blocks) {
            const uint32_t parts = blocks / units;
            if ((longest + parts - 1) / parts <= each + each / 32 + 8) splits = parts;
        }
        if (splits) {
            const uint32_t number = uint32_t(block) / splits, part = block - number * splits;
            if (number >= units) {
                count = 0;
                return;
            }
            unit.batch = number / of_sequence, unit.index = number - unit.batch * of_sequence;
            unit.tiles = Unit<BN>::tiles_of(p, unit.batch);
            const int step = (uint32_t(unit.tiles) + splits - 1) / splits;
            unit.zero = -min(int(part) * step, unit.tiles), count = min(step, unit.end());
            return;
        }
        first = block * each + min(block, more), count = each + (block < more);
        if (count == 0) return;
        uint32_t tile = first;
        if (!p.lengths) {
            unit.tiles = longest, unit.batch = tile / (longest * of_sequence);
            tile -= unit.batch * longest * of_sequence;
        } else {
#pragma unroll 1
            for (unit.batch = 0;; unit.batch += 32) {  // 32 sequences at a time
                const uint32_t mine =
                    unit.batch + lane < p.batch ? Unit<BN>::tiles_of(p, unit.batch + lane) * of_sequence : 0;
                uint32_t end = mine;
#pragma unroll
                for (int i = 1; i < 32; i *= 2) {
                    const uint32_t of_other = __shfl_up_sync(0xffffffff, end, i);
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
    __device__ Pieces pieces(const Unit<BN>& unit, int block) const {
        if (splits) {
            const uint32_t tiles = unit.tiles, step = (tiles + splits - 1) / splits;
            const int begin = block - uint32_t(block) % splits;
            return {begin, begin + int((tiles + step - 1) / step)};
        }
        if (unit.zero >= 0 && unit.end() <= count) return {block, block + 1};
        return {block_of(first + unit.zero), block_of(first + unit.end() - 1) + 1};
    }

 private:
    uint32_t splits;            // parts of every unit, or 0
    uint32_t first, each;       // tile of the list; tiles of a share, without the one more of the first blocks
    int more;                   // how many blocks have it

    __device__ int block_of(uint32_t tile) const {
        const uint32_t larger = more * (each + 1);
        return tile < larger ? tile / (each + 1) : more + (tile - larger) / each;
    }
};
