// Attention over a set of keys from attention over its parts (FlashAttention-2's combination of two
// blocks, Dao 2023, section 2.3.1; for any number): out = sum_i w_i out_i / sum_i w_i with w_i =
// exp(lse_i - max_j lse_j).
#include "chunk.cuh"

constexpr int THREADS = 256;
constexpr int MAX_PARTS = 128;  // that the parameter has room for

struct Part {
    const void* out;
    const float* lse;
};

// A (batch, heads, seq) grid of rows; strides are in elements.
struct Strides {
    long long batch, head, seq;
    __device__ long long offset(int b, int h, int s) const {
        return b * batch + h * head + s * seq;
    }
};

// cufa/specs/merge.py holds the same layout as a NumPy dtype.
struct MergeParams {
    void* out;
    float* lse;                              // (batch, heads, seq)
    Strides of_out, of_parts, of_part_lses;  // those of all parts are the same
    int rows, heads, seq, head_dim, parts;   // rows = batch * heads * seq
    Part part[MAX_PARTS];
    const Part* others;  // those beyond

    __device__ Part at(int i) const { return i < MAX_PARTS ? part[i] : others[i - MAX_PARTS]; }
};

// A thread merges VEC elements of a row: T of the parts, U of the result.
template <class T, class U, int VEC>
__global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ MergeParams p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const int chunks = p.head_dim / VEC;
    const int rows = THREADS / chunks;  // of a block
    const int in_block = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    const long long row = blockIdx.x * static_cast<long long>(rows) + in_block;
    if (in_block >= rows || row >= p.rows) return;
    const int s = static_cast<int>(row) % p.seq, of_head = static_cast<int>(row) / p.seq;
    const int h = of_head % p.heads, b = of_head / p.heads;
    const long long part_offset = p.of_parts.offset(b, h, s) + chunk * VEC;
    const long long lse_offset = p.of_part_lses.offset(b, h, s);

    float m = -INF;  // NaN is left out of it, and comes in by its weight
    for (int i = 0; i < p.parts; ++i) m = fmaxf(m, p.at(i).lse[lse_offset]);

    float acc[VEC] = {}, sum = 0.f;
    for (int i = 0; i < p.parts; ++i) {
        const Part part = p.at(i);
        const float lse = part.lse[lse_offset];
        if (lse == -INF) continue;  // it has seen no key: its output means nothing
        const float weight = lse == m ? 1.f : expf(lse - m);  // of infinities, too
        float x[VEC];
        load_chunk(x, static_cast<const T*>(part.out) + part_offset);
#pragma unroll
        for (int e = 0; e < VEC; ++e) acc[e] = fmaf(weight, x[e], acc[e]);
        sum += weight;
    }

#pragma unroll
    for (int e = 0; e < VEC; ++e) acc[e] = sum == 0.f ? 0.f : acc[e] / sum;
    store_chunk(static_cast<U*>(p.out) + p.of_out.offset(b, h, s) + chunk * VEC, acc);
    if (chunk == 0) p.lse[row] = sum == 0.f ? -INF : m + logf(sum);
}
