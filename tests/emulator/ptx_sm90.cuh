// The functions of cufa/kernels/ptx_sm90.cuh on the host.
#pragma once
#include "ptx.cuh"

// As tests/played_gpu.py writes it, the innermost axis first. Strides are in bytes.
struct TensorMap {
    unsigned char* address;
    int64_t sizes[5], strides[4], box[5];
    int32_t swizzle_bytes, type;
};
static_assert(sizeof(TensorMap) == 128, "as large as a CUtensorMap");

inline float reread_parameter(const float& x) { return x; }
inline uint32_t dynamic_smem_bytes() { return emulator::smem_bytes; }

// An mbarrier: the arrivals and the bytes that its phase still waits for.
struct MBarrier {
    uint16_t arrivals, pending;
    uint32_t phase : 1;
    int32_t bytes : 31;

    void settle() {
        if (WATCHES && pending == 0 && bytes == 0) emulator::complete(64 + smem_address(this), phase);
        if (pending == 0 && bytes == 0) phase ^= 1, pending = arrivals;
        ++emulator::events;
    }
};
static_assert(sizeof(MBarrier) == 8, "a 64-bit word");
inline MBarrier& mbarrier(uint32_t bar) { return *reinterpret_cast<MBarrier*>(emulator::shared(bar, 8)); }
inline void mbarrier_init(uint32_t bar, int arrivals) {
    if (WATCHES) emulator::mark(bar, 8, emulator::BARRIER);
    mbarrier(bar) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0, 0};
}
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(uint32_t bar) {
    if (WATCHES) emulator::release(64 + bar);
    if (mbarrier(bar).pending-- == 0) emulator::fail("an arrival that no barrier waits for", bar);
    mbarrier(bar).settle();
}
inline void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes) {
    mbarrier(bar).bytes += bytes;
    mbarrier_arrive(bar);
}
inline void mbarrier_wait(uint32_t bar, uint32_t parity) {
    emulator::yield_while([=] { return mbarrier(bar).phase == parity; });
    if (WATCHES) emulator::acquire(64 + bar, parity);
}

// The swizzle of rows of 128, 64 or 32 bytes: the row's number is in the address.
inline uint32_t swizzled(uint32_t address, int row_bytes) { return address ^ (address >> 3 & (row_bytes / 16 - 1) << 4); }

inline void tma_prefetch(const TensorMap&) {}
void tma_load(uint32_t tile, const TensorMap& map, uint32_t bar, int c0, int c1, int c2, int c3, int c4,
              unsigned long long);
void tma_store(const TensorMap& map, uint32_t tile, int c0, int c1, int c2, int c3, int c4);
inline void tma_store_commit() {}
inline void tma_store_wait_read() { emulator::thread->stores.do_all(); }
inline void fence_proxy_async() {}
inline void named_barrier_arrive(int id, int threads) { emulator::arrive(id, threads); }
template <int>
void registers_increase() {}
template <int>
void registers_decrease() {}

void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d);

inline uint64_t wgmma_descriptor(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }
inline void wgmma_fence() { emulator::align(); }
inline void wgmma_commit() { emulator::thread->products.commit(); }
template <int PENDING>
void wgmma_wait() {
    emulator::thread->products.wait(PENDING);
    emulator::align();
    if (WATCHES) emulator::step();
}

using Accumulators = float (*)[4];
// With any number of columns.
template <class T>
void wgmma_ss(Accumulators d, int columns, uint64_t a, uint64_t b, int accumulate);
template <class T>
void wgmma_rs(Accumulators d, int columns, const uint32_t (&a)[4], uint64_t b, int accumulate);

template <class T, int N>
struct Wgmma {
    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {
        wgmma_ss<T>(d, N, a, b, accumulate);
    }
    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, uint64_t a2, uint64_t b2, int accumulate) {
        ss(d, a, b, accumulate), ss(d, a2, b2, 1);
    }
    static void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
        wgmma_rs<T>(d, N, a, b, accumulate);
    }
    static void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, const uint32_t (&a2)[4], uint64_t b2,
                   int accumulate) {
        rs(d, a, b, accumulate), rs(d, a2, b2, 1);
    }
};
