// Pieces that blocks draw, see decode_draw.cuh: into how many each unit is cut, and what they are.
#pragma once
#include "decode_unit.cuh"

// How blocks come by pieces. To draw one takes as long as a short one: those are taken in a fixed turn, each block's as many numbers apart
// as there are blocks. Or each piece is the first of a block, and no other follows.
enum class Turn { DRAWN, FIXED, FIRST };

template <class ARGUMENTS, int BN, int TEAMS>
struct DrawnPieces {
    using Unit = ::Unit<ARGUMENTS, BN>;
    int most = 1;             // of a unit
    bool even = true;         // whether all have as many with tiles
    Turn turn = Turn::DRAWN;
    uint32_t multiplier = 0;  // 2^32 / most, rounded up: a division by it takes one instruction, if it is not 1

    // Into as many as end soonest, if all units are as long, and half of the multiprocessors, and less, read twice as fast: of pieces of
    // half of `p.piece` tiles to twice that, or one for each block, if no sequence is much longer than others. Or into more, so that
    // each block has one, and none is more than twice as long as what each reads in all; but not of one tile a team. `total` is the
    // tiles of all sequences, `longest` those of one. This stands in front of the first tile: lanes have a number of pieces each, and
    // what takes divisions does not wait for lengths.
    __device__ void cut(const DecodeParams& p, int total, int longest) {
        constexpr uint32_t LATEST = (1 << 26) - 1;
        const int n = threadIdx.x % 32 + 1;
        const uint32_t inverse = inverse_of(n);
        auto count_lanes = [](bool of_lane) { return __popc(__ballot_sync(0xffffffff, of_lane)); };
        const bool for_all = n * units(p) <= p.blocks.divisor;
        const int for_each = count_lanes(for_all);

        const int step = step_of(p, quotient(longest + n - 1, n, inverse), for_all);
        const int all = units(p) * n, waves = p.blocks.quotient(all), rest = all - waves * p.blocks.divisor;
        const int last = p.blocks.quotient(step * min(2 * rest, p.blocks.divisor));
        // Short ones take a quarter of a tile longer; and equal parts, a block each, as long as the slowest multiprocessor.
        const int longer = for_all ? step / 64 : step < p.piece ? waves / 4 : 0;
        const uint32_t last_end = min(uint32_t(waves * step + last + longer), LATEST);
        const bool even_parts = for_all && longest * p.batch - total <= total / 32;
        const bool long_enough = even_parts || ((n == 1 || 2 * step >= p.piece) && (step <= 2 * p.piece || 2 * n >= p.most_pieces));
        const bool fits = long_enough && n <= p.most_pieces && (n - 1) * step < longest;
        // The soonest, and of these the most pieces
        const int best = __reduce_max_sync(0xffffffff, fits ? (LATEST - last_end) * 32 + n - 1 : 0) % 32 + 1;

        const int of_block = p.blocks.quotient(total * p.units.divisor) + 1, for_balance = count_lanes(2 * of_block * n <= longest);
        const int more = max(min(for_each, longest / TEAMS), min(for_balance, longest / (2 * TEAMS)));
        const int wanted = max(best, min(more, p.most_pieces));
        most = count_lanes((n - 1) * __shfl_sync(0xffffffff, step, wanted - 1) < longest);
        multiplier = __shfl_sync(0xffffffff, inverse, most - 1);
        even = total == longest * p.batch;  // or if that is found otherwise
        const bool short_ones = most == 1 && longest <= 2 * TEAMS;
        turn = __shfl_sync(0xffffffff, for_all, wanted - 1) ? Turn::FIRST : short_ones ? Turn::FIXED : Turn::DRAWN;
    }
    __device__ bool operator==(const DrawnPieces& other) const {
        return most == other.most && even == other.even && turn == other.turn;
    }
    static __device__ int units(const DecodeParams& p) { return p.batch * p.units.divisor; }
    // Numbers of pieces; and units that the first so many are of.
    __device__ int all(const DecodeParams& p) const { return units(p) * most; }
    __device__ int units_of(int pieces) const { return quotient(pieces + most - 1); }
    // Pieces with tiles, of a unit of so many. They are not always more where tiles are.
    __device__ int with_tiles(const DecodeParams& p, int tiles) const {
        const uint32_t step = step_of(p, tiles);
        return (tiles + step - 1) / step;
    }
    __device__ int batch_of(const DecodeParams& p, int number) const { return batch_of_unit(p, quotient(number)); }
    // The number of one of a sequence, of those with tiles; beyond all if it is of none.
    __device__ int number_of(const DecodeParams& p, const OfSequence& at) const {
        if (at.sequence >= p.batch) return all(p);
        const int n = p.units.quotient(at.all), unit = uint32_t(at.i) / uint32_t(n);
        return (at.sequence * p.units.divisor + unit) * most + at.i - unit * n;
    }
    // That of a number, and of a sequence of so many keys. It has as many tiles for each team, the last of which may be empty; or none.
    // So each team takes the same of them wherever in a block's share they are: results do not depend on who draws what. Where no other
    // follows, there are no empty ones.
    __device__ Unit piece(const ARGUMENTS& p, int number, int place) const {
        return piece(p, number, place, keys_of(p, batch_of(p, number)));
    }
    __device__ Unit piece(const ARGUMENTS& p, int number, int place, int keys) const {
        const int of_unit = quotient(number);
        Unit found{};
        found.batch = batch_of_unit(p, of_unit), found.index = p.units.remainder(of_unit), found.set_keys(p, keys);
        const int step = step_of(p, found.tiles), begin = (number - of_unit * most) * step;
        found.first += begin, found.tiles = min(step, turn == Turn::FIRST ? max(found.tiles - begin, 0) : whole_rounds(found.tiles - begin));
        found.begin_at(place);
        return found;
    }
    __device__ Unit whole_unit(const ARGUMENTS& p, int number) const {
        Unit found{};
        found.batch = batch_of_unit(p, number), found.index = p.units.remainder(number), found.set_keys(p, keys_of(p, found.batch));
        return found;
    }
    // All of the unit that the piece of a number belongs to, of a sequence of so many keys.
    __device__ Pieces of_unit(const ARGUMENTS& p, int number, int keys) const {
        const int begin = quotient(number) * most;
        return {begin, begin + (even ? most : with_tiles(p, Unit::tiles_of(p, keys)))};
    }

 private:
    static __device__ uint32_t inverse_of(int n) { return 0xffffffff / n + 1; }
    static __device__ int quotient(uint32_t of, int n, uint32_t inverse) { return n == 1 ? of : __umulhi(of, inverse); }  // of < 2^26
    __device__ int quotient(uint32_t of) const { return quotient(of, most, multiplier); }
    // Tiles of a piece: as many for each team, and not very few, if blocks may have several.
    __device__ int step_of(const DecodeParams& p, int tiles) const { return step_of(p, quotient(tiles + most - 1), turn == Turn::FIRST); }
    static __device__ int step_of(const DecodeParams& p, int tiles, bool all_first) {
        return all_first ? max(tiles, TEAMS) : whole_rounds(max(tiles, p.piece / 4));
    }
    static __device__ int whole_rounds(int tiles) { return tiles > 0 ? static_cast<uint32_t>(tiles + TEAMS - 1) / TEAMS * TEAMS : 0; }
    static __device__ int batch_of_unit(const DecodeParams& p, int number) { return min(p.units.quotient(number), p.batch - 1); }
};

// Where units have different numbers of pieces with tiles: each lane has one sequence, or some that follow each other.
struct PieceList {
    int end = 0;   // how many pieces there are up to the end of these
    int each = 0;  // of a unit, if it is one sequence

    static __device__ int of_lane(const DecodeParams& p) { return (p.batch + 31) / 32; }  // sequences
    // As `with_tiles` says of a lane's sequence. Returns whether some have not `most` in a unit.
    template <class WithTiles>
    __device__ bool make(const DecodeParams& p, int most, WithTiles with_tiles) {
        const int first = threadIdx.x % 32 * of_lane(p);
        bool differs = false;
#pragma unroll 1
        for (int sequence = first; sequence < min(first + of_lane(p), p.batch); ++sequence)
            each = with_tiles(sequence), end += each * p.units.divisor, differs |= each != most;
        end = lanes_end(end);
        return __any_sync(0xffffffff, differs);
    }
    __device__ int all() const { return __shfl_sync(0xffffffff, end, 31); }
    // That with a number.
    template <class WithTiles>
    __device__ OfSequence find(const DecodeParams& p, int i, WithTiles with_tiles) const {
        const uint32_t beyond = __ballot_sync(0xffffffff, end > i);
        if (!beyond) return {p.batch};
        const int found = __ffs(beyond) - 1, before = __shfl_sync(0xffffffff, end, max(found - 1, 0));
        if (found > 0) i -= before;
        if (of_lane(p) == 1) return {found, i, __shfl_sync(0xffffffff, each, found) * p.units.divisor};
        return OfSequence::find(p.batch, i, [&](int other) { return with_tiles(other) * p.units.divisor; }, found * of_lane(p));
    }
};
