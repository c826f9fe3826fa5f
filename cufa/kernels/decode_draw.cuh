// Pieces that blocks draw. Long units are cut into more pieces than there are blocks, if that is sooner than a piece each, and each
// block takes one after the other, as it comes to the end of its last one: those whose multiprocessors are nearer to memory take more,
// whatever the lengths are, and what all read at a time lies together. A block asks for the keys of its next piece before it has ended
// one, so that pieces follow each other without a beginning.
// Tasks have numbers: first those of the pieces, unit by unit, and then of units whose pieces are to be merged. Each block has the piece
// of its own number first, if there are so many; the others it draws, by a counter, in their order, or takes in a fixed turn (see
// `Turn`). Pieces without tiles, as short sequences have, and units in one piece do not count in that. Who takes what is chance; results
// are not, as where a piece begins depends on lengths only, and each team takes the same tiles of it.
#pragma once
#include "decode_order.cuh"

// What a block draws. Its first warp, a team, does so, and hands numbers on to the others in shared memory.
template <class ARGUMENTS, int BN, int TEAMS>
struct Drawing {
    using Unit = ::Unit<ARGUMENTS, BN>;
    using Order = TaskOrder<ARGUMENTS, BN, TEAMS>;
    static constexpr int PLACES = 8;  // more than numbers that one warp can be ahead of another
    static constexpr int BYTES = PLACES * 8 + Order::BYTES;

    const ARGUMENTS& p;
    const DrawnPieces<ARGUMENTS, BN, TEAMS>& pieces;
    const uint32_t smem;  // 8 bytes for each of PLACES, then what the order has there
    int task = 0;  // the number of what is computed
    int nth = 0, nth_asked = 0;  // of the block's numbers: that of what is computed, and of what is asked for

    __device__ Drawing(const ARGUMENTS& p, const DrawnPieces<ARGUMENTS, BN, TEAMS>& pieces, uint32_t smem)
        : p(p), pieces(pieces), smem(smem) {}
    // With the block's first piece; in shared memory is anything, which could be taken for a number.
    __device__ void begin(int first, const PieceList& list) {
        task = first;
        if (pieces.turn == Turn::FIRST && !has_piece()) task = beyond_all();
        if (threadIdx.x < PLACES) st_shared(smem + threadIdx.x * 8, 0);
        if (threadIdx.x < 32 && !pieces.even) Order{p, pieces, smem + PLACES * 8}.keep(list);
    }
    __device__ bool has_piece() const { return task < pieces.all(p); }
    // Goes to the piece that is computed next, if there is one.
    __device__ void find_next(Unit& unit) {
        task = number_of(++nth);
        if (has_piece()) unit = pieces.piece(p, task, unit.end());
    }
    // Goes to the piece of the tile that is asked for next, `asked` of those up to `end`, if it has come to that, and there is one.
    __device__ bool find_asked(int team, int asked, Unit& of_asked, int& end) {
        // One is drawn when all but the last tile of each team of the one before has been asked for: its number is there when that has
        // been, too. (With shuffles here, or loads in front of the first tile, 8 x 8192 took 1% longer.)
        if (team == 0 && drawn <= nth_asked && asked + TEAMS >= end && !all_asked && pieces.turn == Turn::DRAWN) draw();
        if (asked < end || all_asked) return false;
        const int number = number_of(++nth_asked);
        all_asked = number >= pieces.all(p);
        if (all_asked) return false;
        of_asked = pieces.piece(p, number, end), end = of_asked.end();
        return true;
    }
    // When the keys of the piece that is computed are asked for anew
    __device__ void ask_again() { nth_asked = nth, all_asked = false; }
    // The block, if it is one, that merges the unit of its first piece: the last of those that begin with one of it, as others may not
    // have begun.
    __device__ bool merges_first(const Pieces& of_first, int first) const {
        return first < pieces.all(p) && !of_first.one() && (first == of_first.end - 1 || blockIdx.x == gridDim.x - 1);
    }
    // Units to merge come when there are no more pieces. A block that has begun with none has drawn nothing then.
    __device__ bool should_draw() const { return nth == 0 && pieces.turn == Turn::DRAWN; }
    __device__ void go_on(int team) {
        __syncthreads();
        if (team == 0) draw();
        task = number_of(++nth);
    }
    __device__ int unit() const { return task - pieces.all(p); }
    __device__ bool has_unit() const { return unit() < pieces.units(p); }

 private:
    int drawn = 0;
    bool all_asked = false, merges = false;

    __device__ int beyond_all() const { return pieces.all(p) + pieces.units(p); }
    // By the first warp.
    __device__ void draw() {
        const Order order{p, pieces, smem + PLACES * 8};
        const int number = order.draw(merges);
        ++drawn, merges |= number >= pieces.all(p);
        if (threadIdx.x == 0) st_shared(smem + drawn % PLACES * 8, static_cast<unsigned long long>(number) << 32 | drawn);
        __syncwarp();
    }
    // The k-th number that the block has drawn, when that is there, or has in its turn.
    __device__ int number_of(int k) const {
        if (pieces.turn != Turn::DRAWN) {
            const int number = blockIdx.x + k * p.blocks.divisor;
            return number < pieces.all(p) ? number : beyond_all();
        }
        unsigned long long found;
        do found = ld_shared(smem + k % PLACES * 8);
        while (__any_sync(0xffffffff, static_cast<int>(found) != k));
        return static_cast<int>(found >> 32);
    }
};
