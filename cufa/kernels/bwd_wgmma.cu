// FlashAttention-2's backward pass (Dao 2023, algorithm 2) on Hopper, for float16 and bfloat16,
// sm_90a. A block draws tiles of keys until there are none: BN keys of one K/V head each. It loops
// over the queries that see them, in tiles of BM, of all query heads of the group. Blocks whose
// keys few queries see draw more; K has two places, so that the next K comes during the steps of
// the one in front. The producer, one thread of the first warpgroup, fetches all tiles by TMA. The
// consumers, the other warpgroups, own 64 keys each: S^T = K Q^T and dP^T = V dO^T stay in
// registers, and so do P^T and dS^T, the left operands of dV += P^T dO and dK += dS^T Q. dS goes
// through shared memory to dQ += dS K, which the consumers share, a step later, be it of the next
// tile of keys: so no consumer waits for another's softmax. dQ is added up in global memory, by
// threads of the first warpgroup.
#include "bwd_common_sm90.cuh"
#include "bwd_pieces.cuh"
#include "bwd_turned_sm90.cuh"
#include "bwd_wgmma_smem.cuh"

template <class C, class SCORE, class KV>
struct BackwardConsumer {
    using T = typename C::T;
    static constexpr int BM = C::BM, BN = C::BN, D = C::HEAD_DIM, NT = BM / 8;
    using QTile = typename C::QTile;
    using KTile = typename C::KTile;
    using DsTile = typename C::DsTile;
    using Place = KeyPlace<BM, BN, SCORE, KV, true>;
    using Scores = float[NT][4];
    using DqPart = float[C::DQ_WIDTH / 8][4];
    // Whether the registers of dP^T are needed until there is P^T.
    static constexpr bool DP_LATE =
        (SCORE::CHANGES_EVERY_TILE || SCORE::DROPS_WEIGHTS) && D + BM / 2 > 128;

    const Place& place;
    const BackwardSmem<C>& smem;
    const uint32_t round;
    const int consumer;
    float rdK[D / 8][4] = {}, rdV[D / 8][4] = {};
    uint32_t rP[BM / 16][4], rdS[BM / 16][4];

    __device__ BackwardConsumer(const Place& place, const BackwardSmem<C>& smem, uint32_t round,
                                int consumer)
        : place(place), smem(smem), round(round), consumer(consumer) {}

    __device__ TurnedScores<T, SCORE, Place, NT> scores(const RowTile& t) const {
        return {place, t, place.key_tile * BN + consumer * 64};
    }

    // Zeroes the keys of K or V behind a sequence.
    __device__ void clear_tail(uint32_t tile) const {
        if (KV::TAILS)
            clear_rows_from<KTile>(place.sequence.seq_kv - place.key_tile * BN, tile, consumer);
    }
    // Queue the two products that need Q and dO only: S^T = K Q^T and dP^T = V dO^T.
    __device__ void queue_s(Scores& rS, uint32_t n, const RowTile& t) const {
        smem.ring_q.wait(n);
        if (KV::TAILS) clear_rows_from<QTile>(rows_left(t), smem.q(n), consumer);
        wgmma_fence();
        queue_product<T, KTile, QTile>(rS, KTile::operand(smem.k(round) + keys()),
                                       QTile::operand(smem.q(n)));
        wgmma_commit();
    }
    __device__ void queue_dp(Scores& rdP, uint32_t n, const RowTile& t) const {
        smem.ring_do.wait(n);
        if (KV::TAILS) clear_rows_from<QTile>(rows_left(t), smem.dout(n), consumer);
        wgmma_fence();
        queue_product<T, KTile, QTile>(rdP, KTile::operand(smem.v() + keys()),
                                       QTile::operand(smem.dout(n)));
        wgmma_commit();
    }
    __device__ uint32_t keys() const { return consumer * 64 * KTile::ROW_BYTES; }
    __device__ int rows_left(const RowTile& t) const { return place.sequence.seq_q - t.tile * BM; }
    // P^T = exp(S^T - lse)
    __device__ void exponentiate(Scores& rS, uint32_t n, const RowTile& t) {
        scores(t).weigh(rS, rP, smem.stats(n));
    }
    // dS^T = P^T (dP^T - delta). Weights that are dropped are 0 in rP.
    __device__ void derive(const Scores& rS, Scores& rdP, uint32_t n) {
        const int column = reread_thread_index() % 4 * 2;
        const float growth = Differentiated<SCORE>{place.p}.growth();
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            const float2 delta = lds_2(smem.stats(n) + 4 * (BM + nt * 8 + column));
            if constexpr (SCORE::DROPS_WEIGHTS)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t kept = rP[nt / 2][nt % 2 * 2 + i / 2] >> i % 2 * 16 & 0xffff;
                    rdP[nt][i] = kept ? rdP[nt][i] * growth : 0.f;
                }
            rdP[nt][0] = rS[nt][0] * (rdP[nt][0] - delta.x);
            rdP[nt][1] = rS[nt][1] * (rdP[nt][1] - delta.y);
            rdP[nt][2] = rS[nt][2] * (rdP[nt][2] - delta.x);
            rdP[nt][3] = rS[nt][3] * (rdP[nt][3] - delta.y);
        }
        pack_operand<T>(rdS, rdP);
    }
    // Hands dS to all consumers.
    __device__ void share_ds(uint32_t n) const {
        const int thread = reread_thread_index() % 128, lane = thread % 32;
        smem.ring_ds.acquire(n);
        const uint32_t lane_offset =
            DsTile::offset(lane / 16 * 8 + lane % 8, consumer * 8 + thread / 32 * 2 + lane / 8 % 2);
#pragma unroll
        for (int k = 0; k < BM / 16; ++k)
            stmatrix_x4_trans(smem.ds(n) + lane_offset + k * 16 * DsTile::ROW_BYTES, rdS[k][0],
                              rdS[k][1], rdS[k][2], rdS[k][3]);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem.ring_ds.full + 8 * smem.ring_ds.slot(n));
    }
    __device__ void queue_dkv(uint32_t n) {
        wgmma_fence();
        queue_product<T, QTile>(rdV, rP, QTile::operand(smem.dout(n)), true);
        queue_product<T, QTile>(rdK, rdS, QTile::operand(smem.q(n)), true);
        wgmma_commit();
    }
    // This consumer's part of dQ of a step with the K of `tile_k`: of 64 rows, or of some columns
    // of all rows.
    static __device__ void queue_dq(DqPart& rdQ, uint32_t n, const BackwardSmem<C>& smem,
                                    uint32_t tile_k, int consumer) {
        smem.ring_ds.wait(n);
        const uint32_t rows = C::SHARES_ROWS ? consumer * 64 * DsTile::ROW_BYTES : 0;
        const int column = C::SHARES_ROWS ? 0 : consumer * C::DQ_WIDTH;
        const uint32_t columns =
            column / KTile::PANEL_COLS * KTile::PANEL_BYTES + column % KTile::PANEL_COLS * 2;
        const uint32_t ds = DsTile::operand(smem.ds(n) + rows);
        const uint32_t k = KTile::operand(tile_k + columns);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < BN / 16; ++j)
            WgmmaOfRows<T, C::DQ_WIDTH>::ss(rdQ, DsTile::columns(ds, j), KTile::rows(k, j), j > 0);
        wgmma_commit();
    }
    // Hands it to the thread that adds it to the sum in global memory; dS is free then.
    static __device__ void hand_dq(const DqPart& rdQ, uint32_t n, const BackwardSmem<C>& smem,
                                   bool sums, int consumer) {
        smem.ring_ds.release(n);
        if (!sums) return;
        const int thread = reread_thread_index() % 128, lane = thread % 32;
        const uint32_t part = smem.dq(consumer, thread / 32);
        smem.acquire_dq(n);
#pragma unroll
        for (int i = 0; i < C::DQ_WIDTH / 8; ++i)
            sts_128(part + (i * 32 + lane) * 16,
                    make_float4(rdQ[i][0], rdQ[i][1], rdQ[i][2], rdQ[i][3]));
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem.full_dq(n));
    }
    // dV and dK leave straight from registers.
    __device__ void store() const {
        const auto& p = place.p;
        if (p.dk.data) store_rows(rdK, p.scale, p.dk, p.head_dim);
        if (p.dv.data) store_rows(rdV, Differentiated<SCORE>{p}.growth(), p.dv, p.head_dim_v);
    }
    // The warp's 16 rows of a gradient, `factor` times.
    __device__ void store_rows(const float (&r)[D / 8][4], float factor, const Tensor& to,
                               int cols) const {
        const int row = consumer * 64 + reread_thread_index() % 128 / 32 * 16;
        T* g = place.template rows_of<T>(to) + row * to.stride_seq;
        const bool aligned = (reinterpret_cast<uint64_t>(g) | to.stride_seq * sizeof(T)) % 16 == 0;
#pragma unroll
        for (int piece = 0; piece < D / 8; piece += 4) {
            float x[4][4];
#pragma unroll
            for (int i = 0; i < 16; ++i) x[i / 4][i % 4] = r[piece + i / 4][i % 4] * factor;
            write_pieces(x, g, to.stride_seq, place.keys_left() - row, piece, cols, aligned);
        }
    }
    // Leaves the part of dK and dV of these query heads for bwd_join.cu.
    __device__ void leave(float* sums) const {
        using Piece = DqPiece<T, D, true>;
        const int thread = reread_thread_index() % 128, lane = thread % 32;
        const int row = consumer * 64 + thread / 32 * 16;
        const float of_k = place.p.scale, of_v = Differentiated<SCORE>{place.p}.growth();
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
            const float (&k)[4] = rdK[i], (&v)[4] = rdV[i];
            float* at = Piece::at(sums, row, i) + lane * 4;
            *reinterpret_cast<float4*>(at) =
                make_float4(k[0] * of_k, k[1] * of_k, k[2] * of_k, k[3] * of_k);
            *reinterpret_cast<float4*>(at + BN * D) =
                make_float4(v[0] * of_v, v[1] * of_v, v[2] * of_v, v[3] * of_v);
        }
    }
};

// The tile of keys of a number, and the query heads that it is about.
template <class Place, class Arguments>
__device__ Place place_of(const Arguments& p, int number) {
    const int splits = p.kv_splits;
    return Place(p, Place::tile(p, number / splits), number % splits);
}

// Draws tiles of keys, and fetches the K and V of each, and the tiles of rows that visit them; one
// thread.
template <class C, class Place, class KV, class Arguments>
__device__ void produce(const BackwardMaps& maps, const Arguments& p, const BackwardSmem<C>& smem) {
    using QTile = typename C::QTile;
    constexpr int BM = C::BM;
    uint32_t n = 0;
    for (uint32_t round = 0;; ++round) {
        const int number = draw(p.turns_drawn);
        if (number >= p.heads / p.group * p.kv_tiles * p.kv_splits) {
            smem.expect_k(round, smem.NONE);
            return;
        }
        const Place place = place_of<Place>(p, number);
        const int key = place.key_tile * C::BN, batch = KV::RAGGED ? 0 : place.batch;
        load_keys<typename C::KTile, KV>(smem.k(round), maps.k, p.k, place, key,
                                         smem.expect_k(round, number));
        smem.ring_v.acquire(round);
        load_keys<typename C::KTile, KV>(smem.v(), maps.v, p.v, place, key,
                                         smem.ring_v.expect(round, C::KTile::bytes));
        for (RowTile t = place.begin(); place.visits(t); t = place.after(t), ++n) {
            const int head = place.query_head(t), row = place.sequence.first_q + t.tile * BM;
            const long long of_rows = place.row_of(t);
            smem.ring_q.acquire(n);
            const uint32_t full_q = smem.ring_q.expect(n, QTile::bytes + BM * 4);
            QTile::load(smem.q(n), 0, maps.q, full_q, row, head, batch, L2_KEPT);
            bulk_load(smem.stats(n), p.row_lse + of_rows, BM * 4, full_q);
            smem.ring_do.acquire(n);
            const uint32_t full_do = smem.ring_do.expect(n, QTile::bytes + BM * 4);
            QTile::load(smem.dout(n), 0, maps.d_out, full_do, row, head, batch, L2_KEPT);
            bulk_load(smem.stats(n) + BM * 4, p.row_delta + of_rows, BM * 4, full_do);
        }
    }
}

// Adds dQ of every third tile of rows, from number `adder` on, to the sum in global memory: with
// turns, when it is this block's. One thread.
template <class C, class Place, class Arguments>
__device__ void add_dq(const Arguments& p, const BackwardSmem<C>& smem, int adder) {
    using Piece = DqPiece<typename C::T, C::HEAD_DIM, true>;
    uint32_t n = 0;
    for (uint32_t round = 0;; ++round) {
        const int number = smem.wait_k(round);
        if (number == smem.NONE) return;
        smem.ring_k.arrive(round);
        if (!p.dq_sums) continue;
        const Place place = place_of<Place>(p, number);
        for (RowTile t = place.begin(); place.visits(t); t = place.after(t), ++n) {
            if (n % C::ADDERS != adder) continue;
            int* turn = p.turns ? place.turn(t) : nullptr;
            const int rank = turn ? place.rank(t) : 0;
            smem.wait_dq(n);
            if (turn) {
                while (ld_acquire(turn) != rank) {
                }
                fence_proxy_async_global();
            }
            bulk_add(Piece::at(p.dq_sums, place.row_of(t), 0), smem.dq(0, 0), C::DQ_BYTES);
            tma_store_commit();
            tma_store_wait_read();
            mbarrier_arrive(smem.empty_dq());
            if (turn) {
                tma_store_wait();
                fence_proxy_async_global();
                st_release(turn, rank + 1);
            }
        }
    }
}

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS,
          int BLOCKS_PER_SM, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    bwd_wgmma(const __grid_constant__ TmaBackwardArguments<SCORE, KV> arguments) {
    using C = BackwardConfig<T, HEAD_DIM, BM, BN, STAGES>;
    using Consumer = BackwardConsumer<C, SCORE, KV>;
    using Place = typename Consumer::Place;
    static_assert(HEAD_DIM_V == HEAD_DIM && WARPS == 4 * (C::CONSUMERS + 1), "as in the spec");
    static_assert(C::ADDERS == 3, "the first warpgroup's warps, but for the one that fetches");
    const auto& p = arguments.params;
    extern __shared__ __align__(1024) unsigned char smem[];
    const BackwardSmem<C> shared(smem_address(smem));
    if (threadIdx.x == 0) shared.init();
    __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<C::PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == 0) produce<C, Place, KV>(arguments.maps, p, shared);
        if (threadIdx.x % 32 == 0 && warp > 0) add_dq<C, Place>(p, shared, warp - 1);
        return;
    }
    registers_increase<C::CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    constexpr uint32_t NO_ROUND = ~0u;
    uint32_t n = 0;                // tiles of rows, of all tiles of keys
    uint32_t round_dq = NO_ROUND;  // the round of the latest step, whose dQ is not computed yet
    auto queue_dq = [&](typename Consumer::DqPart& rdQ) {
        Consumer::queue_dq(rdQ, n - 1, shared, shared.k(round_dq), consumer);
    };
    auto hand_dq = [&](const typename Consumer::DqPart& rdQ) {
        Consumer::hand_dq(rdQ, n - 1, shared, p.dq_sums, consumer);
    };
    auto finish_dq = [&] {
        if (round_dq == NO_ROUND) return;
        typename Consumer::DqPart rdQ;
        queue_dq(rdQ);
        wgmma_wait<0>();
        hand_dq(rdQ);
        shared.ring_k.release(round_dq);
        round_dq = NO_ROUND;
    };
    for (uint32_t round = 0;; ++round) {
        const int number = __shfl_sync(0xffffffff, shared.wait_k(round), 0);
        if (number == shared.NONE) break;
        const Place place = place_of<Place>(p, number);
        Consumer c(place, shared, round, consumer);
        c.clear_tail(shared.k(round));
        RowTile t = place.begin();
        if (!place.visits(t)) {  // no row sees these keys
            finish_dq();         // else it would hold K's place, which the producer may wait for
            shared.ring_k.release(round), shared.ring_v.pass_over(round);
        }
        while (place.visits(t)) {
            typename Consumer::Scores rS, rdP;
            typename Consumer::DqPart rdQ;
            c.queue_s(rS, n, t);
            if (round_dq != round) {
                shared.ring_v.wait(round);
                c.clear_tail(shared.v());
            }
            if (!Consumer::DP_LATE) c.queue_dp(rdP, n, t);
            wgmma_wait<!Consumer::DP_LATE>();
            c.exponentiate(rS, n, t);
            if (Consumer::DP_LATE) c.queue_dp(rdP, n, t);
            wgmma_wait<0>();
            t = place.after(t);
            if (!place.visits(t)) shared.ring_v.release(round);
            c.derive(rS, rdP, n);
            c.share_ds(n);
            queue_dq(rdQ);  // of the step in front; in the first one of what lies there, for no use
            c.queue_dkv(n);
            wgmma_wait<1>();
            if (round_dq != NO_ROUND) {
                hand_dq(rdQ);
                if (round_dq != round) shared.ring_k.release(round_dq);
            }
            round_dq = round;
            wgmma_wait<0>();
            shared.ring_q.release(n), shared.ring_do.release(n);
            ++n;
        }
        if (p.kv_splits == 1)
            c.store();
        else if (p.kv_sums)
            c.leave(p.kv_sums + number * (2ll * BN * HEAD_DIM));
    }
    finish_dq();
}
