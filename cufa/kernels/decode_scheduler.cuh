// Which keys each block of decode.cu reads: splits of work items. There are two ways to divide the
// work. Each item has as many equal splits, a block each. Or the tiles of BN keys that all items
// visit, one item after the other, are cut into equal ranges, a block each, in which the end of an
// item counts as some tiles: blocks end together whatever the lengths are, and a block may have
// splits of several items. With a number of splits, which depend on the own length only, and where
// lengths differ little, splits are equal.
#pragma once
#include "decode_item.cuh"

// Tiles of all sequences together, and of the longest, for one KV head and tile of rows.
struct TileCount {
    int all = 0, longest = 0;

    __device__ void add(int tiles) { all += tiles, longest = max(longest, tiles); }
    // Adds up those of a warp's lanes.
    __device__ void add_lanes() {
        all = __reduce_add_sync(0xffffffff, all);
        longest = __reduce_max_sync(0xffffffff, longest);
    }
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

// The tiles of a block of so many teams: `count`, the first of which belongs to `item`; with WHOLE,
// all of that item's.
template <class ARGUMENTS, int BN, int TEAMS, bool WHOLE>
struct BlockTiles {
    using Item = WorkItem<ARGUMENTS, BN>;

    Lengths<WHOLE> lengths;  // to be looked at before tiles are found
    Item item{};
    int count = 0;
    bool equal = WHOLE;  // whether items have equal splits

    // Before the kernel in front has ended, not all lengths of many sequences are looked up: the
    // tiles are those if all are as long as the block's own, and none if splits are not equal then.
    __device__ void find(const ARGUMENTS& p, int block, bool ended) {
        count = 0, item = Item{};
        const int number = WHOLE ? block : p.splits.quotient(block);
        split = block - number * p.splits.divisor;
        item.batch = min(p.items.quotient(number), p.batch - 1);
        item.index = p.items.remainder(number), item.set_keys(p, lengths.keys_ahead(p, item.batch));
        if constexpr (WHOLE) {
            item.begin_at(0), count = item.tiles;
            return;
        }
        const bool all_known = lengths.few || ended;
        TileCount tiles{item.tiles * p.batch, item.tiles};
        if (p.spread && p.lengths && all_known) tiles = tiles_of_all(p);
        equal = has_equal_splits(p, tiles);
        if (equal && number < p.batch * p.items.divisor) {
            const int step = step_of(p, item.tiles);
            item.begin_at(-min(split * step, item.tiles)), count = min(step, item.end());
        } else {
            item = Item{};
            if (!equal && all_known) find_range(p, block, tiles);
        }
    }
    __device__ TileCount tiles_of_all(const ARGUMENTS& p) const {
        TileCount tiles;
#pragma unroll 4
        for (int batch = threadIdx.x % 32; batch < p.batch; batch += 32)
            tiles.add(tiles_of_one(p, batch));
        tiles.add_lanes();
        return tiles;
    }
    // Whether items have equal splits. A block with a range of two items has one end more than one
    // with a split, and, if items are whole else, a merge, which takes half as long. Where blocks
    // follow each other, the longest item may have more, for others fill the time.
    static __device__ bool has_equal_splits(const DecodeParams& p, const TileCount& tiles) {
        if (WHOLE || !p.spread) return true;
        const int each = uint32_t(tiles.all * p.items.divisor) / gridDim.x;
        const long long longer = static_cast<long long>(each) * p.spread / 8;
        const int most = int(longer) + (p.splits.divisor == 1 ? p.ends * 3 / 2 : p.ends);
        return p.batch * p.items.divisor <= gridDim.x && step_of(p, tiles.longest) <= most;
    }
    // The blocks that have splits of an item of this block.
    __device__ Splits splits_of(const DecodeParams& p, const Item& its, int block) const {
        if constexpr (WHOLE) return {block, block + 1};
        if (equal) {
            const uint32_t tiles = its.tiles, step = step_of(p, tiles);
            return {block - split, block - split + int((tiles + step - 1) / step)};
        }
        if (its.begin() >= 0 && its.end() <= count) return {block, block + 1};
        const int begin =
            first + its.begin() + (its.batch * p.items.divisor + its.index - first_item) * p.ends;
        return {block_of(begin), block_of(begin + its.tiles - 1) + 1};
    }

 private:
    int split = 0;  // the block's, of equal ones
    // Of equal ranges. A place is a tile, or one of the `ends` that each item has behind its tiles.
    int first = 0, each = 0;  // the block's first place, and how many it has, but for one more that
    int more = 0;             // so many blocks have
    int first_item = 0;       // the number of the first place's item

    // Tiles of an equal split. Without a number of splits, each team has one, if there are any:
    // more splits take longer to merge.
    static __device__ int step_of(const DecodeParams& p, int tiles) {
        return max(p.splits.quotient(tiles + p.splits.divisor - 1), p.spread ? TEAMS : 1);
    }
    __device__ int block_of(int place) const {
        const int larger = more * (each + 1);
        return place < larger ? uint32_t(place) / uint32_t(each + 1)
                              : more + uint32_t(place - larger) / uint32_t(each);
    }
    // Of a sequence that this lane looks at; 0 beyond the last.
    __device__ int tiles_of_one(const ARGUMENTS& p, int batch) const {
        if (batch >= p.batch) return 0;
        return Item::tiles_of(p,
                              lengths.few ? lengths.of_lane : keys_of_length(p, p.lengths[batch]));
    }
    // The number of a sequence, and of one of its places.
    struct OfSequence {
        int sequence, place, places;  // how many it has
    };
    // Those of a place of all. If there are no more, the sequence is that beyond all.
    __device__ OfSequence find_sequence(const ARGUMENTS& p, int place,
                                        const TileCount& tiles) const {
        if (tiles.all == tiles.longest * p.batch) {
            const int places = (tiles.longest + p.ends) * p.items.divisor;
            const int sequence = uint32_t(place) / uint32_t(places);
            return {sequence, place - sequence * places, places};
        }
#pragma unroll 1
        for (int begin = 0; begin < p.batch; begin += 32) {  // 32 sequences at a time
            const int batch = begin + threadIdx.x % 32, its = tiles_of_one(p, batch);
            const int own = its ? (its + p.ends) * p.items.divisor : 0, end = lanes_end(own);
            const uint32_t beyond = __ballot_sync(0xffffffff, end > place);
            if (beyond) {
                const int found = __ffs(beyond) - 1;
                return {begin + found, place - __shfl_sync(0xffffffff, end - own, found),
                        __shfl_sync(0xffffffff, own, found)};
            }
            place -= __shfl_sync(0xffffffff, end, 31);
        }
        return {p.batch, place, 0};
    }
    __device__ void find_range(const ARGUMENTS& p, int block, const TileCount& tiles) {
        const int places = (tiles.all + p.ends * p.batch) * p.items.divisor;
        each = uint32_t(places) / gridDim.x, more = places - each * gridDim.x;
        first = block * each + min(block, more);
        // The end of the range, and then its beginning: of which item they are, at which of its
        // places, and how many tiles there are before.
        int at = first + each + (block < more), tile;
#pragma unroll 1
        for (bool is_begin = false;; is_begin = true, at = first) {
            const OfSequence its = find_sequence(p, at, tiles);
            const int of_item = max(p.items.quotient(its.places), p.ends + 1),
                      index = uint32_t(its.place) / uint32_t(of_item);
            first_item = its.sequence * p.items.divisor + index;
            tile = its.place - index * of_item;
            const int beyond = tile - (of_item - p.ends),
                      before = at - first_item * p.ends - max(beyond, 0);
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
        item.set_keys(p, lengths.keys(p, item.batch)), item.begin_at(-tile);
    }
};
