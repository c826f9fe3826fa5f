// In which order tasks are drawn: see decode_draw.cuh.
#pragma once
#include "decode_merge.cuh"
#include "decode_pieces.cuh"

template <class ARGUMENTS, int BN, int TEAMS>
struct TaskOrder {
    using Drawn = DrawnPieces<ARGUMENTS, BN, TEAMS>;
    static constexpr int BYTES = 32 * 8;

    const ARGUMENTS& p;
    const Drawn pieces;
    const uint32_t smem;  // where a list of pieces is, 8 bytes for each lane of the warp that draws

    // For a warp, lane 0 of which gets it: the next number that nobody has drawn.
    __device__ int draw() const {
        int i = 0;
        if (lane() == 0) i = count_up(counter()) + 1;  // what was NOTHING, -1, counts from 0
        if (pieces.even) return lane() == 0 ? in_order(i) : 0;
        return find(*this, i);
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

    // Else only pieces with tiles, and units of several pieces, are in the order. (Out of line: a copy at each place where something is
    // drawn was in the way of the rest.)
    static __device__ __noinline__ int find(const TaskOrder order, int i) { return order.find_listed(__shfl_sync(0xffffffff, i, 0)); }
    __device__ int find_listed(int i) const {
        const unsigned long long kept = ld_shared(smem + lane() * 8);
        const PieceList list{static_cast<int>(kept), static_cast<int>(kept >> 32)};
        const int units = p.units.divisor, blocks = p.blocks.divisor;
        auto with_tiles = [&](int sequence) { return pieces.with_tiles(p, Drawn::Unit::tiles_of(p, keys_of(p, sequence))); };
        const OfSequence piece = list.find(p, blocks + i, with_tiles);  // as blocks have begun with the first
        if (piece.sequence < p.batch) return pieces.number_of(p, piece);
        // Units after that of which the last block has begun with a piece
        const OfSequence begun = list.find(p, blocks - 1, with_tiles);
        const int first = begun.sequence < p.batch ? begun.sequence * units + begun.i / p.units.quotient(begun.all) + 1 : pieces.units(p);
        auto merged = [&](int sequence) { return min(max(first - sequence * units, 0), units); };
        const OfSequence unit = OfSequence::find(
            p.batch, min(piece.i, i), [&](int other) { return with_tiles(other) > 1 ? units - merged(other) : 0; });
        return unit.sequence < p.batch ? pieces.all(p) + unit.sequence * units + merged(unit.sequence) + unit.i : beyond_all(unit.i);
    }
};
