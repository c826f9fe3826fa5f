// How quantize.cu reads tiles: copies to shared memory, ahead of use, and from there to registers.
#pragma once
#include "ptx_convert.cuh"
#include "quantize_place.cuh"
#include "quantize_shape.cuh"

// How numbers of SIZE bytes come to shared memory. A warp copies its own rows, or half of them
// where they are long, since other GPUs have less shared memory: pieces of several rows at once,
// COPIES times.
template <int COLUMNS, int SIZE>
struct CopyLayout {
    static constexpr int PIECE = 16 / SIZE;  // columns that a thread copies and reads at once
    static constexpr int PARTS = COLUMNS * SIZE > 512 ? 2 : 1, PART_ROWS = WARP_ROWS / PARTS;
    static constexpr int COPY_ROWS = PIECE, COPY_COLUMNS = 32, PIECES = COPY_COLUMNS / PIECE;
    static constexpr int COPIES = COLUMNS / COPY_COLUMNS * (PART_ROWS / COPY_ROWS);
    static constexpr int WARP_BYTES = 32 * 16;  // that a warp copies at once

    // Where a warp has a column, one copy behind the other. Pieces change places so that lanes
    // read from their own banks.
    __device__ static constexpr int place(int row, int column) {
        constexpr int CHANGES = PIECES / LANES;
        const int along = column / COPY_COLUMNS, down = row / COPY_ROWS;
        const int change = row / (8 / PIECES) % CHANGES;
        const int piece = row % COPY_ROWS * PIECES + (column / PIECE % PIECES ^ change);
        return (down * (COLUMNS / COPY_COLUMNS) + along) * WARPS * WARP_BYTES + piece * 16 +
               column % PIECE * SIZE;
    }
};

// The signs of columns, as the bits that change them in words of T.
template <class T, int COLUMNS>
__device__ void write_flips(uint32_t* flips, const uint32_t (&signs)[8]) {
    constexpr int COUNT = 4 / sizeof(T);  // of a word
    for (int i = threadIdx.x; i < COLUMNS / COUNT; i += THREADS) {
        const uint32_t its = signs[i * COUNT / 32] >> i * COUNT % 32;
        flips[i] = COUNT == 2 ? (its & 1) << 15 | (its & 2) << 30 : its << 31;
    }
}

// A thread's part in reading the tiles of all turns.
template <class T, int COLUMNS, bool HADAMARD>
struct Reader {
    using C = CopyLayout<COLUMNS, sizeof(T)>;
    static constexpr int UNITS = COLUMNS / SPAN, WORDS = UNIT / C::PIECE * 4;  // of a unit

    const QuantizeParams& p;
    const Place* places;
    unsigned char* ahead;   // copies
    const uint32_t* flips;  // see `write_flips`
    const int turns;
    // This thread copies from `from`, in row `row_copied`; `columns_left` columns of x follow from
    // there. It writes to byte `copied` of `ahead`, and reads from byte `read`, of one part.
    int row_copied, columns_left, copied;
    const T* from;
    int read;

    __device__ Reader(const QuantizeParams& p, const Place* places, unsigned char* ahead,
                      const uint32_t* flips, int turns)
        : p(p), places(places), ahead(ahead), flips(flips), turns(turns) {
        const int warp = threadIdx.x / 32, row = threadIdx.x / LANES;
        const int column = threadIdx.x % C::PIECES * C::PIECE;
        row_copied = warp * WARP_ROWS + threadIdx.x % 32 / C::PIECES;
        columns_left = p.head_dim - column;
        from = static_cast<const T*>(p.x.data) + row_copied * p.x.stride_seq + column;
        copied = warp * C::WARP_BYTES + C::place(row_copied % WARP_ROWS, column);
        read = warp * C::WARP_BYTES + C::place(row % C::PART_ROWS, threadIdx.x % LANES * UNIT);
        computed_here(row_copied), computed_here(columns_left), computed_here(from);
        computed_here(copied), computed_here(read);
    }

    __device__ void start() const { copy(0); }
    // Reads this thread's part of the tile of a turn, with the signs of the transform, and begins
    // to copy the next part.
    __device__ void get(uint32_t (&words)[UNITS][WORDS], int turn) const {
        // Lanes read in one of two turns of the loop. Else registers would keep what words were.
        if constexpr (C::PARTS > 1)
#pragma unroll
            for (int i = 0; i < UNITS * WORDS; ++i) words[i / WORDS][i % WORDS] = 0;
        const int part_of_row = threadIdx.x / LANES % WARP_ROWS / C::PART_ROWS;
#pragma unroll 1
        for (int part = 0; part < C::PARTS; ++part) {
            cp_async_wait<0>();
            __syncwarp();
            if (part == part_of_row)
#pragma unroll
                for (int i = 0; i < UNITS * WORDS; i += 4)
                    get_piece(&words[i / WORDS][i % WORDS], i / WORDS, i % WORDS / 4);
            __syncwarp();
            const int next = turn * C::PARTS + part + 1;
            if (next < turns * C::PARTS) copy(next);
        }
    }

 private:
    __device__ void copy(int step) const {
        const Place& place = places[step / C::PARTS % TURNS];
        const int first = step % C::PARTS * C::PART_ROWS, rows = place.rows - row_copied - first;
        const T* its = from + place.from + first * p.x.stride_seq;
#pragma unroll
        for (int i = 0; i < C::COPIES; ++i) {
            const int down = i * C::COPY_COLUMNS / COLUMNS * C::COPY_ROWS;
            const int along = i * C::COPY_COLUMNS % COLUMNS, at = C::place(down, along);
            // Pieces change places within what a warp copies at once.
            cp_async_16(smem_address(ahead + (copied ^ at % C::WARP_BYTES) +
                                     at / C::WARP_BYTES * C::WARP_BYTES),
                        its + down * p.x.stride_seq + along, down < rows && along < columns_left);
        }
        cp_async_commit();
    }
    __device__ void get_piece(uint32_t* words, int unit, int piece) const {
        const int behind = C::place(0, unit * SPAN), change = C::place(0, piece * C::PIECE);
        const uint4 its = *reinterpret_cast<const uint4*>(ahead + (read ^ change) + behind);
        uint4 signs = {};
        if constexpr (HADAMARD) {
            const int column = unit * SPAN + threadIdx.x % LANES * UNIT;
            signs = reinterpret_cast<const uint4*>(flips)[column / C::PIECE + piece];
        }
        words[0] = its.x ^ signs.x, words[1] = its.y ^ signs.y;
        words[2] = its.z ^ signs.z, words[3] = its.w ^ signs.w;
    }
};

// Numbers of type T, given as words.
template <class T, int UNITS>
__device__ void unpack(float (&x)[UNITS][UNIT], const uint32_t (&words)[UNITS][UNIT / 2]) {
#pragma unroll
    for (int i = 0; i < UNITS * UNIT; ++i) {
        const uint32_t word = words[i / UNIT][i % UNIT / 2];
        x[i / UNIT][i % UNIT] = i % 2 ? high_to_float<T>(word) : low_to_float<T>(word);
    }
}
template <class T, int UNITS>
__device__ void unpack(float (&x)[UNITS][UNIT], const uint32_t (&words)[UNITS][UNIT]) {
#pragma unroll
    for (int i = 0; i < UNITS * UNIT; ++i)
        x[i / UNIT][i % UNIT] = __uint_as_float(words[i / UNIT][i % UNIT]);
}
