// A mixture of experts (Shazeer et al. 2017) for few tokens: of the experts' matrices those are read that a token takes,
// each once for all tokens that take it. A pair is a token and one of the experts that it takes; those of a token follow
// each other. A slot is an expert that is taken.
#include "flat.cuh"
#include "keys.cuh"

struct Slot {
    int expert, first, count;  // its pairs are `count` of the sorted ones, from `first` on
};

// The `chosen` experts of each token's largest logits, with shares that are the softmax of these; the pairs sorted by
// expert, and as many slots as there are pairs or experts at most, some of them empty. One block, with a thread for each
// pair at least.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
route(const float* logits, float* shares, int* sorted, Slot* slots, int tokens, int experts, int chosen) {
    extern __shared__ __align__(16) float smem[];
    const int pairs = tokens * chosen, lane = threadIdx.x % 32, pair = threadIdx.x;
    int* expert_of = reinterpret_cast<int*>(smem);  // of the pairs
    int* counts = expert_of + pairs;                // of the experts' pairs
    let_next_begin();
    wait_for_previous();
    for (int i = threadIdx.x; i < experts; i += THREADS) counts[i] = 0;
    for (int i = threadIdx.x; i < min(pairs, experts); i += THREADS) slots[i] = {0, 0, 0};
    for (int token = threadIdx.x / 32; token < tokens; token += THREADS / 32) {
        const float* row = logits + static_cast<long long>(token) * experts;
        float most = 0.f, sum = 0.f;
        uint64_t last = 0;
        for (int i = 0; i < chosen; ++i) {
            uint64_t next = 0;
            for (int expert = lane; expert < experts; expert += 32) {
                const uint64_t key = key_of(row[expert], expert);
                if (i == 0 || key < last) next = max(next, key);
            }
#pragma unroll
            for (int mask = 1; mask < 32; mask *= 2) next = max(next, __shfl_xor_sync(0xffffffff, next, mask));
            last = next;
            const int expert = place_of(next);
            if (i == 0) most = row[expert];
            const float share = expf(row[expert] - most);
            sum += share;
            if (lane == 0) expert_of[token * chosen + i] = expert, shares[token * chosen + i] = share;
        }
        __syncwarp();
        for (int i = lane; i < chosen; i += 32) shares[token * chosen + i] /= sum;
    }
    __syncthreads();
    const int mine = pair < pairs ? expert_of[pair] : 0;
    if (pair < pairs) atomicAdd(counts + mine, 1);
    __syncthreads();
    if (pair >= pairs) return;
    int slot = 0, first = 0, before = 0;
    for (int expert = 0; expert < mine; ++expert) slot += counts[expert] > 0, first += counts[expert];
    for (int other = 0; other < pair; ++other) before += expert_of[other] == mine;
    sorted[first + before] = pair;
    if (before == 0) slots[slot] = {mine, first, counts[mine]};
}

// y = x W^T for pairs: W (experts, outputs, inputs) with a bias (experts, outputs) or null, x (pairs / `sharing`,
// inputs), y (pairs, outputs, or half as many with a gate). The blocks of a slot follow each other, and among them those
// that have the same outputs; the rest is as in flat_product.cu.
template <class T, class U, int GROUPS, Finish FINISH, int WARPS, int TILES, int LINES, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
expert_product(const T* weight, const float* bias, const T* x, U* y, const int* sorted, const Slot* slots, int outputs,
               int inputs, int tokens, int sharing) {
    constexpr int BLOCK_ROWS = GROUPS * ROWS, BLOCK_ENDS = TILES * TILE_ENDS<FINISH>;
    let_next_begin();
    const int ends = GATES<FINISH> ? outputs / 2 : outputs;
    const int parts = (tokens + BLOCK_ROWS - 1) / BLOCK_ROWS, blocks = (ends + BLOCK_ENDS - 1) / BLOCK_ENDS;
    const int part = blockIdx.x % parts, block = blockIdx.x / parts % blocks;
    wait_for_previous();
    const Slot slot = slots[blockIdx.x / parts / blocks];
    const int rows = min(slot.count - part * BLOCK_ROWS, BLOCK_ROWS);
    if (rows <= 0) return;
    sorted += slot.first + part * BLOCK_ROWS;
    flat_block<T, U, GROUPS, FINISH, WARPS, TILES, LINES>(
        weight + static_cast<long long>(slot.expert) * outputs * inputs,
        bias ? bias + static_cast<long long>(slot.expert) * outputs : nullptr,
        [=](int group, int i) {
            return [=](int row) { return x + static_cast<long long>(sorted[group + row] / sharing) * inputs + i; };
        },
        [=](int row) { return y + static_cast<long long>(sorted[row]) * ends; }, outputs, inputs, block * BLOCK_ENDS,
        rows, true);
}

// Adds what a token's experts give, by their shares, to its sums: x (tokens, chosen, width), a block for each token.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
add_shares(const float* x, const float* shares, float* sums, int width, int chosen) {
    let_next_begin();
    x += static_cast<long long>(blockIdx.x) * chosen * width;
    shares += static_cast<long long>(blockIdx.x) * chosen;
    sums += static_cast<long long>(blockIdx.x) * width;
    wait_for_previous();
    for (int i = threadIdx.x; i < width; i += THREADS) {
        float sum = sums[i];
        for (int pair = 0; pair < chosen; ++pair) sum += shares[pair] * x[static_cast<long long>(pair) * width + i];
        sums[i] = sum;
    }
}
