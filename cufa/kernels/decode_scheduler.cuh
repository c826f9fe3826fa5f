// The share of the keys that each block of decode.cu reads. A unit is a sequence, a KV head and a
// tile of rows. The tiles of BN keys that all units visit, one unit after the other, are cut into
// equal shares, a block each, in which the end of a unit counts as some tiles: blocks end together
// whatever the lengths are, and a unit that is cut leaves a piece with each of its blocks. Where
// lengths differ little, all units are cut into equally many pieces instead, a block each, and so
// they are with `splits`, where pieces depend on the own length only.
#pragma once
#include "decode_unit.cuh"

// The share of a block of TEAMS teams: `count` tiles, the first of which belongs to `unit`; with
// WHOLE, that unit's.
template <class ARGUMENTS, int BN, int TEAMS, bool WHOLE>
struct Share {
    using Unit = ::Unit<ARGUMENTS, BN>;

    Unit unit{};
    int count = 0;

    // With up to 32 sequences, `length` is the keys of the one that has the lane's number. With
    // more, lengths are looked up, if `looks`; else the share is that of sequences which are all as
    // long as the block's, if units are then cut into equally many pieces. All lanes of a warp get
    // the same share: `ask` has shuffles where its tiles are. So a length that the kernel in front
    // may still write is one lane's; where ptxas sees one load for the warp, it drops the shuffle.
    // With WHOLE it is the lanes' maximum, which is in a uniform register: after a shuffle, sm_80
    // spills up to 184 bytes.
    __device__ void find(const ARGUMENTS& p, int block, int length, bool looks) {
        const int lane = threadIdx.x % 32, units = p.batch * p.units.divisor;
        const bool few = p.batch <= 32;
        count = 0, unit = Unit{};
        if constexpr (WHOLE) {
            unit.batch = min(p.units.quotient(block), p.batch - 1),
            unit.index = p.units.remainder(block);
            unit.set_keys(p, __reduce_max_sync(0xffffffff, keys_of(p, unit.batch)));
            unit.begin_at(0), count = unit.tiles;
            return;
        }
        // The block's place if each unit had equally many pieces
        const int number = p.parts.quotient(block),
                  batch = min(p.units.quotient(number), p.batch - 1);
        part = block - number * p.parts.divisor;

        int total, longest, keys;
        if (p.splits || !p.lengths || !(few || looks)) {
            keys = __shfl_sync(0xffffffff, few ? length : keys_of(p, batch), batch);
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
            total = __reduce_add_sync(0xffffffff, total),
            longest = __reduce_max_sync(0xffffffff, longest);
            keys = __shfl_sync(0xffffffff, own, batch);  // of its lane modulo 32
        }
        even = is_even(p, total, longest);
        if (even) {
            if (number >= units) return;
            unit.batch = batch, unit.index = p.units.remainder(number), unit.set_keys(p, keys);
            const int step = steps_of(p, unit.tiles);
            unit.begin_at(-min(part * step, unit.tiles)), count = min(step, unit.end());
            return;
        }
        if (!(few || looks)) return;
        total = (total + p.ends * p.batch) * p.units.divisor;
        each = p.blocks.quotient(total), more = total - each * p.blocks.divisor,
        first = block * each + min(block, more);
        // Its end, and then its beginning: in which unit they are, at which of its tiles, and how
        // many there are before
        int at = first + each + (block < more), tile;
#pragma unroll 1
        for (bool is_begin = false;; is_begin = true, at = first) {
            OfSequence its{};
            if (!p.lengths) {
                its.all = (longest + p.ends) * p.units.divisor,
                its.sequence = uint32_t(at) / uint32_t(its.all);
                its.i = at - its.sequence * its.all;
            } else {
                its = OfSequence::find(p.batch, at, [&](int other) {
                    return (Unit::tiles_of(p, few ? length : keys_of(p, other)) + p.ends) *
                           p.units.divisor;
                });
            }
            const int of_unit = max(p.units.quotient(its.all), p.ends + 1),
                      index = uint32_t(its.i) / uint32_t(of_unit);
            first_unit = its.sequence * p.units.divisor + index, tile = its.i - index * of_unit;
            const int beyond = tile - (of_unit - p.ends),
                      before = at - first_unit * p.ends - max(beyond, 0);
            if (!is_begin) {
                count = before;
                continue;
            }
            count -= before;
            if (count <= 0) return;
            if (beyond >= 0) first += of_unit - tile, ++first_unit, tile = 0;
            break;
        }
        unit.batch = p.units.quotient(first_unit), unit.index = p.units.remainder(first_unit);
        unit.set_keys(p,
                      few ? __shfl_sync(0xffffffff, length, unit.batch) : keys_of(p, unit.batch));
        // With few sequences, from the same look as the share, which is compared when lengths are
        // looked at once more.
        const int after = min(unit.batch + 1, p.batch - 1);
        unit.keys_next = few ? __shfl_sync(0xffffffff, length, after) : keys_of(p, after);
        unit.begin_at(-tile);
    }

    // Whether units are cut into equally many pieces, by the tiles of all sequences together and of
    // the longest. They are where that takes hardly longer than equal shares, since two pieces a
    // block take longer. Where blocks follow each other, a whole unit each, the longest may have
    // more, since others fill the time.
    __device__ bool is_even() const { return WHOLE || even; }
    static __device__ bool is_even(const DecodeParams& p, int total, int longest) {
        const int each = p.blocks.quotient(total * p.units.divisor);
        const int most = static_cast<int>(static_cast<long long>(each) * p.spread / 8) + p.slack;
        return p.splits ||
               (p.batch * p.units.divisor <= p.blocks.divisor && steps_of(p, longest) <= most);
    }
    // The pieces of a unit of this share; the block has one of them.
    __device__ Pieces pieces(const DecodeParams& p, const Unit& unit, int block) const {
        if constexpr (WHOLE) return {block, block + 1};
        if (even) {
            const uint32_t tiles = unit.tiles, step = steps_of(p, tiles);
            return {block - part, block - part + int((tiles + step - 1) / step)};
        }
        if (unit.begin() >= 0 && unit.end() <= count) return {block, block + 1};
        const int its = unit.batch * p.units.divisor + unit.index,
                  begin = first + unit.begin() + (its - first_unit) * p.ends;
        return {block_of(begin), block_of(begin + unit.tiles - 1) + 1};
    }

 private:
    bool even = false;        // whether units are cut into equally many pieces
    int part = 0;             // the block's piece then
    int first = 0, each = 0;  // else place in the list; places of a share, without the one more of
                              // the first blocks
    int more = 0;             // how many blocks have it
    int first_unit = 0;       // the first unit's number

    // Tiles of each part of a unit: without `splits` each team has one, if there are any.
    static __device__ int steps_of(const DecodeParams& p, int tiles) {
        return max(p.parts.quotient(tiles + p.parts.divisor - 1), p.splits ? 1 : TEAMS);
    }
    __device__ int block_of(int tile) const {
        const int larger = more * (each + 1);
        return tile < larger ? uint32_t(tile) / uint32_t(each + 1)
                             : more + uint32_t(tile - larger) / uint32_t(each);
    }
};

// The lengths that a share was found from. The kernel in front may still write them: they are read
// before it has ended, so that keys can be asked for at once when it has; and then once more.
template <class ARGUMENTS, int BN, int TEAMS, int WARPS, bool WHOLE>
struct Lengths {
    using Unit = ::Unit<ARGUMENTS, BN>;

    const bool few;    // sequences: each lane has one's length, where shares depend on all
    const bool all;    // of many are looked at once more, as the share depends on them
    const int length;  // of that which has the lane's number

    __device__ explicit Lengths(const DecodeParams& p)
        : few(!WHOLE && p.batch <= 32),
          all(!WHOLE && !few && p.lengths && !p.splits),
          length(few ? length_at(p, at(p, lane())) : 0) {}

    // Finds where lengths will be looked at once more: all of few sequences, or the own one.
    __device__ void find_again(const DecodeParams& p, int own) {
        own_at = at(p, few ? lane() : own);
        computed_here(own_at);
    }
    // Copies lengths to shared memory, like the keys, so that no load has to come before the keys.
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
    // Whether the lengths still let units be cut into equally many pieces. All threads call it, if
    // sequences are many.
    __device__ bool hold(const ARGUMENTS& p, const Share<ARGUMENTS, BN, TEAMS, WHOLE>& share,
                         int (*sums)[2]) const {
        int total = 0, longest = 0;
        if (few) {
            if (!__any_sync(0xffffffff, own_now != length)) return true;
            const int tiles = lane() < p.batch ? Unit::tiles_of(p, keys_of_length(p, own_now)) : 0;
            total = __reduce_add_sync(0xffffffff, tiles),
            longest = __reduce_max_sync(0xffffffff, tiles);
        } else {
            if (!all) return true;
            auto add = [&](int length) {
                const int tiles = Unit::tiles_of(p, keys_of_length(p, length));
                total += tiles, longest = max(longest, tiles);
            };
            if (threadIdx.x < p.batch) add(other_now);
#pragma unroll 1
            for (int other = threadIdx.x + WARPS * 32; other < p.batch; other += WARPS * 32)
                add(ld_relaxed(p.lengths + other));
            const int warp = threadIdx.x / 32;
            total = __reduce_add_sync(0xffffffff, total),
            longest = __reduce_max_sync(0xffffffff, longest);
            if (lane() == 0) sums[warp][0] = total, sums[warp][1] = longest;
            __syncthreads();
#pragma unroll 1
            for (int other = 0; other < WARPS; ++other)
                if (other != warp) total += sums[other][0], longest = max(longest, sums[other][1]);
            __syncthreads();
        }
        return share.is_even() && share.is_even(p, total, longest);
    }

 private:
    const int* own_at;
    int own_now, other_now;

    static __device__ int lane() { return threadIdx.x % 32; }
    // Each thread has a length, some the last one: a branch of lanes in front of a load has misled
    // ptxas, see docs/design/decode.md.
    static __device__ const int* at(const DecodeParams& p, int number) {
        return p.lengths + min(number, p.batch - 1);
    }
};
