// Which keys each block of decode.cu reads: splits of work items. There are two ways to divide the work.
// With `splits`, each item is cut into so many equal splits, a block each. They depend on the item's own length only.
// Without, the tiles of BN keys that all items visit, one item after the other, are cut into equal ranges, a block each, in which
// the end of an item counts as some tiles. So blocks end together whatever the lengths are, and a block may have splits of several
// items. If all lengths are equal, and blocks a multiple of items, both ways give the same splits.
#pragma once
#include "decode_item.cuh"

// The tiles of a block of so many teams: `count`, the first of which belongs to `item`; with WHOLE, all of that item's.
template <class ARGUMENTS, int BN, int TEAMS, bool WHOLE>
struct BlockTiles {
    using Item = WorkItem<ARGUMENTS, BN>;

    Item item{};
    int count = 0;

    __device__ void find(const ARGUMENTS& p, int block) {
        if (WHOLE || p.splits)
            find_split(p, block);
        else
            find_range(p, block);
    }

    // The blocks that have splits of an item of this block.
    __device__ Splits splits_of(const DecodeParams& p, const Item& item, int block) const {
        if constexpr (WHOLE) return {block, block + 1};
        if (p.splits) {
            const int begin = block - uint32_t(block) % uint32_t(p.splits);
            return {begin, begin + divided_up(item.tiles, step_of(p, item.tiles))};
        }
        if (item.begin() >= 0 && item.end() <= count) return {block, block + 1};
        const int begin = first + item.begin() + (item.batch * p.items.divisor + item.index - first_item) * ends;
        return {block_of(begin), block_of(begin + item.tiles - 1) + 1};
    }

 private:
    // Of equal ranges. A place is a tile, or one of the `ends` that each item has behind its tiles.
    int ends = 0;
    int places = 0, ranges = 0;
    int first = 0, first_item = 0;  // the block's first place, and the number of its item

    static __device__ int divided_up(int n, int by) { return uint32_t(n + by - 1) / uint32_t(by); }
    static __device__ int step_of(const DecodeParams& p, int tiles) { return divided_up(tiles, p.splits); }

    __device__ void find_split(const ARGUMENTS& p, int block) {
        const int number = WHOLE ? block : uint32_t(block) / uint32_t(p.splits);
        item.batch = p.items.quotient(number), item.index = p.items.remainder(number);
        item.set_keys(p, keys_of(p, item.batch));
        const int step = WHOLE ? item.tiles : step_of(p, item.tiles), split = WHOLE ? 0 : block - number * p.splits;
        item.begin_at(-min(split * step, item.tiles)), count = min(step, item.end());
    }

    __device__ void find_range(const ARGUMENTS& p, int block) {
        int tiles = 0, longest = 0;  // of all sequences
#pragma unroll 4
        for (int batch = threadIdx.x % 32; batch < p.batch; batch += 32) {
            const int of_one = Item::tiles_of(p, keys_of(p, batch));
            tiles += of_one, longest = max(longest, of_one);
        }
        tiles = __reduce_add_sync(0xffffffff, tiles), longest = __reduce_max_sync(0xffffffff, longest);
        // No range has the end of an item within it if lengths are equal, and all items have as many ranges.
        const int items = p.batch * p.items.divisor, blocks = gridDim.x;
        const bool aligned = tiles == longest * p.batch && uint32_t(blocks) % uint32_t(items) == 0;
        ends = aligned ? 0 : p.ends, places = (tiles + ends * p.batch) * p.items.divisor;
        // Each team has a tile: more splits take longer to merge.
        ranges = min(blocks, aligned ? items * divided_up(longest, TEAMS) : max(places / TEAMS, 1));
        if (block >= ranges) return;
        first = begin_of(block);
        // The end of the block's range, and then its beginning: of which item they are, at which of its tiles, and how many there are
        // before
        int at = begin_of(block + 1), tile;
#pragma unroll 1
        for (bool is_begin = false;; is_begin = true, at = first) {
            const OfSequence its = OfSequence::find(p.batch, at, [&](int batch) {
                return (Item::tiles_of(p, keys_of(p, batch)) + ends) * p.items.divisor;
            });
            const int of_item = max(p.items.quotient(its.all), ends + 1), index = uint32_t(its.i) / uint32_t(of_item);
            first_item = its.sequence * p.items.divisor + index, tile = its.i - index * of_item;
            const int beyond = tile - (of_item - ends), before = at - first_item * ends - max(beyond, 0);
            if (!is_begin) {
                count = before;
                continue;
            }
            count -= before;
            if (count <= 0) return;
            if (beyond >= 0) first += of_item - tile, ++first_item, tile = 0;
            break;
        }
        item.batch = p.items.quotient(first_item), item.index = p.items.remainder(first_item);
        item.set_keys(p, keys_of(p, item.batch)), item.begin_at(-tile);
    }

    // The first place of a range, rounded down: places * range / ranges.
    __device__ int begin_of(int range) const {
        const uint32_t each = uint32_t(places) / uint32_t(ranges), more = places - each * ranges;
        return range * each + range * more / uint32_t(ranges);
    }
    // The range that has a place: float32 is right to one of them.
    __device__ int block_of(int place) const {
        int range = min(int(float(place) * (float(ranges) / float(places))), ranges - 1);
        while (begin_of(range) > place) --range;
        while (begin_of(range + 1) <= place) ++range;
        return range;
    }
};
