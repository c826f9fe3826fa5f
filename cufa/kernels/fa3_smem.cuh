// A block's shared memory in fa3_wgmma.cu and fp8_wgmma.cu, and who waits for what in it. The specs
// of both in cufa/specs/ compute the same sizes.
#pragma once
#include "tile_sm90.cuh"

// Tiles in shared memory: slots of Q, rings of K and V, what each warp reads of biases and masks,
// barriers, and the tiles of rows that are under way. O leaves through the slot that its Q came in:
// a warp reads and writes 16 rows of it, which are its own.
template <int HEAD_DIM, int HEAD_DIM_V, int BM, int BN, int STAGES, int BLOCKS_PER_SM, class PAIRS>
struct Layout {
    using QTile = WgmmaTile<BM, HEAD_DIM>;
    using KTile = WgmmaTile<BN, HEAD_DIM>;
    using VTile = WgmmaTile<BN, HEAD_DIM_V>;
    using OTile = WgmmaTile<BM, HEAD_DIM_V>;
    static constexpr int SLOT_BYTES = QTile::bytes > OTile::bytes ? QTile::bytes : OTile::bytes;
    static constexpr int RING_BYTES = STAGES * (KTile::bytes + VTile::bytes);
    static constexpr int PAIR_BYTES = BM / 16 * PAIRS::BYTES;
    // 1024 bytes are for the system, the barriers, and the tiles of rows under way.
    __device__ static constexpr bool fits(int slots) {
        const int bytes = slots * SLOT_BYTES + RING_BYTES + PAIR_BYTES + 1024;
        return bytes * BLOCKS_PER_SM <= 227 * 1024;
    }
    // Up to three slots: with several, the next Q comes early.
    static constexpr int Q_STAGES = fits(3) ? 3 : fits(2) ? 2 : 1;
    // Where each part begins.
    static constexpr int K = Q_STAGES * SLOT_BYTES, V = K + STAGES * KTile::bytes;
    static constexpr int PAIR_TILES = K + RING_BYTES, BARRIERS = PAIR_TILES + PAIR_BYTES;
    static constexpr int WORK = BARRIERS + 16 * Q_STAGES + 32 * STAGES;
};

template <class C>
struct Smem {
    uint32_t base;
    Ring<C::Q_STAGES> ring_q;
    Ring<C::STAGES> ring_k, ring_v;
    // The tiles of rows under way. Consumers look theirs up at each use: registers are scarce.
    static constexpr int WORK_STAGES = C::Q_STAGES * (C::O_FROM_REGISTERS ? 2 : 1);
    volatile typename C::Work* works;

    __device__ explicit Smem(unsigned char* smem)
        : base(smem_address(smem)),
          ring_q(base + C::BARRIERS),
          ring_k(base + C::BARRIERS + ring_q.bytes),
          ring_v(base + C::BARRIERS + ring_q.bytes + ring_k.bytes),
          works(reinterpret_cast<volatile typename C::Work*>(smem + C::WORK)) {}

    // By one thread.
    __device__ void init() const {
        if (dynamic_smem_bytes() < C::WORK + WORK_STAGES * sizeof(typename C::Work)) __trap();
        ring_q.init(C::ALL_FREE_Q ? 128 * C::CONSUMERS : C::CONSUMERS);
        ring_k.init(4 * C::CONSUMERS), ring_v.init(4 * C::CONSUMERS);
        mbarrier_fence_init();
    }
    __device__ uint32_t q(uint32_t round) const {
        return base + ring_q.slot(round) * C::SLOT_BYTES;
    }
    __device__ uint32_t k(uint32_t n) const {
        return base + C::K + ring_k.slot(n) * C::KTile::bytes;
    }
    __device__ uint32_t v(uint32_t n) const {
        return base + C::V + ring_v.slot(n) * C::VTile::bytes;
    }
    __device__ volatile typename C::Work& work(uint32_t round) const {
        return works[round % WORK_STAGES];
    }
};
