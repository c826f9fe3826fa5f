// Keys or values of a cache of 8 bits as arrays of 16 or 32 bits, in one piece, for attention.
#include "chunk.cuh"
#include "params.cuh"

constexpr int THREADS = 128;
constexpr int CHUNK = 16;  // columns of a thread

// cufa/specs/expand8.py holds the same layout as a NumPy dtype.
struct ExpandParams {
    Tensor values, scales;  // (pages, heads, page_size, ...), as append8.cu writes them
    Tensor mean;            // (batch, heads, dim) that was taken off, or null
    Tensor out;             // (batch, heads, seq, CHUNK * chunks)
    const int* table;       // (batch, pages_a_sequence), or null: sequence b is page b
    long long table_stride;
    int heads, seq, chunks, dim;
    int page_size, pages;
};

template <bool INTEGERS>
__device__ float number_of(uint32_t byte) {
    if constexpr (INTEGERS) return static_cast<float>(static_cast<signed char>(byte));
    const uint32_t magnitude = byte & 0x7f;
    if (magnitude == 0x7f) return NAN;
    // float16 has one more bit of exponent, and a bias that is larger by 8.
    const uint32_t bits = (byte & 0x80) << 8 | magnitude << 7;
    return to_float(float16{static_cast<unsigned short>(bits)}) * 256.f;
}

// A block has some rows of a head.
template <class T, bool INTEGERS>
__global__ void __launch_bounds__(THREADS) expand8(const __grid_constant__ ExpandParams p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const int rows = THREADS / p.chunks, parts = (p.seq + rows - 1) / rows;
    const int batch = blockIdx.x / parts / p.heads, head = blockIdx.x / parts % p.heads;
    const int row_of_block = threadIdx.x / p.chunks, column = threadIdx.x % p.chunks * CHUNK;
    const int row = blockIdx.x % parts * rows + row_of_block;
    if (row_of_block >= rows || row >= p.seq) return;
    const int page = p.table ? p.table[batch * p.table_stride + row / p.page_size] : batch;
    if (page < 0 || page >= p.pages) return;
    const int slot = row % p.page_size;
    const unsigned char* from =
        head_ptr<const unsigned char>(p.values, page, head) + slot * p.values.stride_seq + column;
    const float scale = head_ptr<const float>(p.scales, page, head)[slot * p.scales.stride_seq];
    const uint4 loaded = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    float x[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        x[i] = number_of<INTEGERS>(words[i / 4] >> i % 4 * 8 & 0xff) * scale;
    if (p.mean.data) {
        const float* mean = head_ptr<const float>(p.mean, batch, head) + column;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (column + i < p.dim) x[i] += mean[i];
    }
    store_chunk(head_ptr<T>(p.out, batch, head) + row * p.out.stride_seq + column, x);
}
