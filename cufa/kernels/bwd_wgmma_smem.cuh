// A block's shared memory in bwd_wgmma.cu, and who waits for what in it.
#pragma once
#include "bwd_common_sm90.cuh"

template <class T_, int HEAD_DIM_, int BM_, int BN_, int STAGES_>
struct BackwardConfig : BackwardRegisters<BN_ / 64> {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, BM = BM_, BN = BN_, CONSUMERS = BN / 64;
    static constexpr int STAGES = STAGES_;
    // The consumers share dQ by its rows, or, where these are those of one, by its columns.
    static constexpr bool SHARES_ROWS = BM == 64 * CONSUMERS;
    static constexpr int DQ_WIDTH = SHARES_ROWS ? HEAD_DIM : HEAD_DIM / CONSUMERS;
    static_assert(SHARES_ROWS || BM == 64, "each consumer has 64 rows of dQ");
    using QTile = WgmmaTile<BM, HEAD_DIM>;  // of dO, too
    using KTile = WgmmaTile<BN, HEAD_DIM>;  // of V, too
    using DsTile = WgmmaTile<BM, BN>;

    // Where each part begins. dQ is that of one tile of rows, in the order of DqPiece.
    static constexpr int DQ_WARP_BYTES = 16 * DQ_WIDTH * 4;
    static constexpr int K = 0, V = K + 2 * KTile::bytes, Q = V + KTile::bytes;
    static constexpr int DO = Q + STAGES * QTile::bytes, DS = DO + STAGES * QTile::bytes;
    static constexpr int DQ = DS + 2 * DsTile::bytes;
    static constexpr int DQ_BYTES = 4 * CONSUMERS * DQ_WARP_BYTES;
    static constexpr int STATS = DQ + DQ_BYTES, STATS_BYTES = 8 * BM;
    // Threads that add dQ of one tile each, one after the other: an addition takes longer than a
    // step.
    static constexpr int ADDERS = 3;
    static constexpr int BARRIERS = STATS + STAGES * STATS_BYTES;
    static constexpr int bytes = BARRIERS + 32 * STAGES + 32 + 8 * (ADDERS + 1) + 64;
};

template <class C>
struct BackwardSmem {
    uint32_t base;
    Ring<C::STAGES> ring_q, ring_do;
    Ring<2> ring_ds, ring_k;
    Ring<1> ring_v;
    uint32_t barriers_dq;
    uint32_t numbers;  // where the numbers of the tiles of keys are, of those in ring_k

    __device__ explicit BackwardSmem(uint32_t smem)
        : base(smem),
          ring_q(smem + C::BARRIERS),
          ring_do(smem + C::BARRIERS + ring_q.bytes),
          ring_ds(smem + C::BARRIERS + 2 * ring_q.bytes),
          ring_k(smem + C::BARRIERS + 2 * ring_q.bytes + ring_ds.bytes),
          ring_v(ring_k.full + ring_k.bytes),
          barriers_dq(ring_v.full + ring_v.bytes),
          numbers(barriers_dq + 8 * (C::ADDERS + 1)) {}

    // By one thread.
    __device__ void init() const {
        if (dynamic_smem_bytes() < C::bytes) __trap();
        ring_q.init(4 * C::CONSUMERS), ring_do.init(4 * C::CONSUMERS);
        for (int s = 0; s < 2; ++s)
            mbarrier_init(ring_ds.full + 8 * s, 4 * C::CONSUMERS),
                mbarrier_init(ring_ds.empty + 8 * s, 4 * C::CONSUMERS);
        for (int adder = 0; adder < C::ADDERS; ++adder)
            mbarrier_init(full_dq(adder), 4 * C::CONSUMERS);
        mbarrier_init(empty_dq(), 1);
        // Adders read the number that comes with K.
        ring_k.init(4 * C::CONSUMERS + C::ADDERS), ring_v.init(4 * C::CONSUMERS);
        mbarrier_fence_init();
    }
    // Producer: hands out the number of a round's tile of keys, whose K is copied; or `NONE`.
    static constexpr int NONE = -1;
    __device__ uint32_t expect_k(uint32_t round, int tile) const {
        ring_k.acquire(round);
        sts_64(numbers + 8 * ring_k.slot(round), tile);
        return ring_k.expect(round, tile == NONE ? 0 : C::KTile::bytes);
    }
    // Others: wait for K of a round's tile of keys, whose number this returns.
    __device__ int wait_k(uint32_t round) const {
        ring_k.wait(round);
        return static_cast<int>(lds_64(numbers + 8 * ring_k.slot(round)));
    }
    __device__ uint32_t k(uint32_t round) const {
        return base + C::K + ring_k.slot(round) * C::KTile::bytes;
    }
    __device__ uint32_t v() const { return base + C::V; }
    __device__ uint32_t q(uint32_t n) const {
        return base + C::Q + ring_q.slot(n) * C::QTile::bytes;
    }
    __device__ uint32_t dout(uint32_t n) const {
        return base + C::DO + ring_do.slot(n) * C::QTile::bytes;
    }
    __device__ uint32_t ds(uint32_t n) const {
        return base + C::DS + ring_ds.slot(n) * C::DsTile::bytes;
    }
    // The numbers of a tile's rows: the log-sum-exp, then delta.
    __device__ uint32_t stats(uint32_t n) const {
        return base + C::STATS + ring_q.slot(n) * C::STATS_BYTES;
    }
    // dQ of the n-th tile: all consumers fill its place, and one adder empties it. Each adder has a
    // barrier of its own, because it waits for every third tile only.
    __device__ uint32_t full_dq(uint32_t n) const { return barriers_dq + n % C::ADDERS * 8; }
    __device__ uint32_t empty_dq() const { return barriers_dq + C::ADDERS * 8; }
    __device__ void acquire_dq(uint32_t n) const { mbarrier_wait(empty_dq(), n % 2 ^ 1); }
    __device__ void wait_dq(uint32_t n) const { mbarrier_wait(full_dq(n), n / C::ADDERS % 2); }
    // The part of a warp of a consumer.
    __device__ uint32_t dq(int consumer, int warp) const {
        const int part = C::SHARES_ROWS ? consumer * 4 + warp : warp * C::CONSUMERS + consumer;
        return base + C::DQ + part * C::DQ_WARP_BYTES;
    }
};
