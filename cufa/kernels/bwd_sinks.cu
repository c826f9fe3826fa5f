// The backward pass: the gradients of sinks, from what is left of each row: a sink has the weight
// exp(sink - LSE), and no value.
#include "bwd_params.cuh"
#include "ptx.cuh"

constexpr int WARPS = 8;

// A block takes a query head of all sequences. The sums have a fixed order.
template <class T, int HEAD_DIM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32)
    bwd_sinks(const __grid_constant__ BackwardArguments<SCORE, KV> p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const int head = block_index(), thread = thread_index();
    const float logit = p.sinks[head * p.stride_sinks];
    int sequences = p.heads / p.heads_q;
    if constexpr (KV::RAGGED) sequences = p.sequences;
    float sum = 0.f;
    for (int batch = 0; batch < sequences; ++batch) {
        const long long row0 = first_row<KV>(p, batch, head);
        const int rows = KV::sequence(p, batch, 0).seq_q;
        for (int row = thread; row < rows; row += WARPS * 32)
            sum =
                fmaf(exp2f((logit - p.row_lse[row0 + row]) * LOG2_E), p.row_delta[row0 + row], sum);
    }
    sum = lanes_sum<32>(sum);
    if (thread % 32 == 0) sts(smem_address(smem) + thread / 32 * 4, sum);
    __syncthreads();
    if (thread != 0) return;
    float total = 0.f;
    for (int warp = 0; warp < WARPS; warp += 2) {
        const float2 two = lds_2(smem_address(smem) + warp * 4);
        total += two.x, total += two.y;
    }
    p.d_sinks[head] = -total;
}
