// The mean of the first keys of sequences that begin, as they are after rotary position embedding:
// append8.cu takes it off all keys, as softmax does not change then, and fewer bits hold the rest
// well. Numbers that are not finite are left out.
#include "append.cuh"

constexpr int MEAN_THREADS = 256;
constexpr int TOKENS = 256;       // of a sequence at most, see cufa/quantized/rows.py
constexpr float MOST = 0x1p102f;  // a larger mean counts as 0: taken off, it could overflow

struct Sum {
    float sum;
    int count;

    __device__ void add(float x) {
        if (!(fabsf(x) < INF)) return;
        sum += x;
        ++count;
    }
};

// A block has a head of a sequence; a thread one pair of columns, or one column, of some tokens.
template <class T, bool INTERLEAVED>
__global__ void __launch_bounds__(MEAN_THREADS) means8(const __grid_constant__ AppendParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Sum* sums = reinterpret_cast<Sum*>(smem);  // (MEAN_THREADS, 2)
    launch_dependents();
    wait_for_kernel_in_front();
    const int batch = blockIdx.x / p.heads_kv, head = blockIdx.x % p.heads_kv;
    const int length = min(p.lengths[batch], p.seq);
    if (p.starts[batch] != 0 || length <= 0) return;
    const Units<1, INTERLEAVED> units(p.rotary_dim, p.head_dim);
    const int groups = MEAN_THREADS / units.count;
    const int group = threadIdx.x / units.count, unit = threadIdx.x % units.count;
    Sum its[2] = {};
    if (group < groups) {
#pragma unroll 4
        for (int i = group; i < min(length, TOKENS); i += groups) {
            const T* from = row_ptr<const T>(p.k, batch, head, p.seq - length + i);
            float x[2][1];
            if (unit < units.pairs) {
                units.turn(p, x, from, unit, min(i, p.positions - 1));
                its[1].add(x[1][0]);
            } else {
                load_chunk(x[0], from + units.first(unit));
            }
            its[0].add(x[0][0]);
        }
    }
    sums[2 * threadIdx.x] = its[0], sums[2 * threadIdx.x + 1] = its[1];
    __syncthreads();
    if (group > 0) return;
    float* mean = head_ptr<float>(p.k_mean, batch, head);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (j == 1 && unit >= units.pairs) break;
        Sum all = {};
        for (int g = 0; g < groups; ++g) {
            const Sum& part = sums[2 * (g * units.count + unit) + j];
            all.sum += part.sum, all.count += part.count;
        }
        const float found = all.sum / max(all.count, 1);
        mean[j ? units.second(unit) : units.first(unit)] = fabsf(found) < MOST ? found : 0.f;
    }
}
