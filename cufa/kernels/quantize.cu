// Arrays of 16 or 32 bits to e4m3 with scales, as cufa.quantize does on NumPy arrays, and with its
// bits: signs and a Hadamard transform along a row (Shah et al. 2024, section 3.3), the largest
// magnitude of the rows that share a scale, conversion. A block has 128 rows of a head, and a row
// four threads, which hold it in registers: what shares a scale within a block is read once. Rows
// that do not count are zeros.
#include "chunk.cuh"
#include "params.cuh"
#include "ptx_quantize.cuh"

constexpr int THREADS = 512;
constexpr int LANES = 4;               // threads of a row
constexpr int ROWS = THREADS / LANES;  // of a block
constexpr int WARPS = THREADS / 32, WARP_ROWS = 32 / LANES;
constexpr int CHUNK = 8;               // columns: a row's threads take its chunks in turn
constexpr int STEP = LANES * CHUNK;    // columns between the chunks of a thread
constexpr int PITCH = ROWS + 4;        // bytes of a column in shared memory, so that banks differ
constexpr int LARGEST_BYTES = 4 * 16;  // of shared memory, in front of it: those of warps
constexpr float LEAST = 0x1p-126f;     // scale, whose reciprocal is finite

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
    int heads, rows;        // of x
    int seq, head_dim;      // seq: rows of values of a head
    int blocks;             // of ROWS rows, of a head
    int block_log2;         // log2 of the rows that share a scale
    int scales_a_head;      // 0: one for all
    int sequences;
};

// The rows of x that are in a block: `count` from `first` on, or as many as a block has.
struct RowsOfBlock {
    int first, count;
};

// Sequences that follow each other begin in blocks of their own, see cufa/quantized/sequences.py.
// No row outside of x is among them, whatever the offsets are.
__device__ inline RowsOfBlock rows_of_block(const QuantizeParams& p, int batch, int block) {
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

// a, b -> a + b, a - b, where b is the one of a higher column.
template <int CHUNKS>
__device__ void butterfly_of_lanes(float (&x)[CHUNKS][CHUNK], int lane, int distance) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            const float other = __shfl_xor_sync(0xffffffff, x[k][e], distance);
            x[k][e] = lane & distance ? other - x[k][e] : x[k][e] + other;
        }
}

__device__ inline void butterfly(float& a, float& b) {
    const float sum = a + b, difference = a - b;
    a = sum, b = difference;
}

template <int COLUMNS>
__device__ void transform(float (&x)[COLUMNS / STEP][CHUNK], const uint32_t (&signs)[8], int lane) {
    constexpr int CHUNKS = COLUMNS / STEP, N = together<COLUMNS>();
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const uint32_t its = signs[k] >> lane * CHUNK;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
            x[k][e] = __uint_as_float(__float_as_uint(x[k][e]) ^ (its >> e & 1) << 31);
#pragma unroll
        for (int step = 1; step < CHUNK; step *= 2)
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                if (!(e & step)) butterfly(x[k][e], x[k][e + step]);
    }
    butterfly_of_lanes(x, lane, 1);
    butterfly_of_lanes(x, lane, 2);
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
        for (int e = 0; e < CHUNK; ++e) x[k][e] *= one_by_root<N>();
}

// Where a row's number is in a column of ROWS: keys 0 1 8 9 2 3 10 11 ... of 16, as wgmma of 8 bits
// takes weights from the registers in which wgmma leaves scores.
__device__ inline int place_of(int row) {
    return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

template <class T, int COLUMNS, bool HADAMARD, bool TRANSPOSED, int PASS>
__global__ void __launch_bounds__(THREADS) quantize(const __grid_constant__ QuantizeParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    float* largest_of_warp = reinterpret_cast<float*>(smem);
    constexpr int CHUNKS = COLUMNS / STEP;
    launch_dependents();
    wait_for_kernel_in_front();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES;
    const int row_of_block = threadIdx.x / LANES;
    const int head = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;  // of all batches
    const int row = block * ROWS + row_of_block;

    const RowsOfBlock its = rows_of_block(p, head / p.heads, block);

    float x[CHUNKS][CHUNK] = {};
    if (row_of_block < its.count) {
        const T* from = head_ptr<const T>(p.x, head / p.heads, head % p.heads) +
                        (its.first + row_of_block) * p.x.stride_seq;
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
            const int column = k * STEP + lane * CHUNK;
            if (column < p.head_dim) load_chunk(x[k], from + column);
        }
    }
    if constexpr (HADAMARD) transform<COLUMNS>(x, p.signs, lane);

    float largest = 0.f;  // of finite numbers
    if constexpr (PASS != CONVERT) {
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) {
                const float magnitude = fabsf(x[k][e]);
                largest = fmaxf(largest, magnitude < INF ? magnitude : 0.f);
            }
#pragma unroll
        for (int i = 16; i > 0; i /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, i));
    }
    const long long scale_at = static_cast<long long>(head) * p.scales_a_head;
    if constexpr (PASS == LARGEST) {
        if (threadIdx.x % 32 == 0)
            red_max(p.largest + scale_at + (row >> p.block_log2), __float_as_uint(largest));
        return;
    }
    if constexpr (PASS == WHOLE) {
        if (threadIdx.x % 32 == 0) largest_of_warp[warp] = largest;
        __syncthreads();
        const int warps = min((1 << p.block_log2) / WARP_ROWS, WARPS);  // that share a scale
        const int first = warp / warps * warps;
        for (int i = first; i < first + warps; ++i) largest = fmaxf(largest, largest_of_warp[i]);
    } else {
        largest = __uint_as_float(p.largest[scale_at + (row >> p.block_log2)]);
    }
    const float scale = largest == 0.f ? 1.f : fmaxf(largest / 448.f, LEAST);
    if (lane == 0 && row < p.seq && (row & ((1u << p.block_log2) - 1)) % ROWS == 0)
        p.scales[scale_at + (row >> p.block_log2)] = scale;

    const float inverse = 1.f / scale;
    unsigned char* tile = smem + LARGEST_BYTES;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        float y[CHUNK];
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) y[e] = fabsf(x[k][e]) < INF ? x[k][e] * inverse : NAN;
        uint2 packed = {pack4_e4m3(y[0], y[1], y[2], y[3]), pack4_e4m3(y[4], y[5], y[6], y[7])};
        const int column = k * STEP + lane * CHUNK;
        if constexpr (TRANSPOSED) {
            if (row_of_block >= its.count) packed = {0, 0};  // which signs have made -0
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                tile[(column + e) * PITCH + place_of(row_of_block)] =
                    (e < 4 ? packed.x : packed.y) >> e % 4 * 8;
        } else if (row < p.seq) {
            const long long at = (static_cast<long long>(head) * p.seq + row) * COLUMNS + column;
            *reinterpret_cast<uint2*>(p.values + at) = packed;
        }
    }
    if constexpr (TRANSPOSED) {
        __syncthreads();
        uint32_t* to = reinterpret_cast<uint32_t*>(p.values) +
                       blockIdx.x * static_cast<long long>(COLUMNS * ROWS / 4);
#pragma unroll
        for (int i = threadIdx.x; i < COLUMNS * ROWS / 4; i += THREADS)
            to[i] = *reinterpret_cast<const uint32_t*>(tile + i / (ROWS / 4) * PITCH +
                                                       i % (ROWS / 4) * 4);
    }
}
