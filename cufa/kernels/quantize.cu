// Arrays of 16 or 32 bits to e4m3 with scales, as cufa.quantize does on NumPy arrays, and with its
// bits: signs and a Hadamard transform along a row (Shah et al. 2024, section 3.3), the largest
// magnitude of the rows that share a scale, conversion. A tile has 128 rows of a head, in
// registers: what shares a scale within a tile is read once. A block of threads takes tiles in
// turn, and reads one of 16 bits while it computes on the tile in front. Rows that do not count are
// zeros.
#include "chunk.cuh"
#include "divisor.cuh"
#include "params.cuh"
#include "ptx_expand.cuh"
#include "ptx_quantize.cuh"

constexpr int ROWS = 128;           // of a tile
constexpr int CHUNK = 8;            // columns: a row's threads take its chunks in turn
constexpr int KEYS = 16;            // of a tile that a thread transposes at once
constexpr float LEAST = 0x1p-126f;  // scale, whose reciprocal is finite

// The threads of a block: LANES to a row. cufa/specs/quantize.py has the same numbers.
template <int COLUMNS, int LANES>
struct Shape {
    static constexpr int THREADS = ROWS * LANES, WARPS = THREADS / 32, WARP_ROWS = 32 / LANES;
    static constexpr int STEP = LANES * CHUNK;     // columns between the chunks of a thread
    static constexpr int CHUNKS = COLUMNS / STEP;  // of a thread
    // Bytes of a row in shared memory: lanes write 8 bytes of their own banks, but with 256
    // columns, since other GPUs have less of that memory.
    static constexpr int PITCH =
        COLUMNS == 256 ? COLUMNS + 8 : (COLUMNS + STEP - 1) / (2 * STEP) * 2 * STEP + STEP;
    static constexpr int LARGEST_BYTES = 2 * WARPS * 4;            // of warps, of two tiles in turn
    static constexpr int BYTES = ROWS * PITCH + ROWS / KEYS * 16;  // of a tile to be transposed
};

enum Pass {
    WHOLE,    // scales of up to ROWS rows
    LARGEST,  // looks for the largest magnitude of what shares a scale
    CONVERT   // by the largest that was found
};

// cufa/specs/quantize.py holds the same layout as a NumPy dtype.
struct QuantizeParams {
    Tensor x;  // (batch, heads, seq, head_dim); head_dim is a multiple of CHUNK
    unsigned char*
        values;         // (batch, heads, seq, COLUMNS), or (batch, heads, blocks, COLUMNS, ROWS)
    float* scales;      // (batch, heads, scales_a_head), or one for all
    uint32_t* largest;  // the same, as bits; 0 in front of LARGEST; null for WHOLE
    const int* cu_seqlens;  // (sequences + 1,): where sequences begin in x that follow each other
    const int* used;        // (sequences,) or (batch,): how many of their rows count; null for all
    uint32_t signs[8];      // a bit for each column
    Divisor heads, blocks;  // of x; of ROWS rows, of a head
    int tiles, rows;        // of all heads; of x
    int seq, head_dim;      // seq: rows of values of a head
    int block_log2;         // log2 of the rows that share a scale
    int scales_a_head;      // 0: one for all
    int sequences;
};

// The rows of x that are in a tile: `count` from `first` on, or as many as a tile has.
struct RowsOfTile {
    int first, count;
};

// Sequences that follow each other begin in blocks of their own, see cufa/quantized/sequences.py.
// No row outside of x is among them, whatever the offsets are.
__device__ inline RowsOfTile rows_of_tile(const QuantizeParams& p, int batch, int block) {
    if (!p.cu_seqlens) {
        const int rows = p.used ? min(max(p.used[batch], 0), p.rows) : p.rows;
        return {block * ROWS, rows - block * ROWS};
    }
    auto first_of = [&](int i) { return min(max(p.cu_seqlens[i], 0), p.rows); };
    int i = 0;
    for (int more = p.sequences - 1; i < more;) {  // the last that begins at this block or before
        const int middle = i + (more - i + 1) / 2;
        if (first_of(middle) / ROWS + middle <= block)
            i = middle;
        else
            more = middle - 1;
    }
    const int first = first_of(i), before = max(block - first / ROWS - i, 0) * ROWS;
    const int rows = max(first_of(i + 1) - first, 0);
    return {first + before, (p.used ? min(rows, max(p.used[i], 0)) : rows) - before};
}

// Columns that are transformed together.
template <int COLUMNS>
constexpr int together() {
    return COLUMNS & -COLUMNS;
}
template <int N>
constexpr float one_by_root() {
    return N == 32    ? 0.17677669529663687f
           : N == 64  ? 0.125f
           : N == 128 ? 0.08838834764831845f
                      : 0.0625f;
}

// The signs of a row that change, of the chunks of a thread: those of columns 2 i and 2 i + 1 of
// chunk k are bits 15 - n and 31 - n, n = 4 k + i, and so are those of two 16-bit numbers after a
// shift.
template <int COLUMNS, int LANES>
__device__ int flips_of(const uint32_t (&signs)[8], int lane, int first) {
    uint32_t flips = 0;
#pragma unroll
    for (int k = 0; k < min(Shape<COLUMNS, LANES>::CHUNKS - first, 4); ++k) {
        const int column = (first + k) * Shape<COLUMNS, LANES>::STEP + lane * CHUNK;
        const uint32_t its = signs[column / 32] >> column % 32;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            flips |= (its >> e & 1) << (e % 2 * 16 + 15 - e / 2 - 4 * k);
    }
    return flips;
}

// Reads a chunk; `flips` are shifted to be those of its first columns.
__device__ inline void unpack(float (&x)[CHUNK], const float* p, uint32_t flips) {
    load_chunk(x, p);
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        x[e] = __uint_as_float(__float_as_uint(x[e]) ^
                               (flips << (16 - e % 2 * 16 + e / 2) & 0x80000000));
}
template <class T>
__device__ void unpack(float (&x)[CHUNK], const T* p, uint32_t flips) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(p);
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t two = words[i] ^ (flips << i & 0x80008000);
        x[2 * i] = low_to_float<T>(two), x[2 * i + 1] = high_to_float<T>(two);
    }
}

// a, b -> a + b, a - b, where b is the one of a higher column.
template <int CHUNKS>
__device__ void butterfly_of_lanes(float (&x)[CHUNKS][CHUNK], int lane, int distance) {
    const float sign = lane & distance ? -1.f : 1.f;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            const float other = __shfl_xor_sync(0xffffffff, x[k][e], distance);
            x[k][e] = x[k][e] * sign + other;  // the product is exact
        }
}

__device__ inline void butterfly(float& a, float& b) {
    const float sum = a + b, difference = a - b;
    a = sum, b = difference;
}

template <int COLUMNS, int LANES, int CHUNKS>
__device__ void transform(float (&x)[CHUNKS][CHUNK], int lane) {
    constexpr int N = together<COLUMNS>(), STEP = Shape<COLUMNS, LANES>::STEP;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
        for (int step = 1; step < CHUNK; step *= 2)
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                if (!(e & step)) butterfly(x[k][e], x[k][e + step]);
#pragma unroll
    for (int distance = 1; distance < STEP / CHUNK; distance *= 2)
        butterfly_of_lanes(x, lane, distance);
#pragma unroll
    for (int step = 1; step < N / STEP; step *= 2)
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                if (!(k & step)) butterfly(x[k][e], x[k + step][e]);
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            x[k][e] = fmaf(x[k][e], one_by_root<N>(), 0.f);  // no -0, which signs make of zeros
}

// The largest magnitude of finite numbers; the others become NaN.
template <int CHUNKS>
__device__ float largest_of(float (&x)[CHUNKS][CHUNK]) {
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) largest = max_or_nan(largest, fabsf(x[k][e]));
    if (largest < INF) return largest;
    largest = 0.f;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            if (!(fabsf(x[k][e]) < INF)) x[k][e] = NAN;
            largest = fmaxf(largest, fabsf(x[k][e]));
        }
    return largest;
}

// The largest number of all lanes; none is negative.
__device__ inline float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(x)));
}

// The chunks of a thread times a factor, in e4m3.
template <int STEP, int CHUNKS>
__device__ void store_e4m3(unsigned char* to, const float (&x)[CHUNKS][CHUNK], float factor) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        float y[CHUNK];
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) y[e] = x[k][e] * factor;
        *reinterpret_cast<uint2*>(to + k * STEP) = {pack4_e4m3(y[0], y[1], y[2], y[3]),
                                                    pack4_e4m3(y[4], y[5], y[6], y[7])};
    }
}

// Where a row of a tile to be transposed begins: the rows that a warp reads at once, KEYS apart,
// are in banks of their own.
template <int COLUMNS, int LANES>
__device__ int row_place(int row) {
    return row * Shape<COLUMNS, LANES>::PITCH + row / KEYS * 16;
}

// Writes a tile as (COLUMNS, ROWS), where keys have the order 0 1 8 9 2 3 10 11 ... of 16, as wgmma
// of 8 bits takes weights from the registers in which wgmma leaves scores.
template <int COLUMNS, int LANES>
__device__ void write_transposed(unsigned char* to, const unsigned char* tile) {
    constexpr int GROUPS = ROWS / KEYS, QUAD = 4;  // columns of a thread
    for (int i = threadIdx.x; i < GROUPS * COLUMNS / QUAD; i += Shape<COLUMNS, LANES>::THREADS) {
        const int group = i % GROUPS, column = i / GROUPS * QUAD;
        const unsigned char* from = tile + row_place<COLUMNS, LANES>(group * KEYS) + column;
        uint32_t y[QUAD][KEYS / 4];
#pragma unroll
        for (int j = 0; j < KEYS / 4; ++j) {
            uint32_t x[4];  // of four keys
#pragma unroll
            for (int n = 0; n < 4; ++n)
                x[n] = *reinterpret_cast<const uint32_t*>(from + (2 * j + n % 2 + n / 2 * 8) *
                                                                     Shape<COLUMNS, LANES>::PITCH);
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
    constexpr int CHUNKS = S::CHUNKS;
    constexpr bool AHEAD = sizeof(T) == 2;  // whether the next tile comes to shared memory
    float* largest_of_warp = reinterpret_cast<float*>(smem);
    unsigned char* bytes = smem + S::LARGEST_BYTES;
    T* ahead = reinterpret_cast<T*>(bytes + TRANSPOSED * S::BYTES) + threadIdx.x * CHUNK;
    launch_dependents();
    wait_for_kernel_in_front();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES;
    const int row_of_tile = threadIdx.x / LANES;
    int flips[(CHUNKS + 3) / 4] = {};
    if constexpr (HADAMARD)
        for (int k = 0; k < CHUNKS; k += 4) {
            flips[k / 4] = flips_of<COLUMNS, LANES>(p.signs, lane, k);
            computed_here(flips[k / 4]);
        }

    // The last tiles come first to be converted: L2 has them.
    auto tile_of = [&](int turn) { return PASS == CONVERT ? p.tiles - 1 - turn : turn; };
    int head, block;  // of all batches; of the head
    bool counts;      // whether our row does
    const T* from;    // our row
    auto find = [&](int tile) {
        head = p.blocks.quotient(tile), block = tile - head * p.blocks.divisor;
        const int batch = p.heads.quotient(head);
        const RowsOfTile its = rows_of_tile(p, batch, block);
        counts = row_of_tile < its.count;
        from = head_ptr<const T>(p.x, batch, head - batch * p.heads.divisor) +
               (counts ? its.first + row_of_tile : 0) * p.x.stride_seq + lane * CHUNK;
        if constexpr (AHEAD) {
#pragma unroll
            for (int k = 0; k < CHUNKS; ++k)
                cp_async_16(smem_address(ahead + k * S::THREADS * CHUNK), from + k * S::STEP,
                            counts && k * S::STEP + lane * CHUNK < p.head_dim);
            cp_async_commit();
        }
    };
    if constexpr (AHEAD) find(tile_of(blockIdx.x));

    for (int turn = blockIdx.x, parity = 0; turn < p.tiles; turn += gridDim.x, parity ^= 1) {
        float x[CHUNKS][CHUNK] = {};
        const int tile = tile_of(turn);
        if constexpr (AHEAD)
            cp_async_wait<0>();
        else
            find(tile);
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
            if constexpr (AHEAD)
                unpack(x[k], ahead + k * S::THREADS * CHUNK,
                       static_cast<uint32_t>(flips[k / 4]) << k % 4 * 4);
            else if (counts && k * S::STEP + lane * CHUNK < p.head_dim)
                unpack(x[k], from + k * S::STEP, static_cast<uint32_t>(flips[k / 4]) << k % 4 * 4);
        const int its_head = head, its_row = block * ROWS + row_of_tile;
        if (AHEAD && turn + gridDim.x < p.tiles) find(tile_of(turn + gridDim.x));
        if constexpr (HADAMARD) transform<COLUMNS, LANES>(x, lane);

        float largest = largest_of(x);
        const int scale_of_head = its_row >> p.block_log2;
        const long long scale_at =
            static_cast<long long>(its_head) * p.scales_a_head + scale_of_head;
        if constexpr (PASS != CONVERT) {
            float* of_warps = largest_of_warp + parity * S::WARPS;
            largest = warp_max(largest);
            if (threadIdx.x % 32 == 0) of_warps[warp] = largest;
            __syncthreads();
            // The warps that share a scale, less one: their number is a power of two.
            const int others = (1 << min(p.block_log2, 7)) / S::WARP_ROWS - 1;
            largest = warp_max(of_warps[(warp & ~others) + (threadIdx.x & others)]);
        }
        if constexpr (PASS == LARGEST) {
            if (threadIdx.x == 0) red_max(p.largest + scale_at, __float_as_uint(largest));
            continue;
        }
        if constexpr (PASS == CONVERT) largest = __uint_as_float(p.largest[scale_at]);
        const float scale = largest == 0.f ? 1.f : fmaxf(largest / 448.f, LEAST);
        if (lane == 0 && its_row < p.seq && (its_row & ((1u << p.block_log2) - 1)) % ROWS == 0)
            p.scales[scale_at] = scale;

        const float inverse = 1.f / scale;
        if constexpr (PASS == CONVERT && TRANSPOSED) __syncthreads();  // the tile in front is out
        unsigned char* to =
            TRANSPOSED ? bytes + row_place<COLUMNS, LANES>(row_of_tile) + lane * CHUNK
                       : p.values + (static_cast<long long>(its_head) * p.seq + its_row) * COLUMNS +
                             lane * CHUNK;
        if (TRANSPOSED || its_row < p.seq) store_e4m3<S::STEP>(to, x, inverse);
        if constexpr (TRANSPOSED) {
            __syncthreads();
            write_transposed<COLUMNS, LANES>(
                p.values + tile * static_cast<long long>(COLUMNS * ROWS), bytes);
        }
    }
}
