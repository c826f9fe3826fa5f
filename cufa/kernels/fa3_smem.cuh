// A block's shared memory in fa3_wgmma.cu, and who waits for what in it.
#pragma once
#include "fa3_config.cuh"

template <class C>
struct Smem {
    uint32_t base;
    Ring<C::Q_STAGES> ring_q;
    Ring<C::STAGES> ring_k, ring_v;
    // The tiles of rows under way. Consumers look theirs up at each use: registers are scarce.
    volatile typename C::Work* works;

    __device__ explicit Smem(unsigned char* smem)
        : base(smem_address(smem)),
          ring_q(base + C::BARRIERS),
          ring_k(base + C::BARRIERS + ring_q.bytes),
          ring_v(base + C::BARRIERS + ring_q.bytes + ring_k.bytes),
          works(reinterpret_cast<volatile typename C::Work*>(smem + C::WORK)) {}

    // By one thread.
    __device__ void init() const {
        if (dynamic_smem_bytes() < C::WORK + C::WORK_STAGES * sizeof(typename C::Work)) __trap();
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
        return works[round % C::WORK_STAGES];
    }
};
