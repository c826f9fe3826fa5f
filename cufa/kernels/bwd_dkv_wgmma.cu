// dK and dV of FlashAttention-2's backward pass (Dao 2023, algorithm 2) on Hopper where head dims
// are too wide for bwd_wgmma.cu, for float16 and bfloat16, sm_90a. A block owns 64 keys of one K/V
// head and loops over the queries that see them. The first of two consumers computes
// P^T = exp(K Q^T - lse) and dV += P^T dO, the second dP^T = V dO^T, dS^T = P^T (dP^T - delta) and
// dK += dS^T Q: only P^T passes from one to the other, and each is a left operand in registers.
#include "bwd_common_sm90.cuh"
#include "bwd_turned_sm90.cuh"
#include "ptx_convert.cuh"

constexpr int ROWS = 64;  // of Q and dO in a step

// The steps of a block. The lists of a BlockMask are of tiles of BM rows, each of which takes two.
template <int BM, int BN, class SCORE, class KV, bool HAS_BLOCK_MAP = SCORE::HAS_BLOCK_MAP>
struct Steps : KeyPlace<ROWS, BN, SCORE, KV> {
    using KeyPlace<ROWS, BN, SCORE, KV>::KeyPlace;
};
template <int BM, int BN, class SCORE, class KV>
struct Steps<BM, BN, SCORE, KV, true> : KeyPlace<BM, BN, SCORE, KV> {
    using Tiles = KeyPlace<BM, BN, SCORE, KV>;
    using Tiles::Tiles;
    static_assert(BM == 2 * ROWS, "two steps a tile");

    __device__ RowTile begin() const { return first_of(Tiles::begin()); }
    __device__ RowTile after(const RowTile& t) const {
        if (t.tile % 2 == 0 && (t.tile + 1) * ROWS < this->sequence.seq_q)
            return {t.head, t.tile + 1};
        return first_of(Tiles::after(tile_of(t)));
    }
    __device__ long long row_of(const RowTile& t) const {
        return first_row<KV>(this->p, this->batch, this->query_head(t)) + t.tile * ROWS;
    }
    __device__ bool is_partial(const RowTile& t) const { return Tiles::is_partial(tile_of(t)); }

 private:
    static __device__ RowTile first_of(const RowTile& tile) { return {tile.head, 2 * tile.tile}; }
    static __device__ RowTile tile_of(const RowTile& t) { return {t.head, t.tile / 2}; }
};

template <class T_, int HEAD_DIM_, int BM_, int BN_, int STAGES_>
struct DkvConfig : BackwardRegisters<2> {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, BM = BM_, BN = BN_, STAGES = STAGES_;
    static constexpr int P_SLOTS = 2;
    using QTile = WgmmaTile<ROWS, HEAD_DIM>;  // of dO, too
    using KTile = WgmmaTile<BN, HEAD_DIM>;    // of V, too
    static_assert(BN == 64, "a consumer holds accumulators of 64 keys");
    static constexpr int P_BYTES = 2 * BN * ROWS, STATS_BYTES = 4 * ROWS;
    static constexpr int K = 0, V = KTile::bytes, Q = 2 * KTile::bytes;
    static constexpr int DO = Q + STAGES * QTile::bytes, P = DO + STAGES * QTile::bytes;
    static constexpr int LSE = P + P_SLOTS * P_BYTES, DELTA = LSE + STAGES * STATS_BYTES;
    static constexpr int BARRIERS = DELTA + STAGES * STATS_BYTES;
    static constexpr int bytes = BARRIERS + 16 * (2 * STAGES + P_SLOTS) + 8;
};

template <class C>
struct DkvSmem {
    const uint32_t base;
    const Ring<C::STAGES> ring_q, ring_do;
    const Ring<C::P_SLOTS> ring_p;

    __device__ explicit DkvSmem(uint32_t base)
        : base(base),
          ring_q(base + C::BARRIERS),
          ring_do(ring_q.full + ring_q.bytes),
          ring_p(ring_do.full + ring_do.bytes) {}
    __device__ uint32_t full_kv() const { return ring_p.full + ring_p.bytes; }
    __device__ uint32_t q(uint32_t n) const {
        return base + C::Q + ring_q.slot(n) * C::QTile::bytes;
    }
    __device__ uint32_t d_out(uint32_t n) const {
        return base + C::DO + ring_do.slot(n) * C::QTile::bytes;
    }
    __device__ uint32_t lse(uint32_t n) const {
        return base + C::LSE + ring_q.slot(n) * C::STATS_BYTES;
    }
    __device__ uint32_t delta(uint32_t n) const {
        return base + C::DELTA + ring_do.slot(n) * C::STATS_BYTES;
    }
    // Where a thread of the first consumer leaves its part of P^T for that of the second.
    __device__ uint32_t weights(uint32_t n) const {
        return base + C::P + ring_p.slot(n) * C::P_BYTES + reread_thread_index() % 128 * 16;
    }

    // By one thread. The first consumer fills the ring of P^T.
    __device__ void init() const {
        if (dynamic_smem_bytes() < C::bytes) __trap();
        ring_q.init(8), ring_do.init(8), ring_p.init(4);
        for (int s = 0; s < C::P_SLOTS; ++s) mbarrier_init(ring_p.full + 8 * s, 4);
        mbarrier_init(full_kv(), 1);
        mbarrier_fence_init();
    }
};

// Fetches K and V, and the rows of each step; one thread.
template <class C, class Place, class KV>
__device__ void produce(const BackwardMaps& maps, const Place& place, const DkvSmem<C>& smem) {
    using QTile = typename C::QTile;
    const auto& p = place.p;
    mbarrier_arrive_expect(smem.full_kv(), 2 * C::KTile::bytes);
    const int key = place.key_tile * C::BN;
    load_keys<typename C::KTile, KV>(smem.base + C::K, maps.k, p.k, place, key, smem.full_kv());
    load_keys<typename C::KTile, KV>(smem.base + C::V, maps.v, p.v, place, key, smem.full_kv());
    const int batch = KV::RAGGED ? 0 : place.batch;
    uint32_t n = 0;
    for (RowTile t = place.begin(); place.visits(t); t = place.after(t), ++n) {
        const int head = place.query_head(t), row = place.sequence.first_q + t.tile * ROWS;
        const long long of_rows = place.row_of(t);
        smem.ring_q.acquire(n);
        const uint32_t full_q = smem.ring_q.expect(n, QTile::bytes + C::STATS_BYTES);
        QTile::load(smem.q(n), 0, maps.q, full_q, row, head, batch, L2_KEPT);
        bulk_load(smem.lse(n), p.row_lse + of_rows, C::STATS_BYTES, full_q);
        smem.ring_do.acquire(n);
        const uint32_t full_do = smem.ring_do.expect(n, QTile::bytes + C::STATS_BYTES);
        QTile::load(smem.d_out(n), 0, maps.d_out, full_do, row, head, batch, L2_KEPT);
        bulk_load(smem.delta(n), p.row_delta + of_rows, C::STATS_BYTES, full_do);
    }
}

// The first of two consumers, or the second.
template <class C, class SCORE, class Place, class KV>
struct DkvConsumer {
    using T = typename C::T;
    static constexpr int NT = ROWS / 8;
    using QTile = typename C::QTile;
    using KTile = typename C::KTile;
    using Scores = float[NT][4];
    using Operand = uint32_t[NT / 2][4];

    const Place& place;
    const DkvSmem<C>& smem;
    const int consumer;
    const uint32_t own_tile;             // K, or V
    float sum[C::HEAD_DIM / 8][4] = {};  // dV, or dK
    Operand left;                        // P^T, or dS^T

    __device__ DkvConsumer(const Place& place, const DkvSmem<C>& smem, int consumer)
        : place(place),
          smem(smem),
          consumer(consumer),
          own_tile(smem.base + (consumer == 0 ? C::K : C::V)) {}

    __device__ void wait_kv() const {
        mbarrier_wait(smem.full_kv(), 0);
        const int keys = place.sequence.seq_kv - place.key_tile * C::BN;
        if (KV::TAILS) clear_rows_from<KTile>(keys, own_tile, consumer);
    }
    // The ring from which the first product takes its right operand, and that of the second.
    __device__ Ring<C::STAGES> first_ring() const {
        return consumer == 0 ? smem.ring_q : smem.ring_do;
    }
    __device__ Ring<C::STAGES> second_ring() const {
        return consumer == 0 ? smem.ring_do : smem.ring_q;
    }
    // Waits for a step's rows of Q or dO.
    __device__ uint32_t rows_of(bool q, uint32_t n, const RowTile& t) const {
        (q ? smem.ring_q : smem.ring_do).wait(n);
        const uint32_t tile = q ? smem.q(n) : smem.d_out(n);
        if (KV::TAILS) clear_rows_from<QTile>(place.sequence.seq_q - t.tile * ROWS, tile, consumer);
        return QTile::operand(tile);
    }
    // S^T = K Q^T, or dP^T = V dO^T.
    __device__ void queue_first(Scores& r, uint32_t n, const RowTile& t) const {
        const uint32_t right = rows_of(consumer == 0, n, t);
        wgmma_fence();
        queue_product<T, KTile, QTile>(r, KTile::operand(own_tile), right);
        wgmma_commit();
    }
    // dV += P^T dO, or dK += dS^T Q.
    __device__ void queue_second(uint32_t n, const RowTile& t) {
        const uint32_t right = rows_of(consumer == 1, n, t);
        wgmma_fence();
        queue_product<T, QTile>(sum, left, right, true);
        wgmma_commit();
    }
    // P^T, also for the second consumer.
    __device__ void weigh(Scores& r, uint32_t n, const RowTile& t) {
        const TurnedScores<T, SCORE, Place, NT> scores{place, t, place.key_tile * C::BN};
        scores.weigh(r, left, smem.lse(n));
        smem.ring_p.acquire(n);
#pragma unroll
        for (int k = 0; k < NT / 2; ++k)
            sts_128(smem.weights(n) + k * 128 * 16,
                    make_float4(__uint_as_float(left[k][0]), __uint_as_float(left[k][1]),
                                __uint_as_float(left[k][2]), __uint_as_float(left[k][3])));
        __syncwarp();
        if (reread_thread_index() % 32 == 0)
            mbarrier_arrive(smem.ring_p.full + 8 * Ring<C::P_SLOTS>::slot(n));
    }
    // dS^T = P^T (dP^T - delta)
    __device__ void derive(Scores& r, uint32_t n) {
        const uint32_t delta = smem.delta(n) + reread_thread_index() % 4 * 8;
        smem.ring_p.wait(n);
#pragma unroll
        for (int k = 0; k < NT / 2; ++k) {
            float words[4];
            lds(words, smem.weights(n) + k * 128 * 16);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint32_t key = __float_as_uint(words[2 * j]),
                               key_8 = __float_as_uint(words[2 * j + 1]);
                const float2 of_rows = lds_2(delta + (2 * k + j) * 32);
                float (&x)[4] = r[2 * k + j];
                x[0] = low_to_float<T>(key) * (x[0] - of_rows.x);
                x[1] = high_to_float<T>(key) * (x[1] - of_rows.y);
                x[2] = low_to_float<T>(key_8) * (x[2] - of_rows.x);
                x[3] = high_to_float<T>(key_8) * (x[3] - of_rows.y);
            }
        }
        pack_operand<T>(left, r);
        __syncwarp();
        smem.ring_p.release(n);
    }
    // The second product of a step is under way during the first one of the next.
    __device__ void run() {
        uint32_t n = 0;
        for (RowTile t = place.begin(); place.visits(t); t = place.after(t), ++n) {
            Scores r;
            queue_first(r, n, t);
            wgmma_wait<1>();
            if (n > 0) second_ring().release(n - 1);
            wgmma_wait<0>();
            if (consumer == 0)
                weigh(r, n, t);
            else
                derive(r, n);
            __syncwarp();
            first_ring().release(n);
            queue_second(n, t);
        }
        wgmma_wait<0>();
    }
    // It leaves through the place of K or V, which the other consumer does not read.
    __device__ void store() const {
        const auto& p = place.p;
        const Tensor& to = consumer == 0 ? p.dv : p.dk;
        if (to.data)
            store_gradient<T, KTile>(sum, consumer == 0 ? 1.f : p.scale, own_tile, consumer, 0, 0,
                                     place.template rows_of<T>(to), to.stride_seq,
                                     place.keys_left(), consumer == 0 ? p.head_dim_v : p.head_dim);
    }
};

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    bwd_dkv_wgmma(const __grid_constant__ TmaBackwardArguments<SCORE, KV> arguments) {
    using C = DkvConfig<T, HEAD_DIM, BM, BN, STAGES>;
    using Place = Steps<BM, BN, SCORE, KV>;
    static_assert(HEAD_DIM_V == HEAD_DIM && WARPS == 12, "as in the spec");
    static_assert(!Differentiated<SCORE>::HAS_SLOPE && !SCORE::DROPS_WEIGHTS,
                  "dS^T is made of P^T alone");
    const auto& p = arguments.params;
    extern __shared__ __align__(1024) unsigned char smem[];
    const DkvSmem<C> shared(smem_address(smem));
    const Place place(p, Place::tile(p, block_index()));
    if (threadIdx.x == 0) shared.init();
    __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<C::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce<C, Place, KV>(arguments.maps, place, shared);
        return;
    }
    registers_increase<C::CONSUMER_REGISTERS>();
    DkvConsumer<C, SCORE, Place, KV> consumer(place, shared, warpgroup - 1);
    consumer.wait_kv();
    consumer.run();
    consumer.store();
}
