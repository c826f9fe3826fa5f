// Which keys each block of decode.cu reads. A unit is a sequence, a KV head and a tile of rows. The tiles of BN keys that all
// units visit, one unit after the other, are cut into equal shares, a block each: blocks end together whatever the lengths are,
// and a unit that is cut leaves a piece with each of its blocks. Where lengths differ little, all units are cut into equally
// many pieces instead, a block each, and so they are with `splits`, where pieces depend on the own length only.
#pragma once
#include "decode_draw.cuh"

// The share of a block of so many teams: `count` tiles, the first of which belongs to `unit`; with WHOLE, that unit's.
template <class ARGUMENTS, int BN, int TEAMS, bool WHOLE, bool DRAWS>
struct Share {
    using Unit = ::Unit<ARGUMENTS, BN>;

    Unit unit{};
    int count = 0;
    DrawnPieces<ARGUMENTS, BN, TEAMS> drawn;
    PieceList list;       // if units have different numbers of these
    int first_drawn = 0;  // the number of the block's first piece, beyond all if it has none

    // Of up to 32 sequences, `length` is the keys of that which has the lane's number. Of more, lengths are looked up, if `looks`;
    // else the share is that of sequences which are all as long as the block's own, if units are then cut into equally many pieces; or as
    // the first, where pieces are drawn.
    __device__ void find(const ARGUMENTS& p, int block, int length, bool looks) {
        const int lane = threadIdx.x % 32, units = p.batch * p.units.divisor;
        const bool few = p.batch <= 32;
        count = 0, unit = Unit{};
        if constexpr (WHOLE) {
            unit.batch = min(p.units.quotient(block), p.batch - 1), unit.index = p.units.remainder(block);
            unit.set_keys(p, keys_of(p, unit.batch)), unit.begin_at(0), count = unit.tiles;
            return;
        }
        if constexpr (DRAWS) return find_drawn(p, block, length, looks);
        // Of equally many pieces of each unit
        const int number = p.parts.quotient(block), batch = min(p.units.quotient(number), p.batch - 1);
        part = block - number * p.parts.divisor;

        int total, longest, keys;
        if (p.splits || !p.lengths || !(few || looks)) {
            keys = few ? __shfl_sync(0xffffffff, length, batch) : keys_of(p, batch);
            longest = Unit::tiles_of(p, keys), total = longest * p.batch;
        } else {
            int own = length;  // keys of `batch`, in the lane that has come across it
            if (few) {
                total = longest = lane < p.batch ? Unit::tiles_of(p, length) : 0;
            } else {
                total = longest = 0;
#pragma unroll 1
                for (int other = lane; other < p.batch; other += 32) {
                    const int of_other = keys_of(p, other), tiles = Unit::tiles_of(p, of_other);
                    total += tiles, longest = max(longest, tiles);
                    if (other == batch) own = of_other;
                }
            }
            total = __reduce_add_sync(0xffffffff, total), longest = __reduce_max_sync(0xffffffff, longest);
            keys = __shfl_sync(0xffffffff, own, batch);  // of its lane modulo 32
        }
        even = is_even(p, total, longest);
        if (!even && !(few || looks)) return;
        total *= p.units.divisor;
        each = p.blocks.quotient(total), more = total - each * p.blocks.divisor;
        if (even) {
            if (number >= units) return;
            unit.batch = batch, unit.index = p.units.remainder(number), unit.set_keys(p, keys);
            const int step = steps_of(p, unit.tiles);
            unit.begin_at(-min(part * step, unit.tiles)), count = min(step, unit.end());
            return;
        }
        first = block * each + min(block, more), count = each + (block < more);
        if (count == 0) return;
        int tile = first;
        if (!p.lengths) {
            unit.set_keys(p, p.seq_kv), unit.batch = uint32_t(tile) / uint32_t(longest * p.units.divisor);
            tile -= unit.batch * longest * p.units.divisor;
        } else {
            const OfSequence its = OfSequence::find(p.batch, tile, [&](int other) {
                return Unit::tiles_of(p, few ? length : keys_of(p, other)) * p.units.divisor;
            });
            unit.batch = its.sequence, tile = its.i;
            unit.set_keys(p, few ? __shfl_sync(0xffffffff, length, unit.batch) : keys_of(p, unit.batch));
        }
        // Of few, from the same look as the share, which is what is compared when lengths are looked at once more.
        const int after = min(unit.batch + 1, p.batch - 1);
        unit.keys_next = few ? __shfl_sync(0xffffffff, length, after) : keys_of(p, after);
        unit.index = uint32_t(tile) / uint32_t(unit.tiles);
        unit.begin_at(unit.index * unit.tiles - tile);
    }

    // Whether units are cut into equally many pieces, of tiles of all sequences together, and of the longest: where that takes
    // hardly longer than equal shares, since two pieces a block take longer. Where blocks follow each other, a whole unit each, the
    // longest may have more, for others fill the time.
    __device__ bool is_even() const { return WHOLE || DRAWS || even; }
    static __device__ bool is_even(const DecodeParams& p, int total, int longest) {
        const int each = p.blocks.quotient(total * p.units.divisor);
        const int most = static_cast<int>(static_cast<long long>(each) * p.spread / 8) + p.slack;
        return p.splits || (p.batch * p.units.divisor <= p.blocks.divisor && steps_of(p, longest) <= most);
    }
    // Whether they are cut as this share says.
    __device__ bool is_cut_with(const DecodeParams& p, int total, int longest) const {
        if constexpr (DRAWS) {
            auto now = drawn;
            now.cut(p, total, longest);
            return now.even && now == drawn;
        }
        return is_even() && is_even(p, total, longest);
    }
    // The same where pieces are drawn, and this block begins with the same one.
    __device__ bool begins_with(const ARGUMENTS& p, int length) const {
        Share now;
        now.find_drawn(p, blockIdx.x, length, true);
        return now.first_drawn == first_drawn && now.drawn == drawn && (drawn.even || now.list.end == list.end);
    }
    // Whether it has any of a unit: of many sequences, a first piece whose own length is not known yet may seem to have no tiles.
    __device__ bool has_unit(const DecodeParams& p) const { return DRAWS ? first_drawn < drawn.all(p) : unit.tiles > 0; }
    // Whether the first unit, or piece, visits the same tiles if its sequence has so many keys.
    __device__ bool is_same_with(const ARGUMENTS& p, int keys) const {
        Unit whole = unit;
        if constexpr (DRAWS) whole.set_keys(p, unit.keys);
        return whole.is_same_with(p, keys);
    }
    // The pieces of a unit of this share, of which the block, or number, has one.
    __device__ Pieces pieces(const ARGUMENTS& p, const Unit& unit, int block) const {
        if constexpr (WHOLE) return {block, block + 1};
        if constexpr (DRAWS) return drawn.of_unit(p, block, unit.keys);
        if (even) {
            const uint32_t tiles = unit.tiles, step = steps_of(p, tiles);
            return {block - part, block - part + int((tiles + step - 1) / step)};
        }
        if (unit.begin() >= 0 && unit.end() <= count) return {block, block + 1};
        return {block_of(first + unit.begin()), block_of(first + unit.end() - 1) + 1};
    }

 private:
    bool even = false;        // whether units are cut into equally many pieces
    int part = 0;             // the block's piece then
    int first = 0, each = 0;  // else tile of the list; tiles of a share, without the one more of the first blocks
    int more = 0;             // how many blocks have it

    // The same where blocks draw pieces: the first is that of the block's number, of those with tiles.
    __device__ void find_drawn(const ARGUMENTS& p, int block, int length, bool looks) {
        const int lane = threadIdx.x % 32;
        const bool few = p.batch <= 32;
        auto tiles_of = [&](int other) { return Unit::tiles_of(p, few ? length : keys_of(p, other)); };  // of the lane's, if few
        int total = 0, longest = 0;
        if (p.lengths && (few || looks)) {
#pragma unroll 1
            for (int other = lane; other < p.batch; other += 32) {
                const int tiles = tiles_of(other);
                total += tiles, longest = max(longest, tiles);
            }
            total = __reduce_add_sync(0xffffffff, total), longest = __reduce_max_sync(0xffffffff, longest);
        } else {
            longest = Unit::tiles_of(p, keys_of(p, 0)), total = longest * p.batch;
        }
        drawn.cut(p, total, longest), first_drawn = block;
        if (!drawn.even) {
            const Listed listed = list_pieces(p, block, length, drawn);
            list = listed.list, first_drawn = listed.first, drawn = listed.drawn;
        }
        if (first_drawn >= drawn.all(p)) return;
        const int its = drawn.batch_of(p, first_drawn);
        unit = drawn.piece(p, first_drawn, 0, few ? __shfl_sync(0xffffffff, length, its) : keys_of(p, its)), count = unit.tiles;
    }

    struct Listed {
        PieceList list;
        int first;
        DrawnPieces<ARGUMENTS, BN, TEAMS> drawn;
    };
    // Where not all units are as long: out of line, as find_drawn() is in two places.
    static __device__ __noinline__ Listed list_pieces(const ARGUMENTS& p, int block, int length, DrawnPieces<ARGUMENTS, BN, TEAMS> drawn) {
        auto with_tiles = [&](int other) { return drawn.with_tiles(p, Unit::tiles_of(p, p.batch <= 32 ? length : keys_of(p, other))); };
        PieceList list;
        drawn.even = !list.make(p, drawn.most, with_tiles);
        return {list, drawn.even ? block : drawn.number_of(p, list.find(p, block, with_tiles)), drawn};
    }

    // Tiles of each part of a unit: without `splits` each team has one, if there are any.
    static __device__ int steps_of(const DecodeParams& p, int tiles) {
        return max(p.parts.quotient(tiles + p.parts.divisor - 1), p.splits ? 1 : TEAMS);
    }
    __device__ int block_of(int tile) const {
        const int larger = more * (each + 1);
        return tile < larger ? uint32_t(tile) / uint32_t(each + 1) : more + uint32_t(tile - larger) / uint32_t(each);
    }
};

// The lengths that a share was found from. The kernel in front may still write them: they are read before it has ended, so that
// keys can be asked for at once when it has; and then once more.
template <class ARGUMENTS, int BN, int TEAMS, int WARPS, bool WHOLE, bool DRAWS>
struct Lengths {
    using Unit = ::Unit<ARGUMENTS, BN>;

    const bool few;    // sequences: each lane has one's length, where shares depend on all
    const bool all;    // of many are looked at once more, as the share depends on them
    const int length;  // of that which has the lane's number

    __device__ explicit Lengths(const DecodeParams& p)
        : few(!WHOLE && p.batch <= 32), all(!WHOLE && !few && p.lengths && !p.splits), length(few ? length_at(p, at(p, lane())) : 0) {}

    // Where they will be looked at once more: those of few, or the own one.
    __device__ void find_again(const DecodeParams& p, int own) {
        own_at = at(p, few ? lane() : own);
        computed_here(own_at);
    }
    // They are copied to shared memory, like the keys: no load that has to come first stands in front of those.
    __device__ void look_again(const DecodeParams& p, uint32_t two_ints) const {
        cp_async_4(two_ints, own_at, p.lengths), cp_async_4(two_ints + 4, at(p, threadIdx.x), all);
    }
    __device__ void have_come(const DecodeParams& p, const int* two_ints) {
        own_now = p.lengths ? two_ints[0] : p.seq_kv, other_now = two_ints[1];
    }
    // Keys of the share's sequence.
    __device__ int keys_now(const DecodeParams& p, int own) const {
        return keys_of_length(p, few ? __shfl_sync(0xffffffff, own_now, own) : own_now);
    }
    // Whether all sequences are still such that units are cut into equally many pieces. For all threads, if they are many.
    __device__ bool hold(const ARGUMENTS& p, const Share<ARGUMENTS, BN, TEAMS, WHOLE, DRAWS>& share, int (*sums)[2]) const {
        int total = 0, longest = 0;
        if (few) {
            if (!__any_sync(0xffffffff, own_now != length)) return true;
            if constexpr (DRAWS) return share.begins_with(p, keys_of_length(p, own_now));
            const int tiles = lane() < p.batch ? Unit::tiles_of(p, keys_of_length(p, own_now)) : 0;
            total = __reduce_add_sync(0xffffffff, tiles), longest = __reduce_max_sync(0xffffffff, tiles);
        } else {
            if (!all) return true;
            auto add = [&](int length) {
                const int tiles = Unit::tiles_of(p, keys_of_length(p, length));
                total += tiles, longest = max(longest, tiles);
            };
            if (threadIdx.x < p.batch) add(other_now);
#pragma unroll 1
            for (int other = threadIdx.x + WARPS * 32; other < p.batch; other += WARPS * 32) add(ld_relaxed(p.lengths + other));
            const int warp = threadIdx.x / 32;
            total = __reduce_add_sync(0xffffffff, total), longest = __reduce_max_sync(0xffffffff, longest);
            if (lane() == 0) sums[warp][0] = total, sums[warp][1] = longest;
            __syncthreads();
#pragma unroll 1
            for (int other = 0; other < WARPS; ++other)
                if (other != warp) total += sums[other][0], longest = max(longest, sums[other][1]);
            __syncthreads();
        }
        return share.is_cut_with(p, total, longest);
    }

 private:
    const int* own_at;
    int own_now, other_now;

    static __device__ int lane() { return threadIdx.x % 32; }
    // Each thread has one, if some the last: a branch of lanes in front of a load has misled ptxas, see docs/kernels.md.
    static __device__ const int* at(const DecodeParams& p, int number) { return p.lengths + min(number, p.batch - 1); }
};
