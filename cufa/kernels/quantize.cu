// Arrays of 16 or 32 bits to e4m3 with scales, as cufa.quantize does on NumPy arrays: signs and a
// Hadamard transform of each row (Shah et al. 2024, section 3.3), the largest magnitude of the rows
// that share a scale, conversion. A tile has 128 rows of a head, in registers: what shares a scale
// within a tile is read once. A block of threads takes tiles in turn, and copies the next one to
// shared memory while it computes on this one. Rows that do not count are zeros.
#include "hadamard.cuh"
#include "ptx_e4m3.cuh"
#include "quantize_read.cuh"
#include "quantize_write.cuh"

constexpr float LEAST_SCALE = 0x1p-126f;  // its reciprocal is finite

enum Pass {
    WHOLE,    // scales of up to ROWS rows
    LARGEST,  // looks for the largest magnitude of what shares a scale
    CONVERT   // by the largest that was found
};

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

template <class T, int COLUMNS, bool HADAMARD, bool TRANSPOSED, int PASS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    quantize(const __grid_constant__ QuantizeParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    using R = Reader<T, COLUMNS, HADAMARD>;
    using Tile = Turned<COLUMNS>;
    constexpr int UNITS = R::UNITS, TOGETHER = COLUMNS & -COLUMNS;
    constexpr float NORM = HADAMARD ? norm<TOGETHER>() : 1.f;
    Place* places = reinterpret_cast<Place*>(smem);
    float* largest_of_warp = reinterpret_cast<float*>(places + TURNS);
    uint32_t* flips = reinterpret_cast<uint32_t*>(largest_of_warp + 2 * WARPS);
    unsigned char* bytes =
        reinterpret_cast<unsigned char*>(flips + HADAMARD * COLUMNS * sizeof(T) / 4);
    unsigned char* ahead = bytes + TRANSPOSED * Tile::BYTES;
    // In a row of launches only the first waits here. Each of the others starts when all blocks of
    // the one in front have passed this line, so after the first has waited.
    if (!p.overlaps) wait_for_kernel_in_front();
    launch_dependents();
    const int warp = threadIdx.x / 32, row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int turns = (p.tiles - 1 - int(blockIdx.x)) / int(gridDim.x) + 1;

    // A thread finds the place of a turn for all others.
    auto find = [&](int turn) {
        // The last tiles come first to be converted: L2 has them.
        const int taken = blockIdx.x + turn * gridDim.x;
        const int tile = PASS == CONVERT ? p.tiles - 1 - taken : taken;
        places[turn % TURNS] = place_of<COLUMNS, TRANSPOSED>(p, tile);
    };
    if (threadIdx.x < min(TURNS, turns)) find(threadIdx.x);
    if constexpr (HADAMARD) write_flips<T, COLUMNS>(flips, p.signs);
    __syncthreads();

    const R reader(p, places, ahead, flips, turns);
    const int sharing = 1 << min(p.block_log2, 7);  // rows of a tile that share a scale
    // Lanes read what the warps found that share a scale: a power of two, of which this is one
    // less.
    const int others = sharing / WARP_ROWS - 1;
    int looked_at = (warp & ~others) + (threadIdx.x & others);
    computed_here(looked_at);

    reader.start();
    for (int turn = 0; turn < turns; ++turn) {
        uint32_t words[UNITS][R::WORDS];
        reader.get(words, turn);
        float x[UNITS][UNIT];
        if constexpr (HADAMARD)
            transform<T, TOGETHER>(x, words);
        else
            unpack<T>(x, words);

        float largest = largest_of(x);
        // Two sets: a fast warp may write its next one while others read.
        float* of_warps = largest_of_warp + turn % 2 * WARPS;
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
            const float scale = largest == 0.f ? 1.f : fmaxf(over_448(largest * NORM), LEAST_SCALE);
            if (lane == 0 && row < place.stored && (row & (sharing - 1)) == 0)
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
            unsigned char* to = TRANSPOSED ? bytes + Tile::row_place(row) + lane * UNIT
                                           : p.values + place.to + (row * COLUMNS + lane * UNIT);
            if (TRANSPOSED || row < place.stored)
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    const int column = TRANSPOSED ? Tile::column_place(row, u * SPAN) : u * SPAN;
                    *reinterpret_cast<uint2*>(to + column) = {y[u][0], y[u][1]};
                }
            if constexpr (TRANSPOSED) {
                __syncthreads();
                write_transposed<COLUMNS>(p.values + place.to, bytes);
            }
        }
        // All have passed this turn's barrier: nobody reads the places of turns in front any more.
        const int found = turn + TURNS / 2 + threadIdx.x;
        if (turn % (TURNS / 2) == 0 && threadIdx.x < TURNS / 2 && found < turns) find(found);
    }
    if (p.overlaps) wait_for_kernel_in_front();  // whoever waits for this one waits for both
}
