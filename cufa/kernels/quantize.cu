// Arrays of 16 or 32 bits to e4m3 with scales, as cufa.quantize does on NumPy arrays, and with its
// bits: signs and a Hadamard transform along a row (Shah et al. 2024, section 3.3), the largest
// magnitude of the rows that share a scale, conversion. A tile has 128 rows of a head, in
// registers: what shares a scale within a tile is read once. A block of threads takes tiles in
// turn, and copies one to shared memory while it computes on the tile in front. Rows that do not
// count are zeros.
#include "hadamard.cuh"
#include "ptx_convert.cuh"
#include "ptx_expand.cuh"
#include "ptx_quantize.cuh"
#include "quantize_params.cuh"

constexpr int KEYS = 16;            // of a tile that a thread transposes at once
constexpr int TURNS = 8;            // whose places are in shared memory
constexpr float LEAST = 0x1p-126f;  // scale, whose reciprocal is finite

// The threads of a block: LANES to a row, of which TOGETHER columns are transformed together. A
// thread has units of columns, see hadamard.cuh. cufa/specs/quantize.py has the same numbers.
template <int COLUMNS, int LANES>
struct Shape {
    static constexpr int THREADS = ROWS * LANES, WARPS = THREADS / 32, WARP_ROWS = 32 / LANES;
    static constexpr int TOGETHER = COLUMNS & -COLUMNS, GROUP = TOGETHER / LANES;
    static constexpr int UNIT = GROUP / LANES, UNITS = COLUMNS / GROUP;
    // Bytes that a lane stores at once: so the lanes of a row store SPAN, a sector of L2 or more.
    static constexpr int STORED = GROUP < 32 ? GROUP : UNIT, SPAN = LANES * STORED;
    static constexpr int BYTES = ROWS * COLUMNS + ROWS / KEYS * 16;  // of a tile to be transposed

    // The first column of a unit, as it is stored and before the transform.
    __device__ static constexpr int column(int unit, int lane) {
        return unit * UNIT / STORED * SPAN + lane * STORED + unit * UNIT % STORED;
    }
    __device__ static constexpr int column_before(int unit, int lane) {
        return unit / LANES * TOGETHER + lane * GROUP + (unit % LANES ^ lane) * UNIT;
    }
    // Where a tile to be transposed has a row, and where the row has a column. Lanes read from
    // their own banks, of rows that are KEYS apart, and write to them: spans change places.
    __device__ static constexpr int row_place(int row) { return row * COLUMNS + row / KEYS * 16; }
    __device__ static constexpr int column_place(int row, int column) {
        constexpr int APART = TOGETHER < 128 ? 128 / TOGETHER : 1;  // rows of the same banks
        return column ^ row / APART % (128 / SPAN / APART) * SPAN;
    }
};

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

enum Pass {
    WHOLE,    // scales of up to ROWS rows
    LARGEST,  // looks for the largest magnitude of what shares a scale
    CONVERT   // by the largest that was found
};

// Where the tile of a turn is.
struct alignas(16) Place {
    long long from;     // elements of x in front of its first row
    int rows, padding;  // of x that count, from there on
    long long to;       // bytes of values in front of it
    int stored, scale;  // how many of its rows are stored; its first scale
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

// The largest magnitude of finite numbers; the others become NaN.
template <int UNITS, int UNIT>
__device__ float largest_of(float (&x)[UNITS][UNIT]) {
    float largest = 0.f;
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
        for (int e = 0; e < UNIT; ++e) largest = max_or_nan(largest, fabsf(x[u][e]));
    if (largest < INF) return largest;
    largest = 0.f;
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
        for (int e = 0; e < UNIT; ++e) {
            x[u][e] = fmaf(x[u][e], 0.f, x[u][e]);  // NaN for infinities
            largest = fmaxf(largest, fabsf(x[u][e]));
        }
    return largest;
}

// The largest number of all lanes; none is negative.
__device__ inline float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(x)));
}

// Columns in e4m3 that follow each other.
template <int BYTES>
__device__ void store_bytes(unsigned char* to, const uint32_t* y) {
    if constexpr (BYTES == 8)
        *reinterpret_cast<uint2*>(to) = {y[0], y[1]};
    else
        *reinterpret_cast<uint4*>(to) = {y[0], y[1], y[2], y[3]};
}

// Writes a tile as (COLUMNS, ROWS), where keys have the order 0 1 8 9 2 3 10 11 ... of 16, as wgmma
// of 8 bits takes weights from the registers in which wgmma leaves scores.
template <int COLUMNS, int LANES>
__device__ void write_transposed(unsigned char* to, const unsigned char* tile) {
    using S = Shape<COLUMNS, LANES>;
    constexpr int GROUPS = ROWS / KEYS, QUAD = 4;  // columns of a thread
// A thread seldom has two.
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUPS * COLUMNS / QUAD; i += S::THREADS) {
        const int group = i % GROUPS, column = i / GROUPS * QUAD;
        const unsigned char* from = tile + S::row_place(group * KEYS);
        uint32_t y[QUAD][KEYS / 4];
#pragma unroll
        for (int j = 0; j < KEYS / 4; ++j) {
            uint32_t x[4];  // of four keys
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int key = 2 * j + n % 2 + n / 2 * 8;
                x[n] = *reinterpret_cast<const uint32_t*>(from + key * COLUMNS +
                                                          S::column_place(key, column));
            }
            const uint32_t low01 = permuted(x[0], x[1], 0x5140),
                           low23 = permuted(x[2], x[3], 0x5140);
            const uint32_t up01 = permuted(x[0], x[1], 0x7362), up23 = permuted(x[2], x[3], 0x7362);
            y[0][j] = permuted(low01, low23, 0x5410), y[1][j] = permuted(low01, low23, 0x7632);
            y[2][j] = permuted(up01, up23, 0x5410), y[3][j] = permuted(up01, up23, 0x7632);
        }
#pragma unroll
        for (int c = 0; c < QUAD; ++c)
            *reinterpret_cast<uint4*>(to + (column + c) * ROWS + group * KEYS) = {y[c][0], y[c][1],
                                                                                  y[c][2], y[c][3]};
    }
}

template <class T, int COLUMNS, bool HADAMARD, bool TRANSPOSED, int PASS, int LANES, int BLOCKS>
__global__ void __launch_bounds__(Shape<COLUMNS, LANES>::THREADS, BLOCKS)
    quantize(const __grid_constant__ QuantizeParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    using S = Shape<COLUMNS, LANES>;
    constexpr int UNITS = S::UNITS, UNIT = S::UNIT;
    using C = Copied<COLUMNS, LANES, sizeof(T)>;
    constexpr float NORM = HADAMARD ? norm<S::TOGETHER>() : 1.f;
    Place* places = reinterpret_cast<Place*>(smem);
    float* largest_of_warp = reinterpret_cast<float*>(places + TURNS);
    uint32_t* flips = reinterpret_cast<uint32_t*>(largest_of_warp + 2 * S::WARPS);
    unsigned char* bytes =
        reinterpret_cast<unsigned char*>(flips + HADAMARD * COLUMNS * sizeof(T) / 4);
    unsigned char* ahead = bytes + TRANSPOSED * S::BYTES;
    // A launch that overlaps follows one that has waited here, and has all of its blocks running.
    if (!p.overlaps) wait_for_kernel_in_front();
    launch_dependents();
    const int warp = threadIdx.x / 32, row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int turns = (p.tiles - 1 - int(blockIdx.x)) / int(gridDim.x) + 1;

    // A thread finds the place of a turn for all others.
    auto find = [&](int turn) {
        // The last tiles come first to be converted: L2 has them.
        const int taken = blockIdx.x + turn * gridDim.x;
        const int tile = PASS == CONVERT ? p.tiles - 1 - taken : taken;
        const int head = p.blocks.quotient(tile), block = tile - head * p.blocks.divisor;
        const int batch = p.heads.quotient(head), head_of_batch = head - batch * p.heads.divisor;
        const RowsOfTile its = rows_of_tile(p, batch, block);
        Place& place = places[turn % TURNS];
        place.from =
            batch * p.x.stride_batch + head_of_batch * p.x.stride_head + its.first * p.x.stride_seq;
        place.rows = its.count;
        const long long row = TRANSPOSED ? static_cast<long long>(tile) * ROWS
                                         : static_cast<long long>(head) * p.seq + block * ROWS;
        place.to = row * COLUMNS;
        place.stored = p.seq - block * ROWS;
        place.scale = head * p.scales_a_head + (block * ROWS >> p.block_log2);
    };
    if (threadIdx.x < min(TURNS, turns)) find(threadIdx.x);
    if constexpr (HADAMARD) {                 // in the order in which lanes read them
        constexpr int COUNT = 4 / sizeof(T);  // of a word
        for (int i = threadIdx.x; i < COLUMNS / COUNT; i += S::THREADS) {
            const int piece = i / 4, first = piece / LANES * C::PIECE;
            const int column =
                S::column_before(first / UNIT, piece % LANES) + first % UNIT + i % 4 * COUNT;
            const uint32_t its = p.signs[column / 32] >> column % 32;
            flips[i] = COUNT == 2 ? (its & 1) << 15 | (its & 2) << 30 : its << 31;
        }
    }
    __syncthreads();

    const int column_copied = threadIdx.x % C::PIECES * C::PIECE;
    int row_copied = warp * S::WARP_ROWS + threadIdx.x % 32 / C::PIECES;
    int columns_copied = p.head_dim - column_copied;
    const T* from = static_cast<const T*>(p.x.data) + row_copied * p.x.stride_seq + column_copied;
    int copied = warp * 512 + C::place(row_copied % S::WARP_ROWS, column_copied);
    auto copy = [&](int step) {
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
    };
    const int part_of_row = row % S::WARP_ROWS / C::PART_ROWS;
    int read = warp * 512 + C::place(row % C::PART_ROWS,
                                     HADAMARD ? S::column_before(0, lane) : S::column(0, lane));
    auto unpack_of = [&](float* x, int unit, int e) {
        uint4 its_flips = {};
        if constexpr (HADAMARD)
            its_flips =
                reinterpret_cast<const uint4*>(flips)[(unit * UNIT + e) / C::PIECE * LANES + lane];
        // The lowest units and columns change the same bits of a place in all threads.
        constexpr int FIRST = HADAMARD ? LANES : S::STORED / UNIT;
        const int change = C::place(0, unit % FIRST * UNIT + e);
        const int behind = C::place(0, unit / FIRST * FIRST * S::GROUP);
        unpack(x, reinterpret_cast<const T*>(ahead + (read ^ change) + behind), its_flips);
    };
    // The warps that share a scale, less one: their number is a power of two.
    const int others = (1 << min(p.block_log2, 7)) / S::WARP_ROWS - 1;
    int looked_at = (warp & ~others) + (threadIdx.x & others);
    computed_here(row_copied), computed_here(columns_copied), computed_here(from);
    computed_here(copied), computed_here(read), computed_here(looked_at);

    const int steps = turns * C::PARTS;
    copy(0);
    for (int turn = 0; turn < turns; ++turn) {
        float x[UNITS][UNIT];
#pragma unroll 1
        for (int part = 0; part < C::PARTS; ++part) {
            cp_async_wait<0>();
            __syncwarp();
            if (part == part_of_row)
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
#pragma unroll
                    for (int e = 0; e < UNIT; e += C::PIECE) unpack_of(&x[u][e], u, e);
            __syncwarp();
            const int next = turn * C::PARTS + part + 1;
            if (next < steps) copy(next);
        }
        if constexpr (HADAMARD) transform<LANES>(x, lane);

        float largest = largest_of(x);
        float* of_warps = largest_of_warp + turn % 2 * S::WARPS;
        if constexpr (PASS != CONVERT) {
            largest = warp_max(largest);
            if (threadIdx.x % 32 == 0) of_warps[warp] = largest;
        }
        __syncthreads();
        if constexpr (PASS != CONVERT) largest = warp_max(of_warps[looked_at]);
        const Place place = places[turn % TURNS];
        const int scale_at = place.scale + (row >> p.block_log2);
        if constexpr (PASS == LARGEST) {
            if (threadIdx.x == 0) red_max(p.largest + scale_at, __float_as_uint(largest));
        } else {
            if constexpr (PASS == CONVERT) largest = __uint_as_float(p.largest[scale_at]);
            const float scale = largest == 0.f ? 1.f : fmaxf(by_448(largest * NORM), LEAST);
            if (lane == 0 && row < place.stored && (row & ((1 << min(p.block_log2, 7)) - 1)) == 0)
                p.scales[scale_at] = scale;

            const float factor = reciprocal(scale) * NORM;
            uint32_t y[UNITS][UNIT / 4];
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
#pragma unroll
                for (int i = 0; i < UNIT / 4; ++i) {
                    float four[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e)  // signs make -0 of zeros: the sum is 0
                        four[e] = HADAMARD ? fmaf(x[u][4 * i + e], factor, 0.f)
                                           : x[u][4 * i + e] * factor;
                    y[u][i] = pack4_e4m3(four[0], four[1], four[2], four[3]);
                }
            if constexpr (HADAMARD) {
                if constexpr (UNIT < S::STORED) exchange<LANES>(y);  // back
                put_in_order<LANES>(y, lane);
            }
            unsigned char* to = TRANSPOSED
                                    ? bytes + S::row_place(row) + S::column(0, lane)
                                    : p.values + place.to + (row * COLUMNS + S::column(0, lane));
            if (TRANSPOSED || row < place.stored)
#pragma unroll
                for (int u = 0; u < UNITS; u += S::STORED / UNIT) {
                    const int span = S::column(u, 0);
                    store_bytes<S::STORED>(to + (TRANSPOSED ? S::column_place(row, span) : span),
                                           y[u]);
                }
            if constexpr (TRANSPOSED) {
                __syncthreads();
                write_transposed<COLUMNS, LANES>(p.values + place.to, bytes);
            }
        }
        // All have come by their places of the turns in front.
        const int found = turn + TURNS / 2 + threadIdx.x;
        if (turn % (TURNS / 2) == 0 && threadIdx.x < TURNS / 2 && found < turns) find(found);
    }
    if (p.overlaps) wait_for_kernel_in_front();  // whoever waits for this one waits for both
}
