// FlashAttention-3 forward (Shah et al. 2024, algorithms 1 and 2) on Hopper, for float16 and bfloat16, sm_90a.
// A block works through tiles of BM rows of Q. The producer, one thread of the first warpgroup, fetches tiles of Q, K and
// V by TMA into rings in shared memory. The consumers, the other warpgroups, compute 64 rows each with wgmma. S of the
// next keys is queued before P V of the present ones, so that the softmax runs while the tensor cores work. Keys are taken
// last to first: masked ones, which need row maxima, come first, and the others do without, see softmax.cuh. With
// PING_PONG the consumers take turns to queue their products: one's softmax then runs under the products of the others.
#include "epilogue_sm90.cuh"
#include "kv.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "ptx_sm90.cuh"
#include "scheduler_sm90.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM,
          bool PING_PONG, class SCORE, class KV>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    fa3_wgmma(const __grid_constant__ TmaParams arguments) {
    constexpr bool CAUSAL = SCORE::CAUSAL;
    const Params& p = arguments.params;
    const TensorMaps& maps = arguments.maps;
    constexpr int CONSUMERS = BM / 64;  // warpgroups
    static_assert(WARPS == 4 * (CONSUMERS + 1), "a producer and BM / 64 consumers");
    // Registers of a thread at launch, and after the producer has left most of its own to the consumers.
    constexpr int REGISTERS = 65536 / (WARPS * 32 * BLOCKS_PER_SM) / 8 * 8;
    constexpr int REGISTERS_PRODUCER = 32;
    constexpr int SHARE = (REGISTERS * (CONSUMERS + 1) - REGISTERS_PRODUCER) / CONSUMERS / 8 * 8;
    constexpr int REGISTERS_CONSUMER = SHARE < 240 ? SHARE : 240;
    constexpr int NT = BN / 8, OT = HEAD_DIM_V / 8;  // 8-column pieces of S and of O
    // Where O is wide, one loop over the keys: two take long to compile. In it O is waited for after the exponentials, which
    // then run under the one consumer's own O, if there is but one on the multiprocessor.
    constexpr bool ONE_LOOP = HEAD_DIM_V > 128;
    // How large P and a thread's part of their sum may be where no row maximum is looked for: float16 ends at 65504, and
    // of bfloat16's range, which is float32's, two thirds are left to O = P V.
    constexpr float MAX_SUM = T::max / 2 < 0x1p40f ? T::max / 2 : 0x1p40f;

    using QTile = WgmmaTile<BM, HEAD_DIM>;
    using KTile = WgmmaTile<BN, HEAD_DIM>;
    using VTile = WgmmaTile<BN, HEAD_DIM_V>;
    using OTile = WgmmaTile<BM, HEAD_DIM_V>;
    // O leaves through the slot that its Q came in: of a slot, a warp reads and writes 16 rows, which are its own. Up to
    // three slots, if they fit beside what the system and the barriers take: the next Q then comes early.
    constexpr int QO_BYTES = QTile::bytes > OTile::bytes ? QTile::bytes : OTile::bytes;
    constexpr int KV_BYTES = STAGES * (KTile::bytes + VTile::bytes);
    constexpr auto fits = [](int slots) { return (slots * QO_BYTES + KV_BYTES + 1024) * BLOCKS_PER_SM <= 227 * 1024; };
    constexpr int Q_STAGES = fits(3) ? 3 : fits(2) ? 2 : 1;
    constexpr int WORK_STAGES = Q_STAGES == 1 ? 2 : Q_STAGES;  // two: O is written after the next Q has come
    constexpr int BARRIERS = Q_STAGES * QO_BYTES + KV_BYTES, WORK = BARRIERS + 16 * Q_STAGES + 32 * STAGES;
    // The last keys may be masked for all rows of a consumer, if not for all of another's: it skips them. With more than
    // one slot of Q it still holds the last V of the tile before.
    constexpr bool SKIPS = CAUSAL && CONSUMERS > 1;
    static_assert(!SKIPS || (BM - 64 + BN - 1) / BN <= STAGES, "as many stages as tiles of keys that are skipped");

    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sQ = smem_address(smem), sK = sQ + Q_STAGES * QO_BYTES, sV = sK + STAGES * KTile::bytes;
    const uint32_t barriers = sQ + BARRIERS;
    const Ring<Q_STAGES> ring_q(barriers);
    const Ring<STAGES> ring_k(barriers + ring_q.bytes), ring_v(barriers + ring_q.bytes + ring_k.bytes);
    // The tiles under way. Consumers look theirs up at each use, for registers are scarce.
    volatile Work* sWork = reinterpret_cast<Work*>(smem + WORK);

    const Mask<CAUSAL, true> mask(p.seq_q, p.seq_kv, p.pack_log2);
    const int tiles = p.heads * p.q_tiles;
    // How many tiles of keys rows [row, row + rows) see; at least one, whose scores are then all masked.
    auto key_tiles = [&](int row, int rows) { return max(1, (mask.kv_end(row, rows) + BN - 1) / BN); };

    if (threadIdx.x == 0) {
        if (dynamic_smem_bytes() < WORK + WORK_STAGES * sizeof(Work)) __trap();
        ring_q.init(Q_STAGES > 1 ? CONSUMERS : 128 * CONSUMERS), ring_k.init(4 * CONSUMERS), ring_v.init(4 * CONSUMERS);
        mbarrier_fence_init();
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the same in all lanes, for the compiler
    if (warpgroup == 0) {
        // Producer
        registers_decrease<REGISTERS_PRODUCER>();
        if (threadIdx.x != 0) return;
        auto load_q = [&](int i, uint32_t round) {  // and hands the tile over, or says that there is none
            ring_q.acquire(round);
            volatile Work& work = sWork[round % WORK_STAGES];
            if (i >= tiles) {
                work.kv_tiles = 0;
                ring_q.expect(round, 0);
                return;
            }
            const Tile tile = tile_in_order<CAUSAL>(p, i);
            const int q0 = tile.q_tile * BM;
            work.q0 = q0, work.head = tile.head, work.batch = tile.batch, work.kv_tiles = key_tiles(q0, BM);
            QTile::load(sQ + ring_q.slot(round) * QO_BYTES, maps.q, ring_q.expect(round, QTile::bytes), mask.query(q0),
                        tile.head, tile.batch);
        };
        int i = block_index();
        load_q(i, 0);
        for (uint32_t round = 0, n = 0; i < tiles; ++round) {  // n: tiles of keys so far
            const volatile Work& work = sWork[round % WORK_STAGES];
            const int kv_tiles = work.kv_tiles, kv_head = work.head / p.group, batch = work.batch;
            auto load_k = [&](int j, uint32_t n) {
                ring_k.acquire(n);
                KTile::load(sK + ring_k.slot(n) * KTile::bytes, maps.k, ring_k.expect(n, KTile::bytes), j * BN, kv_head,
                            batch);
            };
            auto load_v = [&](int j, uint32_t n) {
                ring_v.acquire(n);
                VTile::load(sV + ring_v.slot(n) * VTile::bytes, maps.v, ring_v.expect(n, VTile::bytes), j * BN, kv_head,
                            batch);
            };
            // The next Q is asked for when its slot should be free: of three at once, of two when the last O has been
            // written, which is about when the first V are done with, and of one at the end. Of two never before V number
            // STAGES: until then, consumers that skip keys free the slot only after the loads that come later here.
            const int load_q_at = Q_STAGES == 3 ? kv_tiles - 1 : Q_STAGES == 2 ? max(0, kv_tiles - 1 - STAGES) : 0;
            i = next_tile<CAUSAL>(p, i, tiles);
            load_k(kv_tiles - 1, n);
            for (int j = kv_tiles - 1; j >= 0; --j, ++n) {
                if (j > 0) load_k(j - 1, n + 1);
                load_v(j, n);
                if (j == load_q_at) load_q(i, round + 1);
            }
        }
    } else {
        // Consumers
        registers_increase<REGISTERS_CONSUMER>();
        const int consumer = warpgroup - 1;
        // This warp's first row in the tile; computed anew at each use, for registers are scarce.
        auto warp_row = [] { return (thread_index_anew() - 128) / 32 * 16; };
        const Turns<CONSUMERS, PING_PONG> turns(consumer);
        const uint32_t operand_q = QTile::operand(sQ + consumer * 64 * QTile::ROW_BYTES);
        const uint32_t operand_k = KTile::operand(sK), operand_v = VTile::operand(sV);

        OnlineSoftmax<1, false> softmax(p.scale_log2);
        float rO[1][OT][4] = {};
        float rS[1][NT][4];
        uint32_t rP[BN / 16][4];
        uint32_t round = 0, n = 0;  // tiles and tiles of keys so far
        int j, j_first, unmasked;   // the tile of keys at hand, the first one; keys that all rows of the warpgroup see

        auto start_s = [&](bool loaded) {  // S = Q K^T
            if (loaded) ring_k.wait(n);
            wgmma_fence();
#pragma unroll
            for (int kd = 0; kd < HEAD_DIM / 16; ++kd)
                Wgmma<T, BN>::ss(rS[0], QTile::columns(operand_q + ring_q.slot(round) * (QO_BYTES >> 4), kd),
                                 KTile::columns(operand_k + ring_k.slot(n) * (KTile::bytes >> 4), kd), kd > 0);
            wgmma_commit();
        };
        auto start_o = [&](uint32_t i, bool first) {  // O += P V, or O = P V
            ring_v.wait(i);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BN / 16; ++kk)
                Wgmma<T, HEAD_DIM_V>::rs(rO[0], rP[kk], VTile::rows(operand_v + ring_v.slot(i) * (VTile::bytes >> 4), kk),
                                         kk > 0 || !first);
            wgmma_commit();
        };
        auto release_k = [&] {
            ring_k.release(n);
            // After the last S. All threads arrive, as each has looked up what this tile and the one before are.
            if (Q_STAGES == 1 && j == 0) ring_q.arrive(round);
        };
        // P = exp(S - m), of keys that some rows do not see, or at which m may have to move: whether O must follow it.
        auto exponentiate = [&] {
            release_k();
            if ((j + 1) * BN > unmasked)
                mask.apply(rS, thread_index_anew() % 32, sWork[round % WORK_STAGES].q0 + warp_row(), j * BN);
            const bool raised = softmax.raise(rS);
            softmax.exponentiate(rS);
            return raised;
        };
        auto pack_p = [&] {
#pragma unroll
            for (int kk = 0; kk < BN / 16; ++kk)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    rP[kk][i] = pack2<T>(rS[0][2 * kk + i / 2][i % 2 * 2], rS[0][2 * kk + i / 2][i % 2 * 2 + 1]);
        };
        // The rows of the tile before.
        auto packed_rows = [&] {
            const volatile Work& work = sWork[(round - 1) % WORK_STAGES];
            return PackedRows(p, work.batch, work.head, work.q0 + warp_row());
        };
        // Frees the slot of Q that the last O was written from.
        auto free_q = [&] {
            if (Q_STAGES > 1 && round > 0) release_after_store(ring_q, round - 1);
        };
        // Takes up the next tile, and starts on its S. Without one S is computed of what is there, and not looked at.
        auto start_tile = [&] {
            ring_q.wait(round);
            const int q0 = __shfl_sync(0xffffffff, sWork[round % WORK_STAGES].q0, 0);
            j = __shfl_sync(0xffffffff, sWork[round % WORK_STAGES].kv_tiles, 0) - 1;
            const bool more = j >= 0;
            unmasked = mask.keys_before_mask(q0 + consumer * 64);
            if constexpr (SKIPS) {
                const int seen = key_tiles(q0 + consumer * 64, 64);
                for (; j >= seen; --j, ++n) {
                    turns.wait(), turns.pass();
                    ring_k.pass_over(n);
                }
            }
            j_first = j;
            turns.wait();
            start_s(more);
            return more;
        };
        // S = Q K^T of the next keys and O += P V of the present ones, queued.
        auto start_both = [&] {
            const bool first = j == j_first;
            turns.wait();
            ++n, --j;
            start_s(true);
            start_o(n - 1, first);
            turns.pass();
            if (first) free_q();
        };
        auto finish_o = [&] {
            wgmma_wait<0>();
            ring_v.release(n - 1);
        };
        // Frees those V from the i-th on whose keys were masked.
        auto skip_v = [&](uint32_t i) {
            for (; SKIPS && i < n; ++i) ring_v.pass_over(i);
        };

        // Whether m may have to move at the keys after the present ones: some rows do not see all of these or of those.
        auto needs_maxima = [&] { return CAUSAL && (j + 1) * BN > unmasked; };
        // P = exp(S - m) of other keys, without looking for row maxima: m is near the score of a key that the row has seen,
        // or -inf.
        auto exponentiate_unchecked = [&] {
            softmax.scale_log2 = parameter_anew(p.scale_log2);
            softmax.exponentiate_unchecked(rS);
        };
        // Where P came out too large, m moves by what their sum says, or if that is not finite, the warp computes S once
        // more. `l` is what was summed up before. Returns whether O must follow m.
        auto correct = [&](const float (&l)[1][2]) {
            if (softmax.shift(rS)) return true;
            softmax.l[0][0] = l[0][0], softmax.l[0][1] = l[0][1];
            warp_scores<T, QTile, KTile>(rS[0], sQ + ring_q.slot(round) * QO_BYTES, warp_row(),
                                         sK + ring_k.slot(n) * KTile::bytes);
            const bool raised = softmax.raise(rS);
            softmax.exponentiate(rS);
            return raised;
        };
        // Both; frees K and answers as `exponentiate` does.
        auto exponentiate_unmasked = [&] {
            const float l[1][2] = {{softmax.l[0][0], softmax.l[0][1]}};
            exponentiate_unchecked();
            const bool moved = softmax.too_large(MAX_SUM) && correct(l);
            release_k();
            return moved;
        };
        // Takes up a tile when none is under way.
        auto begin_tile = [&] {
            const uint32_t skipped = n;
            const bool more = start_tile();
            turns.pass();
            skip_v(skipped);
            wgmma_wait<0>();
            if (more) exponentiate();
            return more;
        };

        bool more = Q_STAGES == 1 || begin_tile();
        while (more) {
            if (Q_STAGES == 1 && !begin_tile()) break;  // with more slots, a tile begins at the end of the one before
            pack_p();

            // P = exp(S - m), while O is computed; first of the keys that some rows do not see, and of those after them.
            while (j > 0 && (ONE_LOOP || needs_maxima())) {
                const bool masked = needs_maxima();
                start_both();
                wgmma_wait<1>();
                const bool moved = masked ? exponentiate() : exponentiate_unmasked();
                finish_o();
                if (moved) softmax.rescale(rO);
                pack_p();
            }
            while (!ONE_LOOP && j > 0) {
                start_both();
                const float l[1][2] = {{softmax.l[0][0], softmax.l[0][1]}};
                wgmma_wait<CONSUMERS == 3 ? 0 : 1>();  // of three, the others keep the tensor cores busy
                exponentiate_unchecked();
                finish_o();
                pack_p();
                if (softmax.too_large(MAX_SUM)) {
                    if (correct(l)) softmax.rescale(rO);
                    pack_p();
                }
                release_k();
            }

            // The same at the end of a tile. If the next Q has come, its S is queued before the last O.
            const bool first = j == j_first;
            const uint32_t present = n++;
            if (first) free_q();
            ++round;
            if constexpr (Q_STAGES > 1)
                more = start_tile();
            else
                turns.wait();
            start_o(present, first);
            turns.pass();

            float l[1][2], lse[1][2];
            if constexpr (Q_STAGES > 1) wgmma_wait<1>();
            softmax.conclude(l, lse);
            store_lse(lse[0], p, packed_rows());
            if (Q_STAGES > 1 && more) exponentiate();  // O begins anew, and need not follow m
            wgmma_wait<0>();
            ring_v.release(present);

            // O = O / l
            softmax.divide(rO, l);
            if constexpr (Q_STAGES > 1) {
                skip_v(present + 1);
                store_o_tma<T, OTile>(rO[0], sQ + ring_q.slot(round - 1) * QO_BYTES, maps.o, p,
                                      sWork[(round - 1) % WORK_STAGES], consumer);
            } else {
                store_o_direct<T>(rO[0], p, packed_rows());
                __syncwarp();  // for the compiler: else it makes no use of what is the same in all lanes
            }
        }
        tma_store_wait_read();
    }
}
