// Products of matrices by a warp and by a warpgroup. A thread has the sums of two rows and, for each 8 columns, of two
// columns: row 0 of column 0 and 1, then row 1.
#include "ptx_bwd_sm90.cuh"
#include "ptx_expand.cuh"
#include "ptx_fp8.cuh"

namespace {

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));

template <int K>
struct Two {
    float values[2][K];
};
// Two rows of the left operand, each number as often as the sums of a thread need it.
template <int K>
struct Rows {
    Four values[K];

    explicit Rows(const Two<K>& rows) {
        const auto& x = rows.values;
        for (int k = 0; k < K; ++k) values[k] = Four{x[0][k], x[0][k], x[1][k], x[1][k]};
    }
};
template <int K>
Four of_columns(const Two<K>& columns, int k) {
    const auto& x = columns.values;
    return Four{x[0][k], x[1][k], x[0][k], x[1][k]};
}
// sums + rows * columns, one k after the other.
template <int K>
Four add(Four sums, const Rows<K>& rows, const Two<K>& columns) {
    for (int k = 0; k < K; ++k) sums += rows.values[k] * of_columns(columns, k);
    return sums;
}
// The same of 8 bits, as a tensor core adds them.
Four add_e4m3(Four sums, const Rows<32>& rows, const Two<32>& columns) {
    Four terms[32], plain = sums, largest = sums < 0 ? -sums : sums;
    for (int k = 0; k < 32; ++k) {
        terms[k] = rows.values[k] * of_columns(columns, k);
        const Four size = terms[k] < 0 ? -terms[k] : terms[k];
        largest = largest < size ? size : largest;
        plain += terms[k];
    }
    FourInts exponents;
    std::memcpy(&exponents, &largest, 16);
    exponents &= 0x7f800000;
    Four unit;
    std::memcpy(&unit, &exponents, 16);
    unit *= 0x1p-13f;
    const Four inverse = 1.f / unit;
    // Cut off; what is no number stays none.
    auto whole = [](Four x) { return __builtin_convertvector(__builtin_convertvector(x, FourInts), Four) + (x - x); };
    Four units = whole(sums * inverse);
    for (const Four& term : terms) units += whole(term * inverse);
    const Four found = largest > 0x1p-100f ? units * unit : Four{};
    return plain == plain ? found : plain;  // NaN, which is neither large nor small
}

// --- of a warp ---

// `a` and `b` say where an element of a row (column) and k is, in the words of the lanes.
template <int K, class A, class B>
void mma(float (&d)[4], const uint64_t (&mine)[6], A a, B b) {
    emulator::meet<6>(mine, [&](auto& words, int lane) {
        Two<K> rows, columns;
        for (int i = 0; i < 2; ++i)
            for (int k = 0; k < K; ++k) {
                rows.values[i][k] = a(words, lane / 4 + 8 * i, k);
                columns.values[i][k] = b(words, lane % 4 * 2 + i, k);
            }
        Four sums;
        std::memcpy(&sums, d, 16);
        sums = add<K>(sums, Rows<K>(rows), columns);
        std::memcpy(d, &sums, 16);
        return 0;
    });
}

// --- of a warpgroup ---

// An operand in shared memory, by its descriptor.
struct Operand {
    uint32_t start, panel_bytes, eight_rows;
    int row_bytes;

    explicit Operand(uint64_t d)
        : start((d & 0x3fff) << 4),
          panel_bytes((d >> 16 & 0x3fff) << 4),
          eight_rows((d >> 32 & 0x3fff) << 4),
          row_bytes(256 >> (d >> 62)) {}

    // 32 bytes of a row, along which K goes.
    template <class T, int K = 32 / sizeof(T)>
    void row(int row, float (&values)[K]) const {
        const uint32_t first = start + row / 8 * eight_rows + row % 8 * row_bytes;
        for (int half = 0; half < 2; ++half) {
            T found[K / 2];
            std::memcpy(found, emulator::shared(swizzled(first + 16 * half, row_bytes), 16), 16);
            for (int k = 0; k < K / 2; ++k) values[half * K / 2 + k] = wide(found[k]);
        }
    }
    // Two rows, `apart` from each other.
    template <class T, int K = 32 / sizeof(T)>
    Two<K> two_rows(int first, int apart) const {
        Two<K> two;
        for (int i = 0; i < 2; ++i) row<T>(first + i * apart, two.values[i]);
        return two;
    }
    // Two columns, of which the first has an even number; K goes along them.
    template <class T>
    Two<16> two_columns(int column) const {
        Two<16> two;
        const int of_panel = row_bytes / 2;
        const uint32_t first = start + column / of_panel * panel_bytes + column % of_panel * 2;
        const uint32_t last = first + eight_rows + 7 * row_bytes;  // the swizzle moves numbers within their row
        for (uint32_t row : {first, last}) emulator::shared(row & -row_bytes, row_bytes);
        for (int k = 0; k < 16; ++k) {
            T found[2];
            const uint32_t address = first + k / 8 * eight_rows + k % 8 * row_bytes;
            std::memcpy(found, shared_memory + swizzled(address, row_bytes), 4);
            two.values[0][k] = wide(found[0]), two.values[1][k] = wide(found[1]);
        }
        return two;
    }
};
// The numbers of A that a thread needs, and of B: its columns are rows in memory, or are not.
template <class T>
auto rows_of(const Operand& a, int thread) {
    return Rows(a.two_rows<T>(thread % 128 / 32 * 16 + thread % 32 / 4, 8));
}
template <class T>
auto from_rows(const Operand& b) {
    return [&b](int column) { return b.two_rows<T>(column, 1); };
}
template <class T>
auto from_columns(const Operand& b) {
    return [&b](int column) { return b.two_columns<T>(column); };
}
template <int K, class B>
void multiply(Accumulators d, int columns, const Rows<K>& rows, int thread, int accumulate, B b,
              Four (*add)(Four, const Rows<K>&, const Two<K>&)) {
    for (int i = 0; i < columns / 8; ++i) {
        Four sums{};
        if (accumulate) std::memcpy(&sums, d[i], 16);
        sums = add(sums, rows, b(8 * i + thread % 4 * 2));
        std::memcpy(d[i], &sums, 16);
    }
}

}  // namespace

template <class T>
void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma<16>(
        d, {a[0], a[1], a[2], a[3], b0, b1},
        [](auto& words, int row, int k) { return element<T>(words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2); },
        [](auto& words, int col, int k) { return element<T>(words[col * 4 + k % 8 / 2][4 + k / 8], k % 2); });
}
void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto tf32 = [](uint64_t x) { return __uint_as_float(static_cast<uint32_t>(x) & 0xffffe000u); };
    mma<8>(
        d, {a[0], a[1], a[2], a[3], b0, b1},
        [=](auto& words, int row, int k) { return tf32(words[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]); },
        [=](auto& words, int col, int k) { return tf32(words[col * 4 + k % 4][4 + k / 4]); });
}
void mma_m16n8k32_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto byte = [](uint64_t x, int k) { return static_cast<float>(static_cast<signed char>(x >> k % 4 * 8)); };
    float products[4] = {};  // exact: less than 2^24
    mma<32>(
        products, {a[0], a[1], a[2], a[3], b0, b1},
        [=](auto& words, int row, int k) { return byte(words[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2], k); },
        [=](auto& words, int col, int k) { return byte(words[col * 4 + k % 16 / 4][4 + k / 16], k); });
    for (int i = 0; i < 4; ++i) d[i] += static_cast<int>(products[i]);
}

template <class T>
void wgmma_ss(Accumulators d, int columns, uint64_t a, uint64_t b, int accumulate) {
    const int thread = threadIdx.x;
    emulator::thread->products.add([=] {
        const Operand of_a(a), of_b(b);
        multiply(d, columns, rows_of<T>(of_a, thread), thread, accumulate, from_rows<T>(of_b), add<16>);
    });
}
template <class T>
void wgmma_of_rows(Accumulators d, int columns, uint64_t a, uint64_t b, int accumulate) {
    const int thread = threadIdx.x;
    emulator::thread->products.add([=] {
        const Operand of_a(a), of_b(b);
        multiply(d, columns, rows_of<T>(of_a, thread), thread, accumulate, from_columns<T>(of_b), add<16>);
    });
}
template <class T>
void wgmma_rs(Accumulators d, int columns, const uint32_t (&a)[4], uint64_t b, int accumulate) {
    const Two<16> rows = emulator::meet<4>({a[0], a[1], a[2], a[3]}, [](auto& words, int lane) {
        Two<16> rows;
        for (int i = 0; i < 32; ++i)
            rows.values[i / 16][i % 16] = element<T>(words[lane / 4 * 4 + i % 8 / 2][i / 16 + i % 16 / 8 * 2], i % 2);
        return rows;
    });
    const int thread = threadIdx.x;
    emulator::thread->products.add([=] {
        const Operand of_b(b);
        multiply(d, columns, Rows(rows), thread, accumulate, from_columns<T>(of_b), add<16>);
    });
}
void wgmma_ss_e4m3(Accumulators d, int columns, uint64_t a, uint64_t b, int accumulate) {
    const int thread = threadIdx.x;
    emulator::thread->products.add([=] {
        const Operand of_a(a), of_b(b);
        multiply(d, columns, rows_of<float8>(of_a, thread), thread, accumulate, from_rows<float8>(of_b), add_e4m3);
    });
}
void wgmma_rs_e4m3(Accumulators d, int columns, const uint32_t (&a)[4], uint64_t b, int accumulate) {
    const Two<32> rows = emulator::meet<4>({a[0], a[1], a[2], a[3]}, [](auto& words, int lane) {
        Two<32> rows;
        for (int h = 0; h < 2; ++h)
            for (int k = 0; k < 32; ++k) {
                const uint32_t four = words[lane / 4 * 4 + k % 16 / 4][h + k / 16 * 2];
                rows.values[h][k] = wide(float8{static_cast<unsigned char>(four >> k % 4 * 8)});
            }
        return rows;
    });
    const int thread = threadIdx.x;
    emulator::thread->products.add([=] {
        const Operand of_b(b);
        multiply(d, columns, Rows(rows), thread, accumulate, from_rows<float8>(of_b), add_e4m3);
    });
}

#define OF(T)                                                                                        \
    template void multiply_m16n8k16<T>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);     \
    template void wgmma_ss<T>(Accumulators, int, uint64_t, uint64_t, int);                           \
    template void wgmma_of_rows<T>(Accumulators, int, uint64_t, uint64_t, int);                      \
    template void wgmma_rs<T>(Accumulators, int, const uint32_t (&)[4], uint64_t, int);
OF(float16)
OF(bfloat16)
