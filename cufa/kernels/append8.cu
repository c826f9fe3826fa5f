// New tokens into a cache of 8 bits: as append.cu, and each row of keys and values has a scale, by
// which its largest number becomes the largest of 8 bits. Bits are those of cufa/cpu/append.py.
#include "append.cuh"

constexpr int LANES = 16;                // of a row: a warp has keys and values of a head
constexpr int MAX_COLUMNS = 256;         // of a row
constexpr int BLOCKS_PER_SM = 5;         // which leaves the registers for a row
constexpr float LEAST = 0x1p-126f;       // scale, whose reciprocal is finite
constexpr float MOST = 0x1.020406p121f;  // scale, 127 of which are finite

// The nearest number of e4m3, ties to even; all GPUs compute it so, as some have no instruction.
__device__ inline uint32_t e4m3_of(float x) {
    if (!(fabsf(x) < INF)) return 0x7f;
    const uint32_t bits = __float_as_uint(fabsf(x));
    // 20 bits of mantissa are lost, and the exponent is less by 120; numbers below the least normal
    // one are multiples of 2^-9.
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t small = __float_as_uint(fabsf(x) + 0x1p14f) - __float_as_uint(0x1p14f);
    return __float_as_uint(x) >> 31 << 7 | (fabsf(x) < 0x1p-6f ? small : normal);
}
// The nearest integer, ties to even: it is in the lowest bits of the sum.
__device__ inline uint32_t integer_of(float x) {
    return __float_as_uint((fabsf(x) < INF ? x : 0.f) + 0x1.8p23f) & 0xff;
}

template <bool INTEGERS, int VEC>
__device__ void store_bytes(unsigned char* to, const float (&x)[VEC], float inverse) {
    uint32_t words[(VEC + 3) / 4] = {};
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const float y = x[i] * inverse;
        words[i / 4] |= (INTEGERS ? integer_of(y) : e4m3_of(y)) << i % 4 * 8;
    }
    if constexpr (VEC == 1)
        *to = words[0];
    else if constexpr (VEC == 4)
        *reinterpret_cast<uint32_t*>(to) = words[0];
    else
        *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
}

template <int VEC>
__device__ void subtract(float (&x)[VEC], const float* mean) {
    constexpr int N = VEC == 1 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < VEC; i += N) {
        float its[N];
        load_chunk(its, mean + i);
#pragma unroll
        for (int e = 0; e < N; ++e) x[i + e] -= its[e];
    }
}

// Numbers that are not finite have no part in the scale of e4m3, which has NaN; there are no such
// integers, and so their scale is NaN.
template <bool INTEGERS, int VEC, bool INTERLEAVED, class T>
__device__ void store_row(const AppendParams& p, const Units<VEC, INTERLEAVED>& units,
                          unsigned char* to, float* scale_to, const T* from, const float* mean,
                          int angle) {
    constexpr int UNITS = MAX_COLUMNS / (VEC * LANES);  // of a lane
    const int lane = threadIdx.x % LANES;
    float x[UNITS][2][VEC] = {};
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = lane + i * LANES;
        if (unit < units.pairs)
            units.turn(p, x[i], from, unit, angle);
        else if (unit < units.count)
            load_chunk(x[i][0], from + units.first(unit));
    }
    if (mean) {
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int unit = lane + i * LANES;
            if (unit < units.count) subtract(x[i][0], mean + units.first(unit));
            if (unit < units.pairs) subtract(x[i][1], mean + units.second(unit));
        }
    }
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < UNITS; ++i)
#pragma unroll
        for (int e = 0; e < 2 * VEC; ++e) {
            const float magnitude = fabsf(x[i][e / VEC][e % VEC]);
            largest = fmaxf(largest, magnitude < INF ? magnitude : INTEGERS ? INF : 0.f);
        }
    largest = lanes_max<LANES>(largest);
    const bool is_finite = largest < INF;
    const float of_largest = fminf(fmaxf(largest / (INTEGERS ? 127.f : 448.f), LEAST), MOST);
    const float scale = !is_finite ? NAN : largest == 0.f ? 1.f : of_largest;
    const float inverse = is_finite ? 1.f / scale : 0.f;
    if (lane == 0) *scale_to = scale;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = lane + i * LANES;
        if (unit < units.count) store_bytes<INTEGERS>(to + units.first(unit), x[i][0], inverse);
        if (unit < units.pairs) store_bytes<INTEGERS>(to + units.second(unit), x[i][1], inverse);
    }
}

// Blocks of a token follow each other. A thread has one unit of the queries; behind these, a warp
// has the rows of a head.
template <class T, int VEC, bool INTERLEAVED, bool INTEGERS>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    append8(const __grid_constant__ AppendParams p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const Units<VEC, INTERLEAVED> units(p.rotary_dim, p.head_dim);
    const int of_queries = (p.heads_q * units.count + 31) / 32 * 32;
    const int parts = (of_queries + 32 * p.heads_kv + THREADS - 1) / THREADS;
    const Token token(p, blockIdx.x / parts);
    const int item = blockIdx.x % parts * THREADS + threadIdx.x;
    if (item < of_queries) {
        if (item >= p.heads_q * units.count) return;
        const int head = item / units.count;
        units.copy(p, row_ptr<T>(p.turned_q, token.batch, head, token.seq),
                   row_ptr<const T>(p.q, token.batch, head, token.seq), item % units.count,
                   token.angle, token.is_new);
        return;
    }
    const int head = (item - of_queries) / 32;
    if (!token.is_written(p) || head >= p.heads_kv) return;
    const bool is_v = threadIdx.x % 32 >= LANES;
    const Tensor &source = is_v ? p.v : p.k, &cache = is_v ? p.v_cache : p.k_cache;
    const Tensor& scales = is_v ? p.v_scale : p.k_scale;
    const Units<VEC, INTERLEAVED> its = is_v ? Units<VEC, INTERLEAVED>(0, p.head_dim_v) : units;
    const float* mean =
        is_v || !p.k_mean.data ? nullptr : head_ptr<const float>(p.k_mean, token.batch, head);
    store_row<INTEGERS>(p, its, row_ptr<unsigned char>(cache, token.page, head, token.slot),
                        row_ptr<float>(scales, token.page, head, token.slot),
                        row_ptr<const T>(source, token.batch, head, token.seq), mean, token.angle);
}
