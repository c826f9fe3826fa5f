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

inline float parameter_anew(const float& x) { return x; }
inline uint32_t dynamic_smem_bytes() { return emulator::smem_bytes; }

// An mbarrier: the arrivals and the bytes that its phase still waits for.
struct MBarrier {
    uint16_t arrivals, pending;
    uint32_t phase : 1;
    int32_t bytes : 31;

    void settle() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = arrivals;
        ++emulator::events;
    }
};
static_assert(sizeof(MBarrier) == 8, "a 64-bit word");
inline MBarrier& mbarrier(uint32_t bar) { return *reinterpret_cast<MBarrier*>(emulator::shared(bar, 8)); }
inline void mbarrier_init(uint32_t bar, int arrivals) {
    mbarrier(bar) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0, 0};
}
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(uint32_t bar) {
    if (mbarrier(bar).pending-- == 0) emulator::fail("an arrival that no barrier waits for", bar);
    mbarrier(bar).settle();
}
inline void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes) {
    mbarrier(bar).bytes += bytes;
    mbarrier_arrive(bar);
}
inline void mbarrier_wait(uint32_t bar, uint32_t parity) {
    while (mbarrier(bar).phase == parity) emulator::yield();
}

// The swizzle of rows of 128, 64 or 32 bytes: the row's number is in the address.
inline uint32_t swizzled(uint32_t address, int row_bytes) { return address ^ (address >> 3 & (row_bytes / 16 - 1) << 4); }

// Calls f(place in shared memory, place in the tensor or null) for each element of a box.
template <class F>
void each_of_box(const TensorMap& map, uint32_t tile, const int (&corner)[5], F f) {
    int64_t count = 1;
    for (int64_t n : map.box) count *= n;
    for (int64_t i = 0; i < count; ++i) {
        int64_t rest = i, offset = 0;
        bool inside = true;
        for (int axis = 0; axis < 5; ++axis) {
            const int64_t at = corner[axis] + rest % map.box[axis];
            inside &= at >= 0 && at < map.sizes[axis];
            offset += at * (axis ? map.strides[axis - 1] : 2);
            rest /= map.box[axis];
        }
        f(emulator::shared(swizzled(tile + 2 * i, map.swizzle_bytes), 2), inside ? map.address + offset : nullptr);
    }
}
inline void tma_prefetch(const TensorMap&) {}
inline void tma_load(uint32_t tile, const TensorMap& map, uint32_t bar, int c0, int c1, int c2, int c3, int c4,
                     unsigned long long) {
    emulator::Step load = [=, &map] {
        int bytes = 0;
        each_of_box(map, tile, {c0, c1, c2, c3, c4}, [&](unsigned char* to, const unsigned char* from) {
            bytes += 2;
            if (from)
                std::memcpy(to, from, 2);
            else
                std::memset(to, 0, 2);
        });
        mbarrier(bar).bytes -= bytes;
        mbarrier(bar).settle();
    };
    if (emulator::hurry && emulator::dice() / 8 % emulator::hurry == 0)
        load(), ++emulator::events;
    else
        emulator::block->in_flight.push_back(std::move(load));
}
inline void tma_store(const TensorMap& map, uint32_t tile, int c0, int c1, int c2, int c3, int c4) {
    emulator::thread->stores.push_back([=, &map] {
        each_of_box(map, tile, {c0, c1, c2, c3, c4}, [](const unsigned char* from, unsigned char* to) {
            if (to) std::memcpy(to, from, 2);
        });
    });
}
inline void tma_store_commit() {}
inline void tma_store_wait_read() {
    for (emulator::Step& store : emulator::thread->stores) store();
    emulator::thread->stores.clear();
}
inline void fence_proxy_async() {}
inline void named_barrier_arrive(int id, int threads) { emulator::arrive(id, threads); }
template <int>
void registers_increase() {}
template <int>
void registers_decrease() {}

inline void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    emulator::shared(row, 16);
    const uint32_t r[4] = {a, b, c, d};
    emulator::meet<1>({row}, [&](auto& rows, int lane) {
        for (int i = 0; i < 4; ++i) std::memcpy(shared_memory + rows[8 * i + lane / 4][0] + lane % 4 * 4, &r[i], 4);
        return 0;
    });
}

inline uint64_t wgmma_descriptor(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }
inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::thread->products.commit(); }
template <int PENDING>
void wgmma_wait() {
    emulator::thread->products.wait(PENDING);
}

// An operand in shared memory, by its descriptor.
template <class T>
struct Operand {
    uint32_t start, panel_bytes, eight_rows;
    int row_bytes;

    explicit Operand(uint64_t d)
        : start((d & 0x3fff) << 4),
          panel_bytes((d >> 16 & 0x3fff) << 4),
          eight_rows((d >> 32 & 0x3fff) << 4),
          row_bytes(256 >> (d >> 62)) {}
    float at(uint32_t address) const {
        return wide(*reinterpret_cast<T*>(emulator::shared(swizzled(address, row_bytes), 2)));
    }
    // K along the columns, or along the rows.
    float of_row(int row, int k) const { return at(start + row / 8 * eight_rows + row % 8 * row_bytes + 2 * k); }
    float of_column(int column, int k) const {
        const int of_panel = row_bytes / 2;
        return at(start + column / of_panel * panel_bytes + k / 8 * eight_rows + k % 8 * row_bytes + column % of_panel * 2);
    }
};

template <class T, int N>
struct Wgmma {
    using Accumulators = float (*)[4];

    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {
        const Accumulators rD = d;
        const int thread = threadIdx.x;
        emulator::thread->products.add([=] {
            float rows[2][16];
            for (int i = 0; i < 32; ++i)
                rows[i / 16][i % 16] = Operand<T>(a).of_row(thread % 128 / 32 * 16 + thread % 32 / 4 + i / 16 * 8, i % 16);
            multiply(rD, rows, thread % 4, accumulate, [&](int column, int k) { return Operand<T>(b).of_row(column, k); });
        });
    }
    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, uint64_t a2, uint64_t b2, int accumulate) {
        ss(d, a, b, accumulate), ss(d, a2, b2, 1);
    }
    static void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, const uint32_t (&a2)[4], uint64_t b2,
                   int accumulate) {
        rs(d, a, b, accumulate), rs(d, a2, b2, 1);
    }
    static void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
        struct Rows {
            float values[2][16];
        };
        const Rows rows = emulator::meet<4>({a[0], a[1], a[2], a[3]}, [](auto& words, int lane) {
            Rows rows;
            for (int i = 0; i < 32; ++i)
                rows.values[i / 16][i % 16] = element<T>(words[lane / 4 * 4 + i % 8 / 2][i / 16 + i % 16 / 8 * 2], i % 2);
            return rows;
        });
        const Accumulators rD = d;
        const int thread = threadIdx.x;
        emulator::thread->products.add([=] {
            multiply(rD, rows.values, thread % 4, accumulate,
                     [&](int column, int k) { return Operand<T>(b).of_column(column, k); });
        });
    }

 private:
    template <class B>
    static void multiply(Accumulators d, const float (&rows)[2][16], int lane, int accumulate, B b) {
        for (int i = 0; i < N / 8; ++i)
            for (int e = 0; e < 2; ++e) {
                float column[16];
                for (int k = 0; k < 16; ++k) column[k] = b(8 * i + 2 * lane + e, k);
                for (int h = 0; h < 2; ++h) {
                    float sum = accumulate ? d[i][2 * h + e] : 0.f;
                    for (int k = 0; k < 16; ++k) sum += rows[h][k] * column[k];
                    d[i][2 * h + e] = sum;
                }
            }
    }
};
