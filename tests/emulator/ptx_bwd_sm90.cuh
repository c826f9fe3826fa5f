// The functions of cufa/kernels/ptx_bwd_sm90.cuh on the host.
#pragma once
#include "ptx_sm90.cuh"

inline void tma_store_wait() { tma_store_wait_read(); }
inline void fence_proxy_async_global() {}
inline void stmatrix_x4_trans(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    emulator::shared(row, 16);
    const uint32_t r[4] = {a, b, c, d};
    emulator::meet<1>({row}, [&](auto& rows, int lane) {
        for (int i = 0; i < 4; ++i)
            for (int e = 0; e < 2; ++e)
                std::memcpy(shared_memory + rows[8 * i + lane % 4 * 2 + e][0] + lane / 4 * 2,
                            reinterpret_cast<const unsigned char*>(&r[i]) + 2 * e, 2);
        return 0;
    });
}
inline void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t bar) {
    if (WATCHES) emulator::mark(smem, bytes, emulator::STARTS), emulator::release(64 + bar);
    emulator::block->in_flight.push_back([=]() UNSEEN {
        for (uint32_t i = 0; i < bytes; i += 16)
            std::memcpy(emulator::shared(smem + i, 16), static_cast<const unsigned char*>(gmem) + i, 16);
        if (WATCHES) emulator::mark(smem, bytes, emulator::LANDS_BY_ITSELF);
        mbarrier(bar).bytes -= bytes;
        mbarrier(bar).settle();
    });
}
inline void bulk_add(float* gmem, uint32_t smem, uint32_t bytes) {
    emulator::thread->stores.push_back([=] {
        for (uint32_t i = 0; i < bytes; i += 4) gmem[i / 4] += *reinterpret_cast<float*>(emulator::shared(smem + i, 4));
    });
}

// A by its rows, and B with K along its rows.
template <class T>
void wgmma_of_rows(Accumulators d, int columns, uint64_t a, uint64_t b, int accumulate);

template <class T, int N>
struct WgmmaOfRows {
    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {
        wgmma_of_rows<T>(d, N, a, b, accumulate);
    }
};
