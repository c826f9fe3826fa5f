// Pieces that blocks draw. Long units are cut into more pieces than there are blocks, and each block takes one after the other, as it
// comes to the end of its last one: those whose multiprocessors are nearer to memory take more, whatever the lengths are, and what all
// read at a time lies together. A block asks for the keys of its next piece before it has ended one, so that pieces follow each other
// without a beginning.
// Tasks have numbers: first those of the pieces, unit by unit, and then of units whose pieces are to be merged. Each block has the piece
// of its own number first, if there are so many; the others it draws from a counter. Who takes what is chance; results are not, as
// where a piece begins depends on lengths only, and each team takes the same tiles of it.
#pragma once
#include "decode_params.cuh"

// One thread draws for its block, and hands the k-th number on to the others in shared memory, together with k, which begins with 1.
struct Draw {
    static constexpr int PLACES = 8;  // more than pieces that one thread can be ahead of another
    int* counter;   // of all blocks; where the first one could leave a piece, if a unit had begun before it
    uint32_t smem;  // 8 bytes for each place
    int blocks;

    __device__ Draw(const DecodeParams& p, uint32_t smem)
        : counter(reinterpret_cast<int*>(p.partial)), smem(smem), blocks(p.blocks.divisor) {}
    __device__ void begin() const {  // what was there could be taken for a number
        if (threadIdx.x < PLACES) st_shared(smem + threadIdx.x * 8, 0);
    }
    __device__ int draw() const { return blocks + 1 + atomicAdd(counter, 1); }
    __device__ void hand_on(int k, uint32_t task) const {
        st_shared(smem + k % PLACES * 8, static_cast<unsigned long long>(task) << 32 | k);
    }
    __device__ int drawn(int k) const {
        unsigned long long found;
        do found = ld_shared(smem + k % PLACES * 8);
        while (__any_sync(0xffffffff, static_cast<int>(found) != k));
        return static_cast<int>(found >> 32);
    }
    // When a block has drawn `task` beyond all `tasks`, as each does once, or has begun with one: the last of them leaves all as it was.
    __device__ void end(int task, int tasks) const {
        if (threadIdx.x == 0 && task == tasks + blocks - 1) st_relaxed(counter, NOTHING);
    }
};
