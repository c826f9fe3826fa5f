// What is done with whole rows between products, a block for each row.
#include "chunk.cuh"
#include "silu.cuh"
#include "streams.cuh"

// The sum of all threads of a block.
template <int THREADS>
__device__ float block_sum(float x, float* shared) {
    x = lanes_sum<32>(x);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    return lanes_sum<32>(threadIdx.x % 32 < THREADS / 32 ? shared[threadIdx.x % 32] : 0.f);
}

// y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019). Rows are heads of tokens, with weights of their own;
// the heads of a token follow each other, and y may be x.
template <class T, class U, int THREADS>
__global__ void __launch_bounds__(THREADS)
rms_norm(const T* x, const float* weight, U* y, float eps, int width, int heads, int stride_x, int stride_y) {
    extern __shared__ __align__(16) float smem[];
    constexpr int UNROLL = 8;
    let_next_begin();
    const int token = blockIdx.x / heads, head = blockIdx.x % heads;
    x += static_cast<long long>(token) * stride_x + head * width;
    y += static_cast<long long>(token) * stride_y + head * width;
    weight += head * width;
    wait_for_previous();
    float sum = 0.f;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < width; i += THREADS) sum += to_float(x[i]) * to_float(x[i]);
    const float scale = 1.f / sqrtf(block_sum<THREADS>(sum, smem) / width + eps);
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < width; i += THREADS) y[i] = from_float<U>(to_float(x[i]) * scale * weight[i]);
}

// y = silu(a) b of rows of a and b side by side, `width` elements each (SwiGLU, Shazeer 2020), VEC at once.
template <class T, int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS) swiglu(const T* x, T* y, int width) {
    let_next_begin();
    x += 2ll * blockIdx.x * width;
    y += static_cast<long long>(blockIdx.x) * width;
    wait_for_previous();
    for (int i = VEC * threadIdx.x; i < width; i += VEC * THREADS) {
        float a[VEC], b[VEC];
        load_chunk(a, x + i);
        load_chunk(b, x + width + i);
#pragma unroll
        for (int e = 0; e < VEC; ++e) a[e] = silu(a[e]) * b[e];
        store_chunk(y + i, a);
    }
}

// The place of each row's largest element, of several the first.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) largest(const float* x, long long* place, int width) {
    extern __shared__ __align__(16) float smem[];
    int* places = reinterpret_cast<int*>(smem + THREADS / 32);
    x += static_cast<long long>(blockIdx.x) * width;
    float most = -INF;
    int at = width;
    auto take = [&](float other, int place_of_other) {
        if (other > most || (other == most && place_of_other < at)) most = other, at = place_of_other;
    };
    auto reduce = [&] {
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const float other = __shfl_xor_sync(0xffffffff, most, i);
            take(other, __shfl_xor_sync(0xffffffff, at, i));
        }
    };
#pragma unroll 8
    for (int i = threadIdx.x; i < width; i += THREADS) take(x[i], i);
    reduce();
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = most, places[threadIdx.x / 32] = at;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    most = lane < THREADS / 32 ? smem[lane] : -INF;
    at = lane < THREADS / 32 ? places[lane] : width;
    reduce();
    if (threadIdx.x == 0) place[blockIdx.x] = at < width ? at : 0;  // of NaN alone
}
