// dQ of FlashAttention-2's backward pass (Dao 2023, algorithm 2) on Hopper where head dims are too
// wide for bwd_wgmma.cu, for float16 and bfloat16, sm_90a. A block owns BM rows of one query head
// and loops over the keys that these see in tiles of BN, like the forward pass: so dQ stays in
// registers, and its sum has one order. The producer, one thread of the first warpgroup, fetches K
// and V by TMA into one ring. The consumers, the other warpgroups, own 64 rows each: S = Q K^T and
// dP = dO V^T of the next keys are queued before dQ += dS K of the present ones.
#include "bwd_common_sm90.cuh"

template <class T_, int HEAD_DIM_, int BM_, int BN_, int STAGES_>
struct DqConfig : BackwardRegisters<BM_ / 64> {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, BM = BM_, BN = BN_, STAGES = STAGES_;
    static constexpr int CONSUMERS = BM / 64;
    using QTile = WgmmaTile<BM, HEAD_DIM>;
    using KTile = WgmmaTile<BN, HEAD_DIM>;
    static_assert(STAGES >= 3, "K of the present keys, V and K of the next");
    static constexpr int Q = 0, DO = QTile::bytes, KV = 2 * QTile::bytes;
    static constexpr int BARRIERS = KV + STAGES * KTile::bytes;
    static constexpr int bytes = BARRIERS + 16 * STAGES + 8;
};

// A tile of BM rows of one query head, and the tiles of BN keys that it visits.
template <int BM, int BN, class SCORE, class KV>
struct RowPlace {
    const BackwardArguments<SCORE, KV>& p;
    int batch, head, q_tile;
    Sequence sequence;
    KeyTiles keys;
    Visits<SCORE::HAS_BLOCK_MAP> visits;
    int first, end;  // of what it visits; none where a sequence has no such rows, or no keys

    // Later rows see more keys: they come first.
    __device__ explicit RowPlace(const BackwardArguments<SCORE, KV>& p) : p(p) {
        Tile tile;
        const int of_heads = block_index() % p.heads, row = p.q_tiles - 1 - block_index() / p.heads;
        if constexpr (KV::RAGGED)
            tile =
                KV::template tile_of_head<BM>(p.cu_seqlens_q, p.seq_q, p.sequences, of_heads, row);
        else
            tile = {of_heads / p.heads_q, of_heads % p.heads_q, row};
        batch = tile.batch, head = tile.head, q_tile = tile.q_tile;
        sequence = KV::sequence(p, batch, 0);
        const int q0 = q_tile * BM;
        keys = static_cast<const SCORE&>(p).template key_tiles<BN>(sequence, q0, q0 + BM - 1);
        first = keys.first, end = keys.end;
        if constexpr (SCORE::HAS_BLOCK_MAP) {
            const SCORE& score = p;
            const BlockLine line = score.template block_line<BN>(p.seq_kv, batch, head, q_tile);
            line.count(first, end);
            visits = line.visits();
        }
        if (rows_left() <= 0 || sequence.seq_kv <= 0) end = first;
    }
    __device__ int rows_left() const { return sequence.seq_q - q_tile * BM; }
};

// Fetches Q, dO, and V and K of each tile of keys; one thread.
template <class C, class SCORE, class KV>
__device__ void produce(const BackwardMaps& maps, const RowPlace<C::BM, C::BN, SCORE, KV>& place,
                        uint32_t base, const Ring<C::STAGES>& ring, uint32_t full_q) {
    using QTile = typename C::QTile;
    using KTile = typename C::KTile;
    const auto& p = place.p;
    const int row = place.sequence.first_q + place.q_tile * C::BM;
    const int batch = KV::RAGGED ? 0 : place.batch, kv_head = place.head / p.group;
    mbarrier_arrive_expect(full_q, 2 * QTile::bytes);
    QTile::load(base + C::Q, 0, maps.q, full_q, row, place.head, batch, L2_READ_ONCE);
    QTile::load(base + C::DO, 0, maps.d_out, full_q, row, place.head, batch, L2_READ_ONCE);
    uint32_t n = 0;
    auto load = [&](const TensorMap& map, const Tensor& t, int key) {
        ring.acquire(n);
        KTile::load(base + C::KV + ring.slot(n) * KTile::bytes, 0, map,
                    ring.expect(n, KTile::bytes), key, KV::map_head(t, kv_head),
                    KV::map_batch(t, place.batch), L2_KEPT);
        ++n;
    };
    for (int j = place.end - 1; j >= place.first; --j) {
        const int key = place.sequence.first_k + place.visits.visit(j).tile(j) * C::BN;
        load(maps.v, p.v, key);
        load(maps.k, p.k, key);
    }
}

template <class C, class SCORE, class KV>
struct DqConsumer {
    using T = typename C::T;
    static constexpr int BM = C::BM, BN = C::BN, NT = BN / 8;
    using QTile = typename C::QTile;
    using KTile = typename C::KTile;
    using Place = RowPlace<BM, BN, SCORE, KV>;
    using Scores = float[1][NT][4];

    const Place& place;
    const uint32_t base;
    const Ring<C::STAGES>& ring;
    const int consumer;
    float rdQ[C::HEAD_DIM / 8][4] = {};
    uint32_t rdS[BN / 16][4];
    float lse[2], delta[2];

    __device__ DqConsumer(const Place& place, uint32_t base, const Ring<C::STAGES>& ring,
                          int consumer)
        : place(place), base(base), ring(ring), consumer(consumer) {
        const auto& p = place.p;
        const long long row0 = first_row<KV>(p, place.batch, place.head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long row = row0 + this->row() + reread_thread_index() % 32 / 4 + 8 * h;
            lse[h] = p.row_lse[row] * (SCORE::NATURAL ? 1.f : LOG2_E), delta[h] = p.row_delta[row];
        }
    }
    // The warp's first row.
    __device__ int row() const {
        return place.q_tile * BM + consumer * 64 + reread_thread_index() % 128 / 32 * 16;
    }
    __device__ uint32_t rows() const { return consumer * 64 * QTile::ROW_BYTES; }
    __device__ uint32_t tile(uint32_t n) const {
        return base + C::KV + ring.slot(n) * KTile::bytes;
    }

    __device__ void wait_q(uint32_t full_q) const {
        mbarrier_wait(full_q, 0);
        if constexpr (KV::TAILS) {
            clear_rows_from<QTile>(place.rows_left(), base + C::Q, consumer);
            clear_rows_from<QTile>(place.rows_left(), base + C::DO, consumer);
            // Another's dQ leaves through rows of Q that this one has cleared, too.
            if (place.rows_left() < BM) named_barrier_sync(8 + C::CONSUMERS, 128 * C::CONSUMERS);
        }
    }
    // S and dP of the j-th tile of keys, whose V is the n-th tile of the ring.
    __device__ void queue_scores(Scores& rS, float (&rdP)[NT][4], uint32_t n, int j) const {
        const int keys = place.sequence.seq_kv - place.visits.visit(j).tile(j) * BN;
        ring.wait(n + 1);
        if (KV::TAILS) clear_rows_from<KTile>(keys, tile(n + 1), consumer);
        wgmma_fence();
        queue_product<T, QTile, KTile>(rS[0], QTile::operand(base + C::Q + rows()),
                                       KTile::operand(tile(n + 1)));
        wgmma_commit();
        ring.wait(n);
        if (KV::TAILS) clear_rows_from<KTile>(keys, tile(n), consumer);
        wgmma_fence();
        queue_product<T, QTile, KTile>(rdP, QTile::operand(base + C::DO + rows()),
                                       KTile::operand(tile(n)));
        wgmma_commit();
    }
    // P = exp(S - lse)
    __device__ void exponentiate(Scores& rS, int j) const {
        const auto& p = place.p;
        const SCORE& score = p;
        const auto visit = place.visits.visit(j);
        const int key_tile = visit.tile(j);
        const At at{reread_thread_index() % 32, row(), key_tile * BN, place.batch, place.head};
        score.apply(rS, place.sequence, p.scale_log2, at, SCORE::masked(place.keys, key_tile),
                    visit.is_partial());
#pragma unroll
        for (int i = 0; i < NT * 4; ++i) {
            float& x = rS[0][i / 4][i % 4];
            const float of_row = lse[i % 4 / 2];
            if constexpr (SCORE::NATURAL)
                x = exp2_approx((x - of_row) * LOG2_E);
            else
                x = exp2_approx(fmaf(x, SCORE::to_log2(p.scale_log2), -of_row));
        }
    }
    // dS = P (dP - delta)
    __device__ void derive(Scores& rS, const float (&rdP)[NT][4]) const {
#pragma unroll
        for (int i = 0; i < NT * 4; ++i)
            rS[0][i / 4][i % 4] *= rdP[i / 4][i % 4] - delta[i % 4 / 2];
    }
    // dQ += dS K
    __device__ void queue_dq(uint32_t n) {
        wgmma_fence();
        queue_product<T, KTile>(rdQ, rdS, KTile::operand(tile(n)), true);
        wgmma_commit();
    }
    // dQ leaves through the place of this consumer's rows of Q.
    __device__ void store() const {
        const auto& p = place.p;
        T* g = head_ptr<T>(p.dq, KV::RAGGED ? 0 : place.batch, place.head) +
               (place.sequence.first_q + place.q_tile * BM) * p.dq.stride_seq;
        store_gradient<T, QTile>(rdQ, p.dq_factor, base + C::Q, consumer, consumer * 64, 0, g,
                                 p.dq.stride_seq, place.rows_left(), p.head_dim);
    }
};

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    bwd_dq_wgmma(const __grid_constant__ TmaBackwardArguments<SCORE, KV> arguments) {
    using C = DqConfig<T, HEAD_DIM, BM, BN, STAGES>;
    using Consumer = DqConsumer<C, SCORE, KV>;
    static_assert(HEAD_DIM_V == HEAD_DIM && WARPS == 4 * (C::CONSUMERS + 1), "as in the spec");
    static_assert(ROW_UNIT == BM, "q_tiles counts units");
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t base = smem_address(smem), full_q = base + C::BARRIERS + 16 * STAGES;
    const Ring<STAGES> ring(base + C::BARRIERS);
    const typename Consumer::Place place(arguments.params);
    const int first = place.first, end = place.end;
    if (place.rows_left() <= 0) return;

    if (threadIdx.x == 0) {
        if (dynamic_smem_bytes() < C::bytes) __trap();
        ring.init(4 * C::CONSUMERS);
        mbarrier_init(full_q, 1);
        mbarrier_fence_init();
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<C::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce<C, SCORE, KV>(arguments.maps, place, base, ring, full_q);
        return;
    }
    registers_increase<C::CONSUMER_REGISTERS>();
    Consumer c(place, base, ring, warpgroup - 1);
    c.wait_q(full_q);
    uint32_t n = 0;  // tiles of the ring so far: V and K of each tile of keys, for K is held longer
    if (first < end) {
        {
            float rS[1][BN / 8][4], rdP[BN / 8][4];
            c.queue_scores(rS, rdP, n, end - 1);
            wgmma_wait<1>();
            c.exponentiate(rS, end - 1);
            wgmma_wait<0>();
            ring.release(n);
            c.derive(rS, rdP);
            pack_operand<T>(c.rdS, rS[0]);
        }
        for (int j = end - 2; j >= first; --j, n += 2) {
            float rS[1][BN / 8][4], rdP[BN / 8][4];
            c.queue_scores(rS, rdP, n + 2, j);
            c.queue_dq(n + 1);
            wgmma_wait<2>();
            c.exponentiate(rS, j);
            wgmma_wait<1>();
            ring.release(n + 2);
            c.derive(rS, rdP);
            wgmma_wait<0>();
            ring.release(n + 1);
            pack_operand<T>(c.rdS, rS[0]);
        }
        c.queue_dq(n + 1);
        wgmma_wait<0>();
    }
    c.store();
}
