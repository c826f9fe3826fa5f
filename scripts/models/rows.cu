// Operations on whole rows between products, a block for each row.
#include "chunk.cuh"
#include "gates.cuh"
#include "keys.cuh"
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

// y = gate(a) b of rows of a and b side by side, `width` elements each (Shazeer 2020), VEC at once.
template <class T, int VEC, int THREADS, Gate GATE>
__global__ void __launch_bounds__(THREADS) gated(const T* x, T* y, int width) {
    let_next_begin();
    x += 2ll * blockIdx.x * width;
    y += static_cast<long long>(blockIdx.x) * width;
    wait_for_previous();
    for (int i = VEC * threadIdx.x; i < width; i += VEC * THREADS) {
        float a[VEC], b[VEC];
        load_chunk(a, x + i);
        load_chunk(b, x + width + i);
#pragma unroll
        for (int e = 0; e < VEC; ++e) a[e] = gate<GATE>(a[e], b[e]);
        store_chunk(y + i, a);
    }
}

// The place of each row's largest element, of several the first.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) largest(const float* x, long long* place, int width) {
    extern __shared__ __align__(16) float smem[];
    int* places = reinterpret_cast<int*>(smem + THREADS / 32);
    let_next_begin();
    wait_for_previous();
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

// A bound such that `count` keys are not below it: a search digit by digit. `each` hands all keys of this thread over.
template <int THREADS, class Each>
__device__ uint64_t bound_of(int count, int* bins, Each each) {
    constexpr int DIGITS = 256;
    uint64_t bound = 0;  // its leading digits
    for (int shift = 56;; shift -= 8) {
        for (int i = threadIdx.x; i < DIGITS; i += THREADS) bins[i] = 0;
        __syncthreads();
        each([&](uint64_t key) {
            if (shift == 56 || key >> (shift + 8) == bound) atomicAdd(bins + (key >> shift) % DIGITS, 1);
        });
        __syncthreads();
        int digit = DIGITS - 1;
        while (count > bins[digit]) count -= bins[digit--];
        const bool found = count == bins[digit];
        bound = bound << 8 | digit;
        __syncthreads();
        if (found || shift == 0) return bound << shift;
    }
}

// The places of each row's `count` largest elements, at most THREADS, from the largest on.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) top(const float* x, long long* places, int width, int count) {
    extern __shared__ __align__(16) float smem[];
    uint64_t* keys = reinterpret_cast<uint64_t*>(smem);
    int* bins = reinterpret_cast<int*>(keys + THREADS);
    const int thread = threadIdx.x;
    let_next_begin();
    wait_for_previous();
    x += static_cast<long long>(blockIdx.x) * width;
    // `count` threads have an element that is not below the bound of their largest ones: so few need be looked at.
    uint64_t most = 0;
#pragma unroll 8
    for (int i = thread; i < width; i += THREADS) most = max(most, key_of(x[i], i));
    const uint64_t least = bound_of<THREADS>(count, bins, [&](auto take) { take(most); });
    auto each = [&](auto take) {
#pragma unroll 8
        for (int i = thread; i < width; i += THREADS) {
            const uint64_t key = key_of(x[i], i);
            if (key >= least) take(key);
        }
    };
    const uint64_t bound = bound_of<THREADS>(count, bins, each);
    keys[thread] = 0;
    if (thread == 0) *bins = 0;
    __syncthreads();
    each([&](uint64_t key) {
        if (key >= bound) keys[atomicAdd(bins, 1)] = key;
    });
    for (int size = 2; size <= THREADS; size *= 2) {  // bitonic
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            const int other = thread ^ step;
            const uint64_t a = keys[thread], b = keys[other];
            const bool larger = ((thread & size) == 0) == (thread < other);  // is kept here
            __syncthreads();
            keys[thread] = larger ? max(a, b) : min(a, b);
        }
    }
    if (thread < count) places[static_cast<long long>(blockIdx.x) * count + thread] = place_of(keys[thread]);
}
