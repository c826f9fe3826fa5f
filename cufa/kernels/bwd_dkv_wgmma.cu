// dK and dV of FlashAttention-2's backward pass (Dao 2023, algorithm 2) on Hopper where head dims
// are too wide for bwd_wgmma.cu, for float16 and bfloat16, sm_90a. A block owns 64 keys of one K/V
// head and loops over the queries that see them in tiles of BM. Two consumers own half of the
// columns of dK and dV each. The first computes P^T = exp(K Q^T - lse), the second dP^T = V dO^T
// and dS^T = P^T (dP^T - delta); both hand theirs over in shared memory.
#include "bwd_common_sm90.cuh"
#include "bwd_turned_sm90.cuh"
#include "ptx_convert.cuh"

template <class T_, int HEAD_DIM_, int BM_, int BN_>
struct DkvConfig : BackwardRegisters<2> {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, BM = BM_, BN = BN_, HALF = HEAD_DIM / 2;
    using QTile = WgmmaTile<BM, HEAD_DIM>;  // of dO, too
    using KTile = WgmmaTile<BN, HEAD_DIM>;  // of V, too
    using PTile = WgmmaTile<BN, BM>;        // of P^T and dS^T
    static_assert(BN == 64, "a consumer holds accumulators of 64 keys");
    static constexpr int K = 0, V = KTile::bytes, Q = 2 * KTile::bytes;
    static constexpr int DO = Q + QTile::bytes, P = DO + QTile::bytes, DS = P + PTile::bytes;
    static constexpr int STATS = DS + PTile::bytes, BARRIERS = STATS + 8 * BM;
    static constexpr int bytes = BARRIERS + 4 * 16 + 8;
};

// The rings, of one slot each.
template <class C>
struct DkvSmem {
    const uint32_t base;
    const Ring<1> ring_q, ring_do, ring_p, ring_ds;

    __device__ explicit DkvSmem(uint32_t base)
        : base(base),
          ring_q(base + C::BARRIERS),
          ring_do(base + C::BARRIERS + 16),
          ring_p(base + C::BARRIERS + 32),
          ring_ds(base + C::BARRIERS + 48) {}
    __device__ uint32_t full_kv() const { return base + C::BARRIERS + 64; }

    // By one thread. A consumer fills the rings of P^T and dS^T.
    __device__ void init() const {
        if (dynamic_smem_bytes() < C::bytes) __trap();
        ring_q.init(8), ring_do.init(8), ring_p.init(8), ring_ds.init(8);
        mbarrier_init(ring_p.full, 4), mbarrier_init(ring_ds.full, 4);
        mbarrier_init(full_kv(), 1);
        mbarrier_fence_init();
    }
};

// Fetches K and V, and the tiles of rows that visit them; one thread.
template <class C, class SCORE, class KV>
__device__ void produce(const BackwardMaps& maps, const KeyPlace<C::BM, C::BN, SCORE, KV>& place,
                        const DkvSmem<C>& smem) {
    using QTile = typename C::QTile;
    constexpr int BM = C::BM;
    const auto& p = place.p;
    mbarrier_arrive_expect(smem.full_kv(), 2 * C::KTile::bytes);
    load_kv<typename C::KTile, KV>(maps, place, smem.base + C::K, smem.base + C::V,
                                   place.key_tile * C::BN, smem.full_kv());
    const int batch = KV::RAGGED ? 0 : place.batch;
    uint32_t n = 0;
    for (RowTile t = place.begin(); place.visits(t); t = place.after(t), ++n) {
        const int head = place.query_head(t), row = place.sequence.first_q + t.tile * BM;
        const long long of_rows = place.row_of(t);
        smem.ring_q.acquire(n);
        const uint32_t full_q = smem.ring_q.expect(n, QTile::bytes + BM * 4);
        QTile::load(smem.base + C::Q, 0, maps.q, full_q, row, head, batch, L2_KEPT);
        bulk_load(smem.base + C::STATS, p.row_lse + of_rows, BM * 4, full_q);
        smem.ring_do.acquire(n);
        const uint32_t full_do = smem.ring_do.expect(n, QTile::bytes + BM * 4);
        QTile::load(smem.base + C::DO, 0, maps.d_out, full_do, row, head, batch, L2_KEPT);
        bulk_load(smem.base + C::STATS + BM * 4, p.row_delta + of_rows, BM * 4, full_do);
    }
}

template <class C, class SCORE, class KV>
struct DkvConsumer {
    using T = typename C::T;
    static constexpr int BM = C::BM, NT = BM / 8, HALF = C::HALF;
    using QTile = typename C::QTile;
    using KTile = typename C::KTile;
    using PTile = typename C::PTile;
    using Place = KeyPlace<BM, C::BN, SCORE, KV>;
    using Scores = float[NT][4];

    const Place& place;
    const DkvSmem<C>& smem;
    const int consumer;
    float rdK[HALF / 8][4] = {}, rdV[HALF / 8][4] = {};

    __device__ DkvConsumer(const Place& place, const DkvSmem<C>& smem, int consumer)
        : place(place), smem(smem), consumer(consumer) {}

    __device__ void wait_kv() const {
        mbarrier_wait(smem.full_kv(), 0);
        const int keys = place.sequence.seq_kv - place.key_tile * C::BN;
        if (KV::TAILS) clear_rows_from<KTile>(keys, smem.base + own(C::K, C::V), consumer);
    }
    __device__ uint32_t own(uint32_t first, uint32_t second) const {
        return consumer == 0 ? first : second;
    }

    // This consumer's own product: S^T, or dP^T.
    __device__ void queue_own(Scores& r, uint32_t n, const RowTile& t) const {
        const int rows = place.sequence.seq_q - t.tile * BM;
        smem.ring_q.wait(n);
        if (KV::TAILS) clear_rows_from<QTile>(rows, smem.base + C::Q, consumer);
        if (KV::TAILS || consumer == 1) smem.ring_do.wait(n);
        if (KV::TAILS) clear_rows_from<QTile>(rows, smem.base + C::DO, consumer);
        wgmma_fence();
        queue_product<T, KTile, QTile>(r, KTile::operand(smem.base + own(C::K, C::V)),
                                       QTile::operand(smem.base + own(C::Q, C::DO)));
        wgmma_commit();
    }
    // P^T of the first consumer, dS^T of the second.
    __device__ void hand_over(Scores& r, uint32_t n, const RowTile& t) const {
        const int thread = thread_index_anew() % 128, lane = thread % 32;
        const uint32_t lane_offset = PTile::offset(thread / 32 * 16 + lane % 16, lane / 16);
        uint32_t packed[NT / 2][4];
        if (consumer == 0) {
            const TurnedScores<T, SCORE, Place, NT> scores{place, t, place.key_tile * C::BN};
            scores.weigh(r, packed, smem.base + C::STATS);
        } else {
            smem.ring_p.wait(n);
            derive(r, smem.base + C::P + lane_offset, lane);
            pack_operand<T>(packed, r);
        }
        const Ring<1> ring(own(smem.ring_p.full, smem.ring_ds.full));
        ring.acquire(n);
#pragma unroll
        for (int k = 0; k < NT / 2; ++k)
            stmatrix_x4(smem.base + own(C::P, C::DS) + PTile::advance(lane_offset, 0, 2 * k),
                        packed[k][0], packed[k][1], packed[k][2], packed[k][3]);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(ring.full);
    }
    // dS^T = P^T (dP^T - delta)
    __device__ void derive(Scores& r, uint32_t of_lane, int lane) const {
        const uint32_t delta = smem.base + C::STATS + 4 * (BM + lane % 4 * 2);
#pragma unroll
        for (int k = 0; k < NT / 2; ++k) {
            uint32_t rP[4];
            ldmatrix_x4(rP, PTile::advance(of_lane, 0, 2 * k));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float2 of_rows = lds_2(delta + 4 * (2 * k + j) * 8);
                float (&x)[4] = r[2 * k + j];
                x[0] = low_to_float<T>(rP[2 * j]) * (x[0] - of_rows.x);
                x[1] = high_to_float<T>(rP[2 * j]) * (x[1] - of_rows.y);
                x[2] = low_to_float<T>(rP[2 * j + 1]) * (x[2] - of_rows.x);
                x[3] = high_to_float<T>(rP[2 * j + 1]) * (x[3] - of_rows.y);
            }
        }
    }
    // Half of the columns of dV += P^T dO and dK += dS^T Q.
    __device__ void queue_halves(uint32_t n) {
        smem.ring_p.wait(n), smem.ring_do.wait(n);
        add_half(rdV, C::P, C::DO);
        smem.ring_ds.wait(n), smem.ring_q.wait(n);
        add_half(rdK, C::DS, C::Q);
    }
    __device__ void add_half(float (&r)[HALF / 8][4], int left, int right) const {
        const uint32_t columns = consumer * (HALF / QTile::PANEL_COLS) * QTile::PANEL_BYTES;
        const uint32_t a = PTile::operand(smem.base + left),
                       b = QTile::operand(smem.base + right + columns);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BM / 16; ++k)
            Wgmma<T, HALF>::template ss<0, 1>(r, PTile::columns(a, k), QTile::rows(b, k), 1);
        wgmma_commit();
    }
    __device__ void release(uint32_t n) const {
        smem.ring_q.release(n), smem.ring_do.release(n);
        smem.ring_p.release(n), smem.ring_ds.release(n);
    }
    // The halves leave through the places of K and V.
    __device__ void store() const {
        const auto& p = place.p;
        const int rows = place.keys_left(), chunk = consumer * (HALF / 8);
        named_barrier_sync(1, 256);  // both have read K and V
        if (p.dk.data)
            store_gradient<T, KTile>(rdK, p.scale, smem.base + C::K, consumer, 0, chunk,
                                     place.template rows_of<T>(p.dk), p.dk.stride_seq, rows,
                                     p.head_dim);
        if (p.dv.data)
            store_gradient<T, KTile>(rdV, 1.f, smem.base + C::V, consumer, 0, chunk,
                                     place.template rows_of<T>(p.dv), p.dv.stride_seq, rows,
                                     p.head_dim_v);
    }
};

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    bwd_dkv_wgmma(const __grid_constant__ TmaBackwardArguments<SCORE, KV> arguments) {
    using C = DkvConfig<T, HEAD_DIM, BM, BN>;
    using Consumer = DkvConsumer<C, SCORE, KV>;
    using Place = typename Consumer::Place;
    static_assert(HEAD_DIM_V == HEAD_DIM && STAGES == 1 && WARPS == 12, "as in the spec");
    static_assert(!Differentiated<SCORE>::HAS_SLOPE && !SCORE::DROPS_WEIGHTS,
                  "dS^T is made of P^T alone");
    const auto& p = arguments.params;
    extern __shared__ __align__(1024) unsigned char smem[];
    const DkvSmem<C> shared(smem_address(smem));
    const Place place(p, Place::template tile<true>(p, block_index()));
    if (threadIdx.x == 0) shared.init();
    __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<C::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce<C, SCORE, KV>(arguments.maps, place, shared);
        return;
    }
    registers_increase<C::CONSUMER_REGISTERS>();
    Consumer c(place, shared, warpgroup - 1);
    c.wait_kv();
    uint32_t n = 0;
    for (RowTile t = place.begin(); place.visits(t); t = place.after(t), ++n) {
        typename Consumer::Scores r;
        c.queue_own(r, n, t);
        wgmma_wait<0>();
        c.hand_over(r, n, t);
        c.queue_halves(n);
        wgmma_wait<0>();
        c.release(n);
    }
    c.store();
}
