// Adds to the log-sum-exp of queries what a mean that was taken off all keys would have added to
// each score: scale * q . mean.
#include "chunk.cuh"
#include "params.cuh"

constexpr int THREADS = 128;

// cufa/specs/lse_mean.py holds the same layout as a NumPy dtype.
struct LseMeanParams {
    Tensor q, mean;  // (batch, heads, seq, head_dim) and (batch, heads / group, head_dim) float32
    float* lse;      // (batch, heads, seq)
    float scale;
    int heads, seq, head_dim, group, rows;
};

// A warp has a row.
template <class T>
__global__ void __launch_bounds__(THREADS) lse_mean(const __grid_constant__ LseMeanParams p) {
    launch_dependents();
    wait_for_kernel_in_front();
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= p.rows) return;
    const int batch = row / p.seq / p.heads, head = row / p.seq % p.heads;
    const T* q = head_ptr<const T>(p.q, batch, head) + row % p.seq * p.q.stride_seq;
    const float* mean = head_ptr<const float>(p.mean, batch, head / p.group);
    float sum = 0.f;
    for (int i = lane; i < p.head_dim; i += 32) sum += to_float(q[i]) * mean[i];
    sum = lanes_sum<32>(sum);
    if (lane == 0 && p.lse[row] != -INF) p.lse[row] += p.scale * sum;  // it saw a key
}
