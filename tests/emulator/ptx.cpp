// Instructions that are the same in all kernels, compiled once.
#include "ptx_sm90.cuh"

template <>
float16 narrow(float x) {
    const uint32_t sign = __float_as_uint(x) >> 31 << 15;
    const float magnitude = std::fabs(x);
    if (x != x) return {0x7fff};
    if (magnitude >= 65520.f) return {static_cast<unsigned short>(sign | 0x7c00)};
    // In units of the last place: of subnormal numbers' at least.
    const int exponent = std::max(magnitude == 0.f ? -24 : std::ilogb(magnitude) - 10, -24);
    const uint32_t units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -exponent)));
    return {static_cast<unsigned short>(sign | (static_cast<uint32_t>(exponent + 24) * 1024 + units))};
}

// --- fragments in shared memory ---

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
    emulator::shared(row, 16);
    emulator::meet<1>({row}, [&](auto& rows, int lane) {
        for (int i = 0; i < 4; ++i) std::memcpy(&r[i], shared_memory + rows[8 * i + lane / 4][0] + lane % 4 * 4, 4);
        return 0;
    });
}
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
    emulator::shared(row, 16);
    emulator::meet<1>({row}, [&](auto& rows, int lane) {
        for (int i = 0; i < 4; ++i) {
            unsigned short pair[2];
            for (int e = 0; e < 2; ++e)
                std::memcpy(&pair[e], shared_memory + rows[8 * i + lane % 4 * 2 + e][0] + lane / 4 * 2, 2);
            std::memcpy(&r[i], pair, 4);
        }
        return 0;
    });
}
void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    emulator::shared(row, 16);
    const uint32_t r[4] = {a, b, c, d};
    emulator::meet<1>({row}, [&](auto& rows, int lane) {
        for (int i = 0; i < 4; ++i) std::memcpy(shared_memory + rows[8 * i + lane / 4][0] + lane % 4 * 4, &r[i], 4);
        return 0;
    });
}

// --- products of a warp ---

// D += A B: `a` and `b` say where an element of a row (column) and k is, in the words of the lanes.
template <int K, class A, class B>
void mma(float (&d)[4], const uint64_t (&mine)[6], A a, B b) {
    emulator::meet<6>(mine, [&](auto& words, int lane) {
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < K; ++k) d[i] += a(words, lane / 4 + i / 2 * 8, k) * b(words, lane % 4 * 2 + i % 2, k);
        return 0;
    });
}
template <class T>
void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma<16>(
        d, {a[0], a[1], a[2], a[3], b0, b1},
        [](auto& words, int row, int k) { return element<T>(words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2); },
        [](auto& words, int col, int k) { return element<T>(words[col * 4 + k % 8 / 2][4 + k / 8], k % 2); });
}
template void multiply_m16n8k16<float16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);
template void multiply_m16n8k16<bfloat16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);
void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto tf32 = [](uint64_t x) { return __uint_as_float(static_cast<uint32_t>(x) & 0xffffe000u); };
    mma<8>(
        d, {a[0], a[1], a[2], a[3], b0, b1},
        [=](auto& words, int row, int k) { return tf32(words[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]); },
        [=](auto& words, int col, int k) { return tf32(words[col * 4 + k % 4][4 + k / 4]); });
}

// --- TMA ---

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
void tma_load(uint32_t tile, const TensorMap& map, uint32_t bar, int c0, int c1, int c2, int c3, int c4,
              unsigned long long) {
    auto load = [=, &map] {
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
    if (emulator::is_in_a_hurry())
        load(), ++emulator::events;
    else
        emulator::block->in_flight.push_back(load);
}
void tma_store(const TensorMap& map, uint32_t tile, int c0, int c1, int c2, int c3, int c4) {
    emulator::thread->stores.push_back([=, &map] {
        each_of_box(map, tile, {c0, c1, c2, c3, c4}, [](const unsigned char* from, unsigned char* to) {
            if (to) std::memcpy(to, from, 2);
        });
    });
}

// --- products of a warpgroup ---

template <class B>
void multiply(Accumulators d, int columns, const float (&rows)[2][16], int lane, int accumulate, B b) {
    for (int i = 0; i < columns / 8; ++i)
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
template <class T>
void wgmma_ss(Accumulators d, int columns, uint64_t a, uint64_t b, int accumulate) {
    const int thread = threadIdx.x;
    emulator::thread->products.add([=] {
        const Operand<T> of_a(a), of_b(b);
        float rows[2][16];
        for (int i = 0; i < 32; ++i)
            rows[i / 16][i % 16] = of_a.of_row(thread % 128 / 32 * 16 + thread % 32 / 4 + i / 16 * 8, i % 16);
        multiply(d, columns, rows, thread % 4, accumulate, [&](int column, int k) { return of_b.of_row(column, k); });
    });
}
template <class T>
void wgmma_rs(Accumulators d, int columns, const uint32_t (&a)[4], uint64_t b, int accumulate) {
    struct Rows {
        float values[2][16];
    };
    const Rows rows = emulator::meet<4>({a[0], a[1], a[2], a[3]}, [](auto& words, int lane) {
        Rows rows;
        for (int i = 0; i < 32; ++i)
            rows.values[i / 16][i % 16] = element<T>(words[lane / 4 * 4 + i % 8 / 2][i / 16 + i % 16 / 8 * 2], i % 2);
        return rows;
    });
    const int thread = threadIdx.x;
    emulator::thread->products.add([=] {
        const Operand<T> of_b(b);
        multiply(d, columns, rows.values, thread % 4, accumulate,
                 [&](int column, int k) { return of_b.of_column(column, k); });
    });
}
template void wgmma_ss<float16>(Accumulators, int, uint64_t, uint64_t, int);
template void wgmma_ss<bfloat16>(Accumulators, int, uint64_t, uint64_t, int);
template void wgmma_rs<float16>(Accumulators, int, const uint32_t (&)[4], uint64_t, int);
template void wgmma_rs<bfloat16>(Accumulators, int, const uint32_t (&)[4], uint64_t, int);
