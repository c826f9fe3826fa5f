// FlashAttention-3 forward (Shah et al. 2024, algorithms 1 and 2) on Hopper, for float16 and bfloat16, sm_90a.
// A block works through tiles of BM rows of Q. The producer, one thread of the first warpgroup, fetches tiles of Q, K and
// V by TMA into rings in shared memory. The consumers, the other warpgroups, compute 64 rows each with wgmma. S of the
// next keys is queued before P V of the present ones, so that the softmax runs while the tensor cores work. With
// PING_PONG the consumers take turns to queue their products: one's softmax then runs under the products of the others.
#include "epilogue_sm90.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "ptx_sm90.cuh"
#include "scheduler_sm90.cuh"
#include "softmax.cuh"
#include "tile_sm90.cuh"

template <class T, int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int WARPS, int BLOCKS_PER_SM, bool CAUSAL,
          bool PING_PONG>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    fa3_wgmma(const __grid_constant__ TmaParams arguments) {
    const Params& p = arguments.params;
    const TensorMaps& maps = arguments.maps;
    constexpr int CONSUMERS = BM / 64;  // warpgroups
    static_assert(WARPS == 4 * (CONSUMERS + 1), "a producer and BM / 64 consumers");
    // Registers of a thread at launch, and after the producer has left most of its own to the consumers.
    constexpr int REGISTERS = 65536 / (WARPS * 32 * BLOCKS_PER_SM) / 8 * 8;
    constexpr int REGISTERS_PRODUCER = CONSUMERS == 3 ? 32 : 24;
    constexpr int SHARE = (REGISTERS * (CONSUMERS + 1) - REGISTERS_PRODUCER) / CONSUMERS / 8 * 8;
    constexpr int REGISTERS_CONSUMER = SHARE < 240 ? SHARE : 240;
    constexpr int NT = BN / 8, OT = HEAD_DIM_V / 8;  // 8-column pieces of S and of O

    using QTile = WgmmaTile<BM, HEAD_DIM>;
    using KTile = WgmmaTile<BN, HEAD_DIM>;
    using VTile = WgmmaTile<BN, HEAD_DIM_V>;
    using OTile = WgmmaTile<BM, HEAD_DIM_V>;
    // O leaves through the slot that its Q came in. Two slots if they fit: the next Q then comes early.
    constexpr int QO_BYTES = QTile::bytes > OTile::bytes ? QTile::bytes : OTile::bytes;
    constexpr int KV_BYTES = STAGES * (KTile::bytes + VTile::bytes);
    constexpr int Q_STAGES = (2 * QO_BYTES + KV_BYTES + 1024) * BLOCKS_PER_SM <= 227 * 1024 ? 2 : 1;

    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t sQ = smem_address(smem), sK = sQ + Q_STAGES * QO_BYTES, sV = sK + STAGES * KTile::bytes;
    const uint32_t barriers = sQ + Q_STAGES * QO_BYTES + KV_BYTES;
    const Ring<Q_STAGES> ring_q(barriers);
    const Ring<STAGES> ring_k(barriers + ring_q.bytes), ring_v(barriers + ring_q.bytes + ring_k.bytes);
    // What the slots of Q hold. Consumers look it up at each use, for registers are scarce.
    volatile Work* sWork = reinterpret_cast<Work*>(smem + Q_STAGES * QO_BYTES + KV_BYTES + ring_q.bytes + 2 * ring_k.bytes);

    const Mask<CAUSAL, true> mask(p.seq_q, p.seq_kv, p.pack);
    const int tiles = p.heads * p.q_tiles;
    // How many tiles of keys rows [row, row + rows) see; at least one, whose scores are then all masked.
    auto key_tiles = [&](int row, int rows) { return max(1, (mask.kv_end(row, rows) + BN - 1) / BN); };

    if (threadIdx.x == 0) {
        if (dynamic_smem_bytes() < KV_BYTES + Q_STAGES * (QO_BYTES + 16 + sizeof(Work)) + 32 * STAGES) __trap();
        ring_q.init(Q_STAGES == 2 ? CONSUMERS : 4 * CONSUMERS), ring_k.init(4 * CONSUMERS), ring_v.init(4 * CONSUMERS);
        mbarrier_fence_init();
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // the same in all lanes, for the compiler
    if (warpgroup == 0) {
        // Producer
        registers_decrease<REGISTERS_PRODUCER>();
        uint32_t n = 0;  // tiles of keys so far
        int next = block_index();
        for (uint32_t round = 0; threadIdx.x == 0; ++round) {
            const Tile tile = tile_in_order<CAUSAL>(p, next);
            const int q0 = tile.q_tile * BM, kv_head = tile.head / p.group, kv_tiles = key_tiles(q0, BM);
            const bool more = next < tiles;
            ring_q.acquire(round);
            volatile Work& work = sWork[ring_q.slot(round)];
            work.q0 = q0, work.head = tile.head, work.batch = tile.batch, work.kv_tiles = more ? kv_tiles : 0;
            if (!more) {
                ring_q.expect(round, 0);
                break;
            }
            next = next_tile<CAUSAL>(p, next, tiles);
            auto load_k = [&](int j, uint32_t i) {
                ring_k.acquire(i);
                KTile::load(sK + ring_k.slot(i) * KTile::bytes, maps.k, ring_k.expect(i, KTile::bytes), j * BN, kv_head,
                            tile.batch);
            };
            auto load_v = [&](int j, uint32_t i) {
                ring_v.acquire(i);
                VTile::load(sV + ring_v.slot(i) * VTile::bytes, maps.v, ring_v.expect(i, VTile::bytes), j * BN, kv_head,
                            tile.batch);
            };
            QTile::load(sQ + ring_q.slot(round) * QO_BYTES, maps.q, ring_q.expect(round, QTile::bytes), q0 / p.pack,
                        tile.head, tile.batch);
            load_k(kv_tiles - 1, n);
            for (int j = kv_tiles - 1; j >= 0; --j, ++n) {
                if (j > 0) load_k(j - 1, n + 1);
                load_v(j, n);
            }
        }
    } else {
        // Consumers
        registers_increase<REGISTERS_CONSUMER>();
        const int consumer = warpgroup - 1;
        // This warp's first row in the tile; computed anew at each use, for registers are scarce.
        auto warp_row = [] { return (thread_index() - 128) / 32 * 16; };
        const Turns<CONSUMERS, PING_PONG> turns(consumer);
        const uint32_t operand_q = QTile::operand(sQ + consumer * 64 * QTile::ROW_BYTES);
        const uint32_t operand_k = KTile::operand(sK), operand_v = VTile::operand(sV);

        OnlineSoftmax<1, false> softmax(p.scale_log2);
        float rO[1][OT][4] = {};
        float rS[1][NT][4];
        uint32_t rP[BN / 16][4];
        uint32_t round = 0, n = 0, n_held = 0;  // tiles and tiles of keys so far; the last one of the previous tile
        bool held = false;                      // whether its V is still in use
        int j, mask_from;  // the keys at hand, the first ones to mask

        auto start_s = [&](bool loaded = true) {  // S = Q K^T
            if (loaded) ring_k.wait(n);
            wgmma_fence();
#pragma unroll
            for (int kd = 0; kd < HEAD_DIM / 16; ++kd)
                Wgmma<T, BN>::ss(rS[0], QTile::columns(operand_q + ring_q.slot(round) * (QO_BYTES >> 4), kd),
                                 KTile::columns(operand_k + ring_k.slot(n) * (KTile::bytes >> 4), kd), kd > 0);
            wgmma_commit();
        };
        auto start_o = [&](uint32_t i) {  // O += P V
            ring_v.wait(i);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BN / 16; ++kk)
                Wgmma<T, HEAD_DIM_V>::rs(rO[0], rP[kk], VTile::rows(operand_v + ring_v.slot(i) * (VTile::bytes >> 4), kk),
                                         1);
            wgmma_commit();
        };
        auto finish_o = [&] {
            wgmma_wait<0>();
            ring_v.release(n_held);
            held = false;
        };
        auto mask_s = [&] {
            ring_k.release(n);
            if (j >= mask_from) mask.apply(rS, sWork[ring_q.slot(round)].q0 + warp_row(), j * BN);
        };
        auto pack_p = [&] {
#pragma unroll
            for (int kk = 0; kk < BN / 16; ++kk)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    rP[kk][i] = pack2<T>(rS[0][2 * kk + i / 2][i % 2 * 2], rS[0][2 * kk + i / 2][i % 2 * 2 + 1]);
        };
        // Takes up the next tile, whether there is one or not.
        auto begin_tile = [&] {
            ring_q.wait(round);
            const volatile Work& work = sWork[ring_q.slot(round)];
            const int q0 = work.q0;
            j = work.kv_tiles - 1;
            if (j < 0) return false;
            mask_from = mask.keys_before_mask(q0 + warp_row()) / BN;
            if constexpr (CAUSAL) {  // the last keys may be masked for all of this warpgroup's rows
                const int seen = key_tiles(q0 + consumer * 64, 64);
                if (j >= seen && held) finish_o();  // or else the copies waited for may need its slot
                for (; j >= seen; --j, ++n) {
                    turns.wait(), turns.pass();
                    ring_k.wait(n), ring_k.release(n);
                    ring_v.wait(n), ring_v.release(n);
                }
            }
            return true;
        };

        bool more = begin_tile();
        if (more) {
            turns.wait();
            start_s();
            turns.pass();
        }
        while (more) {
            // P = exp(S - m) of the last keys, the first to be taken
            wgmma_wait<0>();
            softmax.reset(rO);
            if (Q_STAGES == 2 && round > 0) release_after_store(ring_q, round - 1);
            mask_s();
            softmax.raise(rS);
            softmax.exponentiate(rS);
            pack_p();

            while (j > 0) {
                // S = Q K^T of the next keys and O += P V of the present ones, queued
                turns.wait();
                ++n, --j;
                start_s();
                start_o(n - 1);
                turns.pass();

                // P = exp(S - m), while O is computed
                wgmma_wait<1>();
                mask_s();
                const bool raised = softmax.raise(rS);
                softmax.exponentiate(rS);
                wgmma_wait<0>();
                ring_v.release(n - 1);
                if (raised) softmax.rescale(rO);
                pack_p();
            }

            // O += P V of the first keys; where there is room for its Q, with S of the next tile behind it
            turns.wait();
            start_o(n);
            turns.pass();
            n_held = n++, held = true;
            if constexpr (Q_STAGES == 2) {
                ++round;
                more = begin_tile();
                turns.wait();
                start_s(more);  // after the last tile, of what is there, and not looked at
                turns.pass();
                wgmma_wait<1>();
                if (held) ring_v.release(n_held);
                held = false;
            }
            const volatile Work& work = sWork[Q_STAGES == 2 ? ring_q.slot(round - 1) : 0];
            const PackedRows rows(p, work.batch, work.head, work.q0 + warp_row());
            if constexpr (Q_STAGES == 1) {
                ring_q.release(round++);
                finish_o();
            }

            // O = O / l and the log-sum-exp
            float lse[1][2];
            softmax.finish(rO, lse);
            store_lse(lse[0], p, rows);
            if constexpr (Q_STAGES == 2) {
                store_o_tma<T, OTile>(rO[0], sQ + ring_q.slot(round - 1) * QO_BYTES, maps.o, p, work, consumer);
            } else {
                store_o_direct<T>(rO[0], p, rows);
                more = begin_tile();
                turns.wait();
                start_s(more);
                turns.pass();
            }
        }
        wgmma_wait<0>();
        tma_store_wait_read();
    }
}
