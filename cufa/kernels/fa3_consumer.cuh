// A consumer of fa3_wgmma.cu: a warpgroup that computes 64 rows of each tile, algorithm 2.
#pragma once
#include "epilogue_sm90.cuh"
#include "fa3_exponent.cuh"
#include "fa3_place.cuh"

// Forms of a step. CHECKED: the next key tile needs row maxima. UNCHECKED: it does not. LAST: this
// row tile has no next key tile, and the step takes up the next row tile's first one, unless row
// tiles begin by themselves. A step of several forms chooses at run time.
enum class Form { CHECKED, UNCHECKED, LAST };

template <class C>
struct Consumer {
    using T = typename C::T;
    using SCORE = typename C::SCORE;
    using KV = typename C::KV;
    using QTile = typename C::QTile;
    using KTile = typename C::KTile;
    using VTile = typename C::VTile;
    static constexpr int BN = C::BN;
    // A warp takes a curve if all its scores are within its ends: those, too, of rows and keys that
    // follow a sequence, for which zeros stand then.
    static constexpr bool CLEARS = KV::TAILS && SCORE::CURVE_TERMS > 0;

    const Arguments<SCORE, KV>& p;
    const TensorMap& map_o;
    const Smem<C>& smem;
    const int consumer;
    const Turns<C::CONSUMERS, C::PING_PONG> turns;
    const uint32_t operand_q, operand_k, operand_v;
    Exponent<C> exponent;  // S and P
    float rO[1][C::HEAD_DIM_V / 8][4] = {};
    Place<C> here;
    float divisor[1][2];  // of O, at the end of a tile

    __device__ Consumer(const Arguments<SCORE, KV>& p, const TensorMap& map_o, const Smem<C>& smem,
                        int consumer)
        : p(p),
          map_o(map_o),
          smem(smem),
          consumer(consumer),
          turns(consumer),
          operand_q(QTile::operand(smem.base + consumer * 64 * QTile::ROW_BYTES)),
          operand_k(KTile::operand(smem.base + C::K)),
          operand_v(VTile::operand(smem.base + C::V)),
          exponent(p),
          here(p, smem, consumer) {}

    __device__ void run() {
        if constexpr (C::ACROSS && !C::FOLDED) begin_tile();
        while (true) {
            if constexpr (!C::ACROSS) begin_tile();
            if constexpr (C::FOLDED) step<Form::CHECKED, Form::LAST>();
            if (!here.more) break;
            if constexpr (!C::FOLDED) exponent.pack_p(here);
            steps();
            if constexpr (!C::FOLDED) step<Form::LAST>();
        }
        tma_store_wait_read();
    }

 private:
    // Steps between a tile's first keys and its last; if FOLDED, up to those that need row maxima.
    __device__ void steps() {
        if constexpr (C::ONE_LOOP) {
            while (here.has_next_keys()) step<Form::CHECKED, Form::UNCHECKED>();
        } else if constexpr (!SCORE::FIRST_TILE_BOUNDS_MAX) {
            while (here.has_next_keys()) step<Form::CHECKED>();
        } else {
            do {
                if (C::FOLDED && here.has_next_keys() && exponent.needs_maxima(here)) return;
                if constexpr (!C::FOLDED) {
                    while (here.has_next_keys() && exponent.needs_maxima(here))
                        step<Form::CHECKED>();
                }
                while (here.has_next_keys() &&
                       !(SCORE::HAS_BLOCK_MAP && exponent.needs_maxima(here)))
                    step<Form::UNCHECKED>();
            } while (SCORE::HAS_BLOCK_MAP && !C::FOLDED && here.has_next_keys());
        }
    }

    // A step of algorithm 2: S = Q K^T of the next keys and O += P V of the present ones are
    // queued, and P of the next computed under them. After a tile's last keys come the next tile's
    // first, if its Q has a slot of its own. If FOLDED, the first step of all has no present keys:
    // its O is not stored.
    template <Form... FORMS>
    __device__ void step() {
        constexpr bool CHECKED = ((FORMS == Form::CHECKED) || ...);
        constexpr bool UNCHECKED = ((FORMS == Form::UNCHECKED) || ...);
        constexpr bool LAST = ((FORMS == Form::LAST) || ...);
        constexpr bool TAKES_KEYS = CHECKED || UNCHECKED || C::ACROSS;
        const bool checked = CHECKED && (!UNCHECKED || exponent.needs_maxima(here));
        const bool first = here.at_first_keys();
        const bool last = LAST && (!CHECKED || !here.has_next_keys());
        const uint32_t present = here.n++;  // keys
        const int end = here.keys_of_tile();
        if (first && last) free_q();
        if (!last)
            --here.j, here.visit = here.ahead;
        else if constexpr (C::ACROSS)
            take_up();
        else
            ++here.round;

        // S = Q K^T of the next keys, and O += P V of the present ones
        if constexpr (TAKES_KEYS)
            queue_s(!last || here.more);
        else
            turns.wait();
        const bool begun = !C::FOLDED || !last || here.round > 0;
        queue_o(present, begun, first, end);
        turns.pass();
        if (!last) here.look_ahead();
        if (first && !last) free_q();

        // P = exp(S - m)
        const float l[1][2] = {{exponent.softmax.l[0][0], exponent.softmax.l[0][1]}};
        bool moved = false;
        if constexpr (UNCHECKED && !CHECKED) {
            wgmma_wait<C::O_FIRST ? 0 : 1>();
            exponent.exponentiate_unchecked(here);
        } else {
            if (last && begun) conclude();
            if constexpr (TAKES_KEYS) {
                wgmma_wait<1>();
                if (last ? here.more : checked) {
                    release_k();
                    moved = exponent.exponentiate_checked(here);
                } else if constexpr (UNCHECKED) {
                    exponent.exponentiate_unchecked(here);
                    moved = exponent.too_large();
                    if (moved) exponent.correct(l, here);
                    release_k();
                }
            }
        }

        // O follows m, or is written
        wgmma_wait<0>();
        if (begun) smem.ring_v.release(present);
        if (last) {
            if (C::ACROSS) skip_v(present + 1);
            if (begun) store();
        } else if (moved) {
            exponent.softmax.rescale(rO);
        }

        if constexpr (LAST && !CHECKED) return;  // P is packed where the tile begins
        if (CHECKED || !exponent.PACKS_EARLY) exponent.pack_p(here);
        if constexpr (UNCHECKED && !CHECKED) {
            // The check comes after P is packed: it runs under the exponentials.
            if (exponent.too_large()) {
                exponent.correct(l, here);
                exponent.softmax.rescale(rO);
                exponent.pack_p(here);
            }
            release_k();
        }
    }

    // Queues S = Q K^T, when it is this consumer's turn. If no row tile is left, the product reads
    // what is there, and nobody looks at the result.
    __device__ void queue_s(bool loaded) {
        turns.wait();
        if (loaded) smem.ring_k.wait(here.n);
        if constexpr (CLEARS)
            if (loaded && here.at_first_keys()) clear_scores();
        wgmma_fence();
        queue_product<T, QTile, KTile>(
            exponent.rS[0], operand_q + smem.ring_q.slot(here.round) * (C::SLOT_BYTES >> 4),
            operand_k + smem.ring_k.slot(here.n) * (KTile::bytes >> 4));
        wgmma_commit();
    }
    // Queues O += P V, or O = P V, of the i-th tile of keys, which has keys up to `end`.
    __device__ void queue_o(uint32_t i, bool loaded, bool first, int end) {
        if (loaded) smem.ring_v.wait(i);
        if (KV::TAILS) clear_tail<VTile>([&] { return smem.v(i); }, end);
        wgmma_fence();
        queue_product<T, VTile>(rO[0], exponent.rP,
                                operand_v + smem.ring_v.slot(i) * (VTile::bytes >> 4), !first);
        wgmma_commit();
    }
    // Zeroes rows [first, end) of a tile: memory behind a sequence may hold NaN, and 0 times NaN is
    // NaN. Each consumer writes all of them; the others write the same.
    template <class Tile, class Place>
    __device__ void clear_tail(Place tile, int first, int end = BN) const {
        if (first >= end) return;
        constexpr int CHUNKS = Tile::CHUNKS;
        const int begin = max(first, 0) * CHUNKS;
#pragma unroll 1
        for (int chunk = begin + reread_thread_index() % 128; chunk < end * CHUNKS; chunk += 128)
            sts_128(tile() + Tile::offset(chunk / CHUNKS, chunk % CHUNKS),
                    make_float4(0.f, 0.f, 0.f, 0.f));
        fence_proxy_async();
        named_barrier_sync(8 + consumer, 128);
    }
    // The same of K, and of this consumer's rows of Q.
    __device__ void clear_scores() const {
        clear_tail<KTile>([&] { return smem.k(here.n); }, here.keys_of_tile());
        if constexpr (KV::RAGGED) {
            const volatile typename C::Work& work = here.work();
            const int rows = (work.sequence.seq_q << p.pack_log2) - work.q0;
            clear_tail<QTile>([&] { return smem.q(here.round); }, max(rows, consumer * 64),
                              consumer * 64 + 64);
        }
    }

    __device__ void release_k() const {
        smem.ring_k.release(here.n);
        // After the last S. All threads arrive, as each has looked up what this tile and the one
        // before are.
        if (C::O_FROM_REGISTERS && here.j == here.keys.first) smem.ring_q.arrive(here.round);
    }
    // Frees those V from the i-th on whose keys were skipped.
    __device__ void skip_v(uint32_t i) const {
        for (; C::SKIPS && i < here.n; ++i) smem.ring_v.pass_over(i);
    }
    // Frees the slot of Q that the last O was written from.
    __device__ void free_q() const {
        if (!C::O_FROM_REGISTERS && static_cast<int>(here.round) > 0)
            release_after_store<C::ALL_FREE_Q>(smem.ring_q, here.round - 1);
    }

    // Takes up a tile when none is under way.
    __device__ void begin_tile() {
        const uint32_t skipped = here.n;
        take_up();
        queue_s(here.more);
        turns.pass();
        skip_v(skipped);
        wgmma_wait<0>();
        if (here.more) release_k(), exponent.exponentiate_checked(here);
    }
    // Takes up the next tile, if there is one.
    __device__ void take_up() {
        if constexpr (C::ACROSS) ++here.round;
        smem.ring_q.wait(here.round);
        const volatile typename C::Work& work = here.work();
        if constexpr (C::SKIPS && SCORE::LEFT_EDGE) {  // what the others visited of the tile before
            for (int first = here.keys.first;
                 here.round > 0 && first > uniform(here.work_before().first()); --first)
                turns.wait(), turns.pass(), smem.ring_k.pass_over(here.n++);
        }
        here.j = uniform(work.end()) - 1;
        here.more = here.j >= 0;
        const int part = here.part();
        here.keys.first = C::FIRST ? uniform(work.keys[part].first) : 0;
        here.keys.whole_first = SCORE::LEFT_EDGE ? uniform(work.keys[part].whole_first) : 0;
        here.keys.whole_end = uniform(work.keys[part].whole_end);
        if constexpr (C::SKIPS) {
            for (const int end = uniform(work.keys[part].end); here.j >= end; --here.j, ++here.n) {
                turns.wait(), turns.pass();
                smem.ring_k.pass_over(here.n);
            }
        }
        here.j_begin = here.j;
        if (here.more) here.look_up(), here.look_ahead();
        exponent.begin_tile(here);
    }

    // Ends the sums of a tile, and begins the next one's.
    __device__ void conclude() {
        float lse[1][2];
        exponent.softmax.conclude(divisor, lse, SCORE::NEEDS_LSE || p.lse);
        if constexpr (SCORE::ENDS_ROWS) {
            const PackedRows rows = here.packed_rows();
#pragma unroll
            for (int h = 0; h < 2; ++h) p.end_row(divisor[0][h], lse[0][h], rows.head[h]);
        }
        if constexpr (KV::PADS_ROWS) {  // rows that follow the last query; divided by 0, O is 0
            const PackedRows rows = here.packed_rows();
            const int end = KV::queries(p, rows.batch);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (rows.query[h] >= end) divisor[0][h] = 0.f, lse[0][h] = -INF;
        }
        if (p.lse) store_lse(lse[0], p, here.packed_rows());
    }
    // Writes O / l of the tile before.
    __device__ void store() {
        exponent.softmax.divide(rO, divisor);
        if constexpr (!C::O_FROM_REGISTERS) {
            if (KV::RAGGED && here.has_partial_rows()) {
                store_o_direct<T>(rO[0], p, here.packed_rows());
                // Else one thread would free the slot, and the tile's Work, while other warps still
                // look it up.
                if (!C::ALL_FREE_Q) named_barrier_sync(8 + consumer, 128);
            } else {
                store_o_tma<T, typename C::OTile, KV::RAGGED>(rO[0], smem.q(here.round - 1), map_o,
                                                              p, here.work_before(), consumer);
            }
        } else {
            store_o_direct<T>(rO[0], p, here.packed_rows());
            // For the compiler: else it makes no use of what is the same in all lanes.
            __syncwarp();
        }
    }
};
