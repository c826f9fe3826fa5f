// Attention on e4m3 Q, K and V with float32 scales, on Hopper, sm_90a. The parts are those of
// FlashAttention-3 in fa3_wgmma.cu, but for the consumers.
//
// 8-bit wgmma adds up with about 14 bits, so P V of each tile of 128 keys, four steps of wgmma, is
// a sum of its own, which is added to O in float32. The scales of Q and K go into the exponent, and
// that of V into this addition. P is e4m3 as well, and has to stay in its range, see
// fp8_softmax.cuh. V is stored transposed, see VTile8.
//
// The products take half the time that they take in 16 bits. So a consumer's softmax runs under the
// products of the other consumers, and not under its own. P V can then have the registers of S,
// which leaves registers for a third consumer at head dims up to 128.
#include "fa3_producer.cuh"
#include "fp8_consumer.cuh"

template <class OUT, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, bool PING_PONG,
          class SCORE, class KV>
__global__ void __launch_bounds__(BM * 2 + 128, 1)
    fp8_wgmma(const __grid_constant__ TmaArguments<Arguments<SCORE, KV>> arguments) {
    using C = Config8<OUT, HEAD_DIM, HEAD_DIM_V, BM, BN, STAGES, PING_PONG, SCORE, KV>;
    const TensorMaps& maps = arguments.maps;
    const int tiles = arguments.params.heads * arguments.params.q_tiles;
    extern __shared__ __align__(1024) unsigned char smem[];
    const Smem<C> shared(smem);

    if (threadIdx.x == 0) {
        tma_prefetch(maps.q), tma_prefetch(maps.k), tma_prefetch(maps.v);
        shared.init();
    }
    __syncthreads();
    wait_for_kernel_in_front();  // from here on, memory is as that kernel left it

    // ALL: registers of a thread at launch, times the warpgroups. CONSUMER and PRODUCER: what a
    // thread of each has after they have been moved.
    constexpr int ALL = 65536 / (BM * 2 + 128) / 8 * 8 * (C::CONSUMERS + 1);
    constexpr int SHARE = (ALL - 24) / C::CONSUMERS / 8 * 8, CONSUMER = SHARE < 240 ? SHARE : 240;
    constexpr int REST = ALL - CONSUMER * C::CONSUMERS, PRODUCER = REST < 40 ? REST : 40;
    // Broadcast from lane 0, so that the compiler takes the value as the same in all lanes.
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<PRODUCER>();
        launch_dependents();
        if (threadIdx.x == 0) Producer<C>(arguments.params, maps, shared, tiles).run();
    } else {
        registers_increase<CONSUMER>();
        Consumer8<C>(arguments.params, shared, warpgroup - 1).run();
    }
}
