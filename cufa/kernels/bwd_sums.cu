// The backward pass, after its products: the gradient of an array that parts of the score read,
// from sums in float32.
#include "chunk.cuh"
#include "ptx.cuh"

constexpr int WARPS = 4;

// Both arrays are contiguous, with the axes batch, heads, queries and keys. The gradient has length
// 1, or that of the sums.
struct BackwardSumsParams {
    const float* sums;
    void* gradient;
    long long elements;  // of the gradient
    int batch, heads, queries, keys;
    int sums_batch, sums_heads, sums_queries, sums_keys;
    int lanes;  // of an element, 1 or 32
};

// A thread, or a warp, takes an element. Its sum has a fixed order.
template <class T>
__global__ void __launch_bounds__(WARPS * 32)
    bwd_sums(const __grid_constant__ BackwardSumsParams p) {
    const long long number =
        (block_index() * static_cast<long long>(WARPS * 32) + thread_index()) / p.lanes;
    const bool inside = number < p.elements;
    const int lengths[] = {p.keys, p.queries, p.heads, p.batch},
              of_sums[] = {p.sums_keys, p.sums_queries, p.sums_heads, p.sums_batch};
    long long left = number, first = 0, stride = 1, addends = 1;
#pragma unroll
    for (int axis = 0; axis < 4; ++axis) {
        if (lengths[axis] > 1) first += left % lengths[axis] * stride, left /= lengths[axis];
        addends *= lengths[axis] > 1 ? 1 : of_sums[axis];
        stride *= of_sums[axis];
    }
    float sum = 0.f;
    for (long long i = thread_index() % p.lanes; inside && i < addends; i += p.lanes) {
        long long rest = i, place = first, step = 1;
#pragma unroll
        for (int axis = 0; axis < 4; ++axis) {
            if (lengths[axis] == 1) place += rest % of_sums[axis] * step, rest /= of_sums[axis];
            step *= of_sums[axis];
        }
        sum += p.sums[place];
    }
    if (p.lanes == 32) sum = lanes_sum<32>(sum);
    if (inside && thread_index() % p.lanes == 0)
        static_cast<T*>(p.gradient)[number] = from_float<T>(sum);
}
