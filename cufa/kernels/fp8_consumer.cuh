// A consumer of fp8_wgmma.cu: a warpgroup that computes 64 rows of each tile.
#pragma once
#include "epilogue_sm90.cuh"
#include "fa3_place.cuh"
#include "fp8_pieces.cuh"
#include "fp8_softmax.cuh"
#include "rescore_sm90.cuh"

template <class C>
struct Consumer8 {
    using SCORE = typename C::SCORE;
    using KV = typename C::KV;
    using QTile = typename C::QTile;
    using KTile = typename C::KTile;
    using VTile = typename C::VTile;
    static constexpr int BN = C::BN, NT = BN / 8;
    static constexpr bool CONTIGUOUS = true;  // a lane's columns of O, see VTile8

    // Whether tiles of keys after the first can do without row maxima: the first scores of a row
    // tell about the others, and all are proportional to Q K^T. The code of other scores would be
    // there twice.
    static constexpr bool UNCHECKED = SCORE::LINEAR && SCORE::FIRST_TILE_BOUNDS_MAX;

    const Arguments<SCORE, KV>& p;
    const Smem<C>& smem;
    const int consumer;
    const Turns<C::CONSUMERS, C::PING_PONG> turns;
    const uint32_t operand_q, operand_k, operand_v;
    Place<C> here;
    Softmax8 softmax;
    float rS[1][NT][4];                      // S, then P
    uint32_t rP[BN / 32][4];                 // P as the operand of P V
    float rO[1][C::HEAD_DIM_V / 8][4] = {};  // P V, in float32
    float divisor[1][2];                     // of O, at the end of a tile
    int kv_head;                             // of all batches
    int first_key = 0;                       // of the sequence, among scales
    float scale_q[2], scale_k, scale_v;      // of rows, and of a tile of keys

    __device__ Consumer8(const Arguments<SCORE, KV>& p, const Smem<C>& smem, int consumer)
        : p(p),
          smem(smem),
          consumer(consumer),
          turns(consumer),
          operand_q(QTile::operand(smem.base + consumer * 64 * QTile::ROW_BYTES)),
          operand_k(KTile::operand(smem.base + C::K)),
          operand_v(VTile::operand(smem.base + C::V)),
          here(p, smem, consumer) {}

    // A step has the products P V of a tile of keys, and S of the next tile of keys. They are
    // queued at the consumer's turn: while they run, the others compute P. After the last keys of a
    // tile of rows come the first of the next one.
    __device__ void run() {
        turns.wait();
        begin_tile();
        while (here.more) {
            // The product is computed here: next to the load, it would wait for the load.
#pragma unroll
            for (int h = 0; h < 2; ++h) scale_q[h] *= p.scale_log2, computed_here(scale_q[h]);
            wgmma_wait<0>();
            exponentiate();
            // O is 0, and needs no rescaling.
            if constexpr (UNCHECKED && !SCORE::RIGHT_EDGE) softmax.make_room(rS);
            pack_p();
            while (true) {
                release_k();
                const uint32_t present = here.n++;
                const int end = here.keys_of_tile();
                smem.ring_v.wait(present);
                turns.wait();
                if constexpr (KV::TAILS) clear_tail(present, end);
                add_product<C>(rO, rP, tile_v(present), scale_v);
                smem.ring_v.release(present);
                if (!here.has_next_keys()) break;
                --here.j, here.visit = here.ahead;
                load_scales();
                queue_s();
                turns.pass();
                here.look_ahead();
                wgmma_wait<0>();
                if (next_p()) softmax.rescale(rO);
            }
            begin_tile();
            conclude();
            store();
        }
        wgmma_wait<0>();
    }

 private:
    // Queues S of the first keys of the next tile of rows, and ends this consumer's turn. Only then
    // reads what S does not need.
    __device__ void begin_tile() {
        await_tile();
        queue_s();
        turns.pass();
        if (here.more) read_tile();
    }
    // Queues S = Q K^T. If no tile of rows is left, the product reads whatever is in the slots, and
    // its result is not used.
    __device__ void queue_s() {
        if (here.more) smem.ring_k.wait(here.n);
        wgmma_fence();
        queue_product<float8, QTile, KTile>(
            rS[0], operand_q + smem.ring_q.slot(here.round) * (C::SLOT_BYTES >> 4),
            operand_k + smem.ring_k.slot(here.n) * (KTile::bytes >> 4));
        wgmma_commit();
    }
    __device__ void load_scales() {
        const int key = first_key + here.key_tile() * BN;
        scale_k = load_early(p.scales_k.of(kv_head, key));
        scale_v = load_early(p.scales_v.of(kv_head, key));
    }
    __device__ uint32_t tile_v(uint32_t present) const {
        return operand_v + smem.ring_v.slot(present) * (VTile::bytes >> 4);
    }
    // Zeroes the keys of V from `end` on: memory behind a sequence may hold NaN, and 0 times NaN is
    // NaN. Each consumer zeroes all of them, so that none waits for another; all write the same.
    __device__ void clear_tail(uint32_t present, int end) const {
        if (end >= BN) return;
        constexpr int CHUNKS = VTile::CHUNKS, KEYS_OF_CHUNK = 16;
        const uint32_t tile = smem.v(present);
#pragma unroll 1
        for (int i = reread_thread_index() % 128; i < C::HEAD_DIM_V * CHUNKS; i += 128) {
            const int keys = end - i % CHUNKS * KEYS_OF_CHUNK;
            if (keys < KEYS_OF_CHUNK)
                VTile::keep(tile + VTile::offset(i / CHUNKS, i % CHUNKS), keys);
        }
        fence_proxy_async();
        named_barrier_sync(8 + consumer, 128);
    }
    __device__ void release_k() const {
        smem.ring_k.release(here.n);
        // After the last S of a tile of rows, its slot of Q is free. All threads arrive, as each
        // has read the Work of this tile and of the one before.
        if (here.j == here.keys.first) smem.ring_q.arrive(here.round);
    }

    // Whether all of the consumer's rows are beyond the last query.
    __device__ bool has_no_rows() const {
        const volatile typename C::Work& work = here.work();
        int queries = p.seq_q;
        if constexpr (KV::TAILS) queries = uniform(work.sequence.seq_q);
        return (uniform(work.q0) + consumer * 64) >> p.pack_log2 >= queries;
    }
    // Leaves a tile of keys, and this turn, to the other consumers.
    __device__ void skip_keys() {
        turns.pass();
        smem.ring_k.pass_over(here.n), smem.ring_v.pass_over(here.n);
        ++here.n;
        turns.wait();
    }

    // Waits for the next tile of rows, if there is one. Skips the keys that only the other
    // consumers visit: the lowest ones of the tile before, and the highest ones of this tile. The
    // rest of `here` is still that of the tile before, see `read_tile`.
    __device__ void await_tile() {
        ++here.round;
        smem.ring_q.wait(here.round);
        const volatile typename C::Work& work = here.work();
        if (here.round > 0) {
            const int end = C::FIRST ? uniform(here.work_before().first()) : 0;
            for (int first = here.keys.first; first > end; --first) skip_keys();
        }
        here.j = uniform(work.end()) - 1;
        here.more = here.j >= 0;
        if constexpr (C::SKIPS)
            if (here.more)
                for (const int end = uniform(work.keys[here.part()].end); here.j >= end; --here.j)
                    skip_keys();
        here.j_begin = here.j;
    }
    // Reads the rest of the tile's Work, and loads the scales of its rows and first keys.
    __device__ void read_tile() {
        const volatile typename C::Work& work = here.work();
        const int part = here.part();
        here.keys.first = C::FIRST ? uniform(work.keys[part].first) : 0;
        here.keys.whole_first = SCORE::LEFT_EDGE ? uniform(work.keys[part].whole_first) : 0;
        here.keys.whole_end = uniform(work.keys[part].whole_end);
        if (has_no_rows()) here.keys.first = here.j;  // one tile of keys, whose P V is not stored
        here.look_up(), here.look_ahead();
        const int head = uniform(work.head), batch = KV::RAGGED ? 0 : uniform(work.batch);
        kv_head = batch * (p.heads_q / p.group) + head / p.group;
        int first_query = 0, queries = p.seq_q;
        if constexpr (KV::RAGGED) {
            first_query = work.sequence.first_q, queries = work.sequence.seq_q;
            first_key = uniform(work.sequence.first_k);
        }
        load_scales();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int query = work.q0 + here.warp_row() + reread_thread_index() % 32 / 4 + 8 * h;
            scale_q[h] = load_early(
                p.scales_q.of(batch * p.heads_q + head, first_query + min(query, queries - 1)));
        }
    }

    using Factors = float[2];  // by row

    // Computes P of the next keys. Returns whether m has moved, so that O must be rescaled.
    __device__ bool next_p() {
        if constexpr (UNCHECKED) return exponentiate_unchecked();
        const bool moved = exponentiate();
        pack_p();
        return moved;
    }
    // S -> score -> P. Returns whether m has moved.
    __device__ bool exponentiate() {
        Factors factor;
        apply_score(factor);
        const bool moved = softmax.follow(rS, factor);
        softmax.exponentiate(rS, factor);
        return moved;
    }
    // The same, and packs P. Looks for maxima only as long as some row may have seen no key. After
    // that, P may come out too large: then m moves, and P is packed again.
    __device__ bool exponentiate_unchecked() {
        Factors factor;
        apply_score(factor);
        const bool checked = SCORE::RIGHT_EDGE && here.j >= here.keys.whole_end;
        bool moved = false;
        if (checked) moved = softmax.follow(rS, factor);
        float before[2] = {softmax.l[0][0], softmax.l[0][1]};
        softmax.l[0][0] = softmax.l[0][1] = 0.f;
        softmax.exponentiate(rS, factor);
        pack_p();  // under the exponentials
        const bool too_large = !checked && softmax.too_large();
        if (too_large) {
            correct(factor);
            before[0] *= softmax.alpha[0][0], before[1] *= softmax.alpha[0][1];
            moved = true;
        }
        if (too_large) pack_p();  // in the branch above: 40 to 112 bytes of spills at D = 128
        softmax.l[0][0] += before[0], softmax.l[0][1] += before[1];
        return moved;
    }
    // Moves m. The sums of P say how far; but where P has grown so far that small ones may be lost,
    // each warp computes its scores again, and finds their maxima.
    __device__ void correct(const Factors& factor) {
        bool again[1][2];
        softmax.shift(rS, again);
        if (!__any_sync(0xffffffff, again[0][0] || again[0][1])) return;
        const float l[1][2] = {};
        const Masked masked = here.masked();
        // A wide O leaves no registers for this: part of it goes aside, or each step would spill.
        constexpr int ASIDE = C::HEAD_DIM_V > 64 ? 48 : 0;
        volatile float aside[ASIDE + 1];
#pragma unroll
        for (int i = 0; i < ASIDE; ++i) aside[i] = rO[0][i / 4][i % 4];
        exponentiate_again<float8, QTile, KTile>(
            softmax, rS, again, l, smem.q(here.round), here.warp_row(), smem.k(here.n),
            [&](auto& some, int column) {
#pragma unroll
                for (int e = 0; e < 8; ++e) some[0][e / 4][e % 4] *= factor[e / 2 % 2];
                if (masked.right || masked.left) {
                    const At at = here.at(column);
                    score().apply(some, here.sequence(at.batch), 1.f, at, masked,
                                  here.visit.is_partial());
                }
            });
#pragma unroll
        for (int i = 0; i < ASIDE; ++i) rO[0][i / 4][i % 4] = aside[i];
        __syncwarp();  // a lane releases K, which all lanes have read
    }
    // Applies the score to S, and finds the factors that bring the result to log2 units.
    __device__ void apply_score(Factors& factor) {
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

    // The rows of the tile before, in O.
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
    // Writes O / l of the tile before.
    __device__ void store() {
        softmax.divide(rO, divisor);
        store_o_direct<typename C::OUT, CONTIGUOUS>(rO[0], p, rows_of_result());
        __syncwarp();  // for the compiler: else it makes no use of what is the same in all lanes
#pragma unroll
        for (int i = 0; i < C::HEAD_DIM_V / 2; ++i) rO[0][i / 4][i % 4] = 0.f;
    }
};
