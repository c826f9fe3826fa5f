// How quantize.cu reads tiles: copies to shared memory, ahead of use, and from there to registers.
#pragma once
#include "ptx_convert.cuh"
#include "ptx_expand.cuh"
#include "ptx_quantize.cuh"
#include "quantize_place.cuh"
#include "quantize_shape.cuh"

constexpr int TURNS = 8;  // whose places are in shared memory

// How numbers of SIZE bytes come to shared memory. A warp copies its own rows, or half of them
// where they are long, since other GPUs have less shared memory: pieces of several rows at once,
// COPIES times.
template <int COLUMNS, int LANES, int SIZE>
struct Copied {
    using S = Shape<COLUMNS, LANES>;
    static constexpr int PIECE = 16 / SIZE;  // columns that a thread copies and reads at once
    static constexpr int PARTS = COLUMNS * SIZE > 512 ? 2 : 1, PART_ROWS = S::WARP_ROWS / PARTS;
    static constexpr int COPY_ROWS = PIECE, COPY_COLUMNS = 32, PIECES = COPY_COLUMNS / PIECE;
    static constexpr int COPIES = COLUMNS / COPY_COLUMNS * (PART_ROWS / COPY_ROWS);

    // Where a warp has a column, one copy behind the other. Pieces change places so that lanes
    // read from their own banks.
    __device__ static constexpr int place(int row, int column) {
        constexpr int CHANGES = PIECES / LANES;  // of rows that lanes read at once
        const int along = column / COPY_COLUMNS, down = row / COPY_ROWS;
        const int change =
            row / (8 / PIECES) % CHANGES + (S::GROUP > COPY_COLUMNS ? along % 2 * CHANGES : 0);
        const int piece = row % COPY_ROWS * PIECES + (column / PIECE % PIECES ^ change);
        return (down * (COLUMNS / COPY_COLUMNS) + along) * S::THREADS * 16 + piece * 16 +
               column % PIECE * SIZE;
    }
};

// Reads columns and changes the signs whose bits are set in `flips`.
__device__ inline void unpack(float* x, const float* p, const uint4& flips) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(p);
    x[0] = __uint_as_float(loaded.x ^ flips.x), x[1] = __uint_as_float(loaded.y ^ flips.y);
    x[2] = __uint_as_float(loaded.z ^ flips.z), x[3] = __uint_as_float(loaded.w ^ flips.w);
}
template <class T>
__device__ void unpack(float* x, const T* p, const uint4& flips) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(p);
    const uint32_t words[] = {loaded.x ^ flips.x, loaded.y ^ flips.y, loaded.z ^ flips.z,
                              loaded.w ^ flips.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        x[2 * i] = low_to_float<T>(words[i]), x[2 * i + 1] = high_to_float<T>(words[i]);
}

// The signs of columns, as bits of the numbers that lanes read at once, in their order.
template <class T, int COLUMNS, int LANES>
__device__ void write_flips(uint32_t* flips, const uint32_t (&signs)[8]) {
    using S = Shape<COLUMNS, LANES>;
    constexpr int PIECE = Copied<COLUMNS, LANES, sizeof(T)>::PIECE;
    constexpr int COUNT = 4 / sizeof(T);  // of a word
    for (int i = threadIdx.x; i < COLUMNS / COUNT; i += S::THREADS) {
        const int piece = i / 4, first = piece / LANES * PIECE;
        const int column =
            S::column_before(first / S::UNIT, piece % LANES) + first % S::UNIT + i % 4 * COUNT;
        const uint32_t its = signs[column / 32] >> column % 32;
        flips[i] = COUNT == 2 ? (its & 1) << 15 | (its & 2) << 30 : its << 31;
    }
}

// A thread's part in reading the tiles of all turns.
template <class T, int COLUMNS, int LANES, bool HADAMARD>
struct Reader {
    using S = Shape<COLUMNS, LANES>;
    using C = Copied<COLUMNS, LANES, sizeof(T)>;
    static constexpr int UNITS = S::UNITS, UNIT = S::UNIT;

    const QuantizeParams& p;
    const Place* places;
    unsigned char* ahead;   // copies
    const uint32_t* flips;  // see `write_flips`
    const int steps, lane;  // parts of tiles, of all turns
    // What this thread copies: its first row of a part, how many columns of x follow its first one,
    // where that is in x, and where it goes, in bytes of `ahead`.
    int row_copied, columns_copied, copied;
    const T* from;
    int part_of_row, read;  // which part has this thread's row, and where it reads that

    __device__ Reader(const QuantizeParams& p, const Place* places, unsigned char* ahead,
                      const uint32_t* flips, int turns)
        : p(p),
          places(places),
          ahead(ahead),
          flips(flips),
          steps(turns * C::PARTS),
          lane(threadIdx.x % LANES) {
        const int warp = threadIdx.x / 32, row = threadIdx.x / LANES;
        const int column_copied = threadIdx.x % C::PIECES * C::PIECE;
        row_copied = warp * S::WARP_ROWS + threadIdx.x % 32 / C::PIECES;
        columns_copied = p.head_dim - column_copied;
        from = static_cast<const T*>(p.x.data) + row_copied * p.x.stride_seq + column_copied;
        copied = warp * 512 + C::place(row_copied % S::WARP_ROWS, column_copied);
        part_of_row = row % S::WARP_ROWS / C::PART_ROWS;
        read = warp * 512 + C::place(row % C::PART_ROWS,
                                     HADAMARD ? S::column_before(0, lane) : S::column(0, lane));
        computed_here(row_copied), computed_here(columns_copied), computed_here(from);
        computed_here(copied), computed_here(read);
    }

    __device__ void start() const { copy(0); }
    // Reads this thread's part of the tile of a turn, with the signs of the transform, and begins
    // to copy what comes next.
    __device__ void get(float (&x)[UNITS][UNIT], int turn) const {
#pragma unroll 1
        for (int part = 0; part < C::PARTS; ++part) {
            cp_async_wait<0>();
            __syncwarp();
            if (part == part_of_row)
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
#pragma unroll
                    for (int e = 0; e < UNIT; e += C::PIECE) get_piece(&x[u][e], u, e);
            __syncwarp();
            const int next = turn * C::PARTS + part + 1;
            if (next < steps) copy(next);
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
            cp_async_16(smem_address(ahead + (copied ^ at % 512) + at / 512 * 512),
                        its + down * p.x.stride_seq + along, down < rows && along < columns_copied);
        }
        cp_async_commit();
    }
    __device__ void get_piece(float* x, int unit, int e) const {
        uint4 its_flips = {};
        if constexpr (HADAMARD)
            its_flips =
                reinterpret_cast<const uint4*>(flips)[(unit * UNIT + e) / C::PIECE * LANES + lane];
        // The lowest units and columns change the same bits of a place in all threads.
        constexpr int FIRST = HADAMARD ? LANES : S::STORED / UNIT;
        const int change = C::place(0, unit % FIRST * UNIT + e);
        const int behind = C::place(0, unit / FIRST * FIRST * S::GROUP);
        unpack(x, reinterpret_cast<const T*>(ahead + (read ^ change) + behind), its_flips);
    }
};
