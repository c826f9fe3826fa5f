// FlashAttention-3 forward (Shah et al. 2024, algorithms 1 and 2) on Hopper, for float16 and
// bfloat16, sm_90a. A block works through tiles of BM rows of Q. The producer, one thread of the
// first warpgroup, fetches tiles of Q, K and V by TMA into rings in shared memory. The consumers,
// the other warpgroups, compute 64 rows each with wgmma. S of the next keys is queued before P V of
// the present ones, so that the softmax runs while the tensor cores work. Keys are taken last to
// first: masked ones, which need row maxima, come first, and the others do without, see
// softmax.cuh. With PING_PONG the consumers take turns to queue their products: one's softmax then
// runs under the products of the others.
#include "fa3_consumer.cuh"
#include "fa3_producer.cuh"

// Registers per thread: AT_LAUNCH at launch; CONSUMER and PRODUCER after setmaxnreg has moved
// registers from the producer to the consumers. The producer needs 32, and keeps up to 40 where the
// consumers' share, a multiple of 8, leaves some.
template <int CONSUMERS, int THREADS>
struct Registers {
    static constexpr int AT_LAUNCH = 65536 / THREADS / 8 * 8, ALL = AT_LAUNCH * (CONSUMERS + 1);
    static constexpr int SHARE = (ALL - 32) / CONSUMERS / 8 * 8;
    static constexpr int CONSUMER = SHARE < 240 ? SHARE : 240, REST = ALL - CONSUMER * CONSUMERS;
    static constexpr int PRODUCER = REST < 40 ? REST : 40;
};

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, bool PING_PONG, class SCHEDULE, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    fa3_wgmma(const __grid_constant__ TmaArguments<Arguments<SCORE, KV>> arguments) {
    using C = Config<T, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, BLOCKS_PER_SM, PING_PONG, SCHEDULE,
                     SCORE, KV>;
    using Registers = ::Registers<C::CONSUMERS, WARPS * 32 * BLOCKS_PER_SM>;
    static_assert(WARPS == 4 * (C::CONSUMERS + 1), "a producer and BM / 64 consumers");
    const TensorMaps& maps = arguments.maps;
    // The producer's, but computed here: else ptxas keeps the softmax scale of some variants in
    // registers of each lane.
    const int tiles = arguments.params.heads * arguments.params.q_tiles;
    extern __shared__ __align__(1024) unsigned char smem[];
    const Smem<C> shared(smem);

    if (threadIdx.x == 0) {
        tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
        shared.init();
    }
    __syncthreads();
    wait_for_kernel_in_front();  // from here on, memory is as it left it

    // Broadcast from lane 0, so that the compiler takes the value as the same in all lanes.
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<Registers::PRODUCER>();
        launch_dependents();
        if (threadIdx.x == 0) Producer<C>(arguments.params, maps, shared, tiles).run();
    } else {
        registers_increase<Registers::CONSUMER>();
        Consumer<C>(arguments.params, maps.o, shared, warpgroup - 1).run();
    }
}
