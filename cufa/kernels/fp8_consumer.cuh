// A consumer of fp8_wgmma.cu: a warpgroup that computes 64 rows of each tile.
#pragma once
#include "epilogue_sm90.cuh"
#include "fa3_place.cuh"
#include "fp8_config.cuh"
#include "fp8_softmax.cuh"

template <class C>
struct Consumer8 {
    using SCORE = typename C::SCORE;
    using KV = typename C::KV;
    using QTile = typename C::QTile;
    using KTile = typename C::KTile;
    using VTile = typename C::VTile;
    static constexpr int BN = C::BN, NT = BN / 8, PIECE = C::PIECE, IN_FLIGHT = C::IN_FLIGHT;

    // Whether the first scores of a row tell about the others, and need no code of their own that
    // would be there twice.
    static constexpr bool UNCHECKED = SCORE::LINEAR && SCORE::FIRST_TILE_BOUNDS_MAX;

    const Arguments<SCORE, KV>& p;
    const Smem<C>& smem;
    const int consumer;
    const Turns<C::CONSUMERS, C::PING_PONG> turns;
    const uint32_t operand_q, operand_k, operand_v;
    Place<C> here;
    Softmax8<C::POLYNOMIALS> softmax;
    float rS[1][NT][4];                      // S, then P
    uint32_t rP[BN / 32][4];                 // P as the operand of P V
    float rPart[IN_FLIGHT][PIECE / 8][4];    // P V of one tile of keys, by wgmma
    float rO[1][C::HEAD_DIM_V / 8][4] = {};  // their sum, in float32
    float divisor[1][2];                     // of O, at the end of a tile
    int kv_head;                             // of all batches
    int first_key = 0;                       // of the sequence, among scales
    float scale_q[2], scale_k, scale_v, scale_v_next;

    __device__ Consumer8(const Arguments<SCORE, KV>& p, const Smem<C>& smem, int consumer)
        : p(p),
          smem(smem),
          consumer(consumer),
          turns(consumer),
          operand_q(QTile::operand(smem.base + consumer * 64 * QTile::ROW_BYTES)),
          operand_k(KTile::operand(smem.base + C::K)),
          operand_v(VTile::operand(smem.base + C::V)),
          here(p, smem, consumer) {}

    __device__ void run() {
        take_up();
        queue_s();
        turns.pass();
        wgmma_wait<0>();
        if (here.more) release_k(), exponentiate();
        scale_v = scale_v_next;
        while (here.more) {
            pack_p();
            while (here.has_next_keys()) step<false>();
            step<true>();
        }
    }

 private:
    // S = Q K^T of the next keys and O += P V of the present ones are queued, and P of the next
    // computed under them. After a tile's last keys come the next tile's first.
    template <bool LAST>
    __device__ void step() {
        const uint32_t present = here.n++;  // keys
        const int end = here.keys_of_tile();
        if constexpr (LAST)
            take_up();
        else
            --here.j, here.visit = here.ahead;
        queue_s();
        smem.ring_v.wait(present);
        if constexpr (KV::TAILS) clear_tail(present, end);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) queue_o(present, i);
        turns.pass();
        if constexpr (!LAST) here.look_ahead();

        // P = exp(S - m)
        if constexpr (LAST) conclude();
        wgmma_wait<IN_FLIGHT>();
        bool moved = false;
        float factor[2] = {scale_v, scale_v};  // of P V
        if (C::O_FIRST) fold(present, factor);
        if constexpr (LAST) {
            if (here.more) release_k(), exponentiate();
        } else {
            if constexpr (UNCHECKED)
                moved = exponentiate_unchecked();
            else
                moved = exponentiate();
            release_k();
        }

        // O follows m, or is written. The branch keeps the exponentials in front of the wait for
        // P V: else the compiler puts them behind it.
        if (!LAST && moved) {
            softmax.rescale(rO);
            factor[0] *= softmax.alpha[0][0], factor[1] *= softmax.alpha[0][1];
        }
        if (!C::O_FIRST) fold(present, factor);
        smem.ring_v.release(present);
        scale_v = scale_v_next;
        if constexpr (LAST)
            store();
        else
            pack_p();
    }

    // Queues S = Q K^T, when it is this consumer's turn, and asks for the scales of its keys. If no
    // row tile is left, the product reads what is there, and nobody looks at the result.
    __device__ void queue_s() {
        if (here.more) {
            const int key = first_key + here.key_tile() * BN;
            scale_k = load_early(p.scales_k.of(kv_head, key));
            scale_v_next = load_early(p.scales_v.of(kv_head, key));
        }
        turns.wait();
        if (here.more) smem.ring_k.wait(here.n);
        wgmma_fence();
        queue_product<float8, QTile, KTile>(
            rS[0], operand_q + smem.ring_q.slot(here.round) * (C::SLOT_BYTES >> 4),
            operand_k + smem.ring_k.slot(here.n) * (KTile::bytes >> 4));
        wgmma_commit();
    }
    // Queues the i-th piece of P V.
    __device__ void queue_o(uint32_t present, int i) {
        const uint32_t tile = operand_v + smem.ring_v.slot(present) * (VTile::bytes >> 4);
#pragma unroll
        for (int k = 0; k < BN / 32; ++k)
            Wgmma<float8, PIECE>::rs(rPart[i % IN_FLIGHT], rP[k],
                                     VTile::columns(VTile::template piece<PIECE>(tile, i), k),
                                     k > 0);
        wgmma_commit();
    }
    // Zeroes the keys of V from `end` on: memory behind a sequence may hold NaN, and 0 times NaN is
    // NaN. Each consumer writes all of them; the others write the same.
    __device__ void clear_tail(uint32_t present, int end) const {
        if (end >= BN) return;
        constexpr int CHUNKS = VTile::CHUNKS, KEYS_OF_CHUNK = 16;
        const uint32_t tile = smem.v(present);
#pragma unroll 1
        for (int i = thread_index_anew() % 128; i < C::HEAD_DIM_V * CHUNKS; i += 128) {
            const int keys = end - i % CHUNKS * KEYS_OF_CHUNK;
            if (keys < KEYS_OF_CHUNK)
                VTile::keep(tile + VTile::offset(i / CHUNKS, i % CHUNKS), keys);
        }
        fence_proxy_async();
        named_barrier_sync(8 + consumer, 128);
    }
    // Adds P V up in float32: the sums of wgmma have too few bits for more than a tile of keys.
    // Pieces that have not been queued yet are, as soon as registers for them are free.
    __device__ void fold(uint32_t present, const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < C::PIECES; ++i) {
            wait_for(C::PIECES - 1 - i);
#pragma unroll
            for (int e = 0; e < PIECE / 2; ++e) {
                float& o = rO[0][i * PIECE / 8 + e / 4][e % 4];
                o = fmaf(rPart[i % IN_FLIGHT][e / 4][e % 4], factor[e / 2 % 2], o);
            }
            if (i + IN_FLIGHT < C::PIECES) wgmma_fence(), queue_o(present, i + IN_FLIGHT);
        }
    }
    // Waits for the piece that `pieces` later ones follow.
    static __device__ void wait_for(int pieces) {
        if (pieces >= IN_FLIGHT - 1)
            wgmma_wait<IN_FLIGHT - 1>();
        else if (pieces == 1)
            wgmma_wait<1>();
        else
            wgmma_wait<0>();
    }

    __device__ void release_k() const {
        smem.ring_k.release(here.n);
        // After the last S. All threads arrive, as each has looked up what this tile and the one
        // before are.
        if (here.j == here.keys.first) smem.ring_q.arrive(here.round);
    }

    // Takes up the next tile, if there is one.
    __device__ void take_up() {
        ++here.round;
        smem.ring_q.wait(here.round);
        const volatile typename C::Work& work = here.work();
        here.j = here.j_begin = uniform(work.end()) - 1;
        here.more = here.j >= 0;
        if (!here.more) return;
        here.keys.first = C::FIRST ? uniform(work.keys[0].first) : 0;
        here.keys.whole_first = SCORE::LEFT_EDGE ? uniform(work.keys[0].whole_first) : 0;
        here.keys.whole_end = uniform(work.keys[0].whole_end);
        here.look_up(), here.look_ahead();
        const int head = uniform(work.head), batch = KV::RAGGED ? 0 : uniform(work.batch);
        kv_head = batch * (p.heads_q / p.group) + head / p.group;
        int first_query = 0, queries = p.seq_q;
        if constexpr (KV::RAGGED) {
            first_query = work.sequence.first_q, queries = work.sequence.seq_q;
            first_key = uniform(work.sequence.first_k);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = work.q0 + here.warp_row() + thread_index_anew() % 32 / 4 + 8 * h;
            scale_q[h] =
                p.scale_log2 * load_early(p.scales_q.of(batch * p.heads_q + head,
                                                        first_query + min(query, queries - 1)));
        }
    }

    // S -> P, with what the score makes of S in between. Whether O must follow m.
    __device__ bool exponentiate() {
        float factor[2];
        apply_score(factor);
        const bool moved = softmax.follow(rS, factor);
        softmax.exponentiate(rS, factor);
        return moved;
    }
    // The same without maxima: if P comes out too large, m follows; where P has lost what was
    // small, S is computed once more.
    __device__ bool exponentiate_unchecked() {
        float factor[2];
        apply_score(factor);
        const float before[2] = {softmax.l[0][0], softmax.l[0][1]};
        softmax.l[0][0] = softmax.l[0][1] = 0.f;
        softmax.exponentiate(rS, factor);
        bool moved = softmax.may_pass(softmax.MAX_SUM);
        float kept[2] = {1.f, 1.f};
        if (moved) {
            if (softmax.may_pass(0x1p60f)) {
                wgmma_fence();
                queue_product<float8, QTile, KTile>(
                    rS[0], operand_q + smem.ring_q.slot(here.round) * (C::SLOT_BYTES >> 4),
                    operand_k + smem.ring_k.slot(here.n) * (KTile::bytes >> 4));
                wgmma_commit();
                wgmma_wait<0>();
                softmax.l[0][0] = softmax.l[0][1] = 0.f;
                softmax.alpha[0][0] = softmax.alpha[0][1] = 1.f;
                apply_score(factor);
                softmax.follow(rS, factor);
                softmax.exponentiate(rS, factor);
            } else {
                softmax.shift(rS);
            }
            kept[0] = softmax.alpha[0][0], kept[1] = softmax.alpha[0][1];
        }
        softmax.l[0][0] += before[0] * kept[0], softmax.l[0][1] += before[1] * kept[1];
        return moved;
    }
    // Applies the score to S, and finds the factors that bring it to log2 units.
    __device__ void apply_score(float (&factor)[2]) {
        // Not 0, even if the product is too small for float32: 0 times -INF would be NaN.
#pragma unroll
        for (int h = 0; h < 2; ++h) factor[h] = fmaxf(scale_q[h] * scale_k, 0x1p-126f);
        if constexpr (!SCORE::LINEAR) {
#pragma unroll
            for (int i = 0; i < NT * 4; ++i) rS[0][i / 4][i % 4] *= factor[i / 2 % 2];
            factor[0] = factor[1] = 1.f;
        }
        const Masked masked = here.masked();
        if (SCORE::CHANGES_EVERY_TILE || masked.right || masked.left) {
            const At at = here.at(0);
            score().apply(rS, here.sequence(at.batch), 1.f, at, masked, here.visit.is_partial());
        }
    }
    __device__ const SCORE& score() const { return p; }
    // P as the operand of P V, see VTile8.
    __device__ void pack_p() {
        if constexpr (SCORE::DROPS_WEIGHTS) {
            At at = here.at(0);
            at.pack = here.work().head;
            score().drop(rS, at);
        }
#pragma unroll
        for (int k = 0; k < BN / 32; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (*s)[4] = &rS[0][4 * k + i / 2 * 2];
                const int h = i % 2 * 2;
                rP[k][i] = pack4_e4m3(s[0][h], s[0][h + 1], s[1][h], s[1][h + 1]);
            }
    }

    // The rows of the tile before.
    __device__ PackedRows rows_of_result() const {
        if constexpr (KV::RAGGED) {
            const volatile typename C::Work& work = here.work_before();
            const Sequence sequence = KV::sequence_of_result(p, work.batch);
            return PackedRows(p, sequence, 0, work.head, work.q0 + here.warp_row());
        } else {
            return here.packed_rows();
        }
    }
    // Ends the sums of the tile before, and begins the next one's.
    __device__ void conclude() {
        float lse[1][2];
        softmax.conclude(divisor, lse, SCORE::NEEDS_LSE || p.lse);
        if constexpr (SCORE::ENDS_ROWS) {
            const PackedRows rows = rows_of_result();
#pragma unroll
            for (int h = 0; h < 2; ++h) p.end_row(divisor[0][h], lse[0][h], rows.head[h]);
        }
        if constexpr (KV::PADS_ROWS) {  // rows that follow the last query; divided by 0, O is 0
            const PackedRows rows = rows_of_result();
            const int queries = KV::queries(p, rows.batch);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (rows.query[h] >= queries) divisor[0][h] = 0.f, lse[0][h] = -INF;
        }
        if (p.lse) store_lse(lse[0], p, rows_of_result());
    }
    // Writes O / l of it.
    __device__ void store() {
        softmax.divide(rO, divisor);
        store_o_direct<typename C::OUT>(rO[0], p, rows_of_result());
        __syncwarp();  // for the compiler: else it makes no use of what is the same in all lanes
#pragma unroll
        for (int i = 0; i < C::HEAD_DIM_V / 2; ++i) rO[0][i / 4][i % 4] = 0.f;
    }
};
