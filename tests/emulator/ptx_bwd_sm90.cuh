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
    emulator::block->in_flight.push_back([=] {
        for (uint32_t i = 0; i < bytes; i += 16)
            std::memcpy(emulator::shared(smem + i, 16), static_cast<const unsigned char*>(gmem) + i, 16);
        mbarrier(bar).bytes -= bytes;
        mbarrier(bar).settle();
    });
}
inline void bulk_add(float* gmem, uint32_t smem, uint32_t bytes) {
    emulator::thread->stores.push_back([=] {
        for (uint32_t i = 0; i < bytes; i += 4) gmem[i / 4] += *reinterpret_cast<float*>(emulator::shared(smem + i, 4));
    });
}

template <class T, int N>
struct WgmmaOfRows {
    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {
        float (*const sums)[4] = d;
        const int thread = threadIdx.x, row = thread % 128 / 32 * 16 + thread % 32 / 4;
        emulator::thread->products.add([=] {
            const Operand<T> left(a), right(b);
            for (int i = 0; i < N / 2; ++i) {
                float& sum = sums[i / 4][i % 4];
                float of_step = accumulate ? sum : 0.f;
                for (int k = 0; k < 16; ++k)
                    of_step += left.of_row(row + i % 4 / 2 * 8, k) * right.of_column(i / 4 * 8 + thread % 4 * 2 + i % 2, k);
                sum = of_step;
            }
        });
    }
};
