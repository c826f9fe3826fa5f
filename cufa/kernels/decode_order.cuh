// In which order tasks are drawn: see decode_draw.cuh.
#pragma once
#include "decode_pieces.cuh"

template <class ARGUMENTS, int BN, int TEAMS>
struct TaskOrder {
    using Drawn = DrawnPieces<ARGUMENTS, BN, TEAMS>;
    static constexpr int BYTES = 33 * 8;

    const ARGUMENTS& p;
    const Drawn pieces;
    const uint32_t smem;  // where a list is, if there is one: of pieces, and when there are no more for this block, of units to merge

    // For a warp, lane 0 of which gets it: the next number that nobody has drawn. `merges` says if the one before was of a unit.
    __device__ int draw(bool merges) const {
        int i = 0;
        if (lane() == 0) i = count_up(counter()) + 1;  // what was NOTHING, -1, counts from 0
        if (pieces.even) return lane() == 0 ? in_order(i) : 0;
        return find(*this, i, merges);
    }
    __device__ void keep(const PieceList& list) const {
        st_shared(smem + lane() * 8, static_cast<unsigned long long>(list.each) << 32 | list.end);
    }

 private:
    static __device__ int lane() { return threadIdx.x % 32; }
    __device__ int* counter() const { return reinterpret_cast<int*>(p.partial); }
    // Each block draws one: the last leaves all as it was.
    __device__ int beyond_all(int i) const {
        if (lane() == 0 && i == p.blocks.divisor - 1) st_relaxed(counter(), NOTHING);
        return pieces.all(p) + pieces.units(p);
    }

    // Where all units have as many pieces. They are merged by who draws them, but for those of which blocks begin with a piece.
    __device__ int in_order(int i) const {
        const int all = pieces.all(p), blocks = p.blocks.divisor, of_pieces = max(all - blocks, 0);
        if (i < of_pieces) return blocks + i;
        const int first = pieces.most == 1 ? pieces.units(p) : pieces.units_of(min(blocks, all)), unit = first + i - of_pieces;
        return unit < pieces.units(p) ? all + unit : beyond_all(unit - pieces.units(p));
    }

    // Else there is a list, since only pieces with tiles, and units of several pieces, are in the order. (Out of line: a copy at each place
    // where something is drawn was in the way of the rest.)
    static __device__ __noinline__ int find(const TaskOrder order, int i, bool merges) {
        const DecodeParams& p = order.p;
        const int rank = p.blocks.divisor + __shfl_sync(0xffffffff, i, 0);  // as blocks have begun with the first
        PieceList list = order.kept();
        if (!merges) {
            const OfSequence piece = list.find(p, rank, [&](int other) { return order.with_tiles(other); });
            if (piece.sequence < p.batch) return order.pieces.number_of(p, piece);
            list = order.list_units(list);
        }
        return order.find_unit(list, rank);
    }
    __device__ PieceList kept() const {
        const unsigned long long both = ld_shared(smem + lane() * 8);
        return {static_cast<int>(both), static_cast<int>(both >> 32)};
    }
    __device__ int with_tiles(int sequence) const { return pieces.with_tiles(p, Drawn::Unit::tiles_of(p, keys_of(p, sequence))); }

    // Units are merged that come after the one of which the last block has begun with a piece, if they are in several.
    __device__ int merged(int first, int sequence) const { return min(max(first - sequence * p.units.divisor, 0), p.units.divisor); }
    __device__ int to_merge(int first, int sequence, int n) const { return n > 1 ? p.units.divisor - merged(first, sequence) : 0; }
    // Each lane lists up to where there are any of its sequences; and all together, the first, and where they begin.
    __device__ PieceList list_units(const PieceList& list) const {
        const OfSequence begun = list.find(p, p.blocks.divisor - 1, [&](int other) { return with_tiles(other); });
        const int first =
            begun.sequence < p.batch ? begun.sequence * p.units.divisor + begun.i / p.units.quotient(begun.all) + 1 : pieces.units(p);
        const int begin = max(list.all(), p.blocks.divisor), each = PieceList::of_lane(p), own = lane() * each;
        int end = 0;
#pragma unroll 1
        for (int sequence = own; sequence < min(own + each, p.batch); ++sequence)
            end += to_merge(first, sequence, each == 1 ? list.each : with_tiles(sequence));
        const PieceList units{begin + lanes_end(end)};
        keep(units);
        if (lane() == 0) st_shared(smem + 32 * 8, static_cast<unsigned long long>(begin) << 32 | first);
        __syncwarp();
        return units;
    }
    __device__ int find_unit(const PieceList& list, int rank) const {
        const unsigned long long both = ld_shared(smem + 32 * 8);
        const int first = static_cast<int>(both), begin = static_cast<int>(both >> 32);
        const uint32_t beyond = __ballot_sync(0xffffffff, list.end > rank);
        if (!beyond) return beyond_all(rank - list.all());
        const int found = __ffs(beyond) - 1, before = __shfl_sync(0xffffffff, list.end, max(found - 1, 0));
        OfSequence unit{found, rank - (found > 0 ? before : begin)};
        if (PieceList::of_lane(p) > 1)
            unit = OfSequence::find(
                p.batch, unit.i, [&](int other) { return to_merge(first, other, with_tiles(other)); }, found * PieceList::of_lane(p));
        return pieces.all(p) + unit.sequence * p.units.divisor + merged(first, unit.sequence) + unit.i;
    }
};
