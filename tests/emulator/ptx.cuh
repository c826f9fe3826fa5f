// The functions of cufa/kernels/ptx.cuh on the host.
#pragma once
#include "block.h"

#undef INF
#undef NAN
#define INF __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

struct float16 {
    static constexpr float max = 65504.f;
    unsigned short bits;
};
struct bfloat16 {
    static constexpr float max = 0x1.fep127f;
    unsigned short bits;
};
inline float wide(bfloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
inline float wide(float16 x) {
    const uint32_t magnitude = x.bits & 0x7fff, sign = x.bits >> 15 << 31;
    const float value = magnitude >= 0x7c00 ? __uint_as_float(0x7f800000 | (magnitude & 0x3ff) << 13)
                                            : __uint_as_float(magnitude << 13) * 0x1p112f;
    return __uint_as_float(__float_as_uint(value) | sign);
}
template <class T>
T narrow(float x);
template <>
inline float narrow(float x) {
    return x;
}
template <>
inline bfloat16 narrow(float x) {
    const uint32_t bits = __float_as_uint(x);
    return {static_cast<unsigned short>(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
float16 narrow(float x);

inline uint32_t smem_address(const void* p) { return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - shared_memory); }
inline int block_index() { return blockIdx.x; }
inline int thread_index() { return threadIdx.x; }
inline int reread_thread_index() { return threadIdx.x; }
struct Twice {
    float x;
    Twice& operator=(float y) { return x = y, *this; }
    float even() const { return x; }
    float odd() const { return x; }
};
inline float opaque_zero() { return 0.f; }
inline void set_if_equal(float& x, int a, int b, float y) {
    if (a == b) x = y;
}
inline void set_if_less(float& x, int a, int b, float y) {
    if (a < b) x = y;
}

inline void launch_dependents() {}
inline void wait_for_kernel_in_front(int = 0) {
    emulator::yield_while([] { return emulator::front != nullptr; });
    emulator::thread->begun = true;
}
template <class T>
void computed_here(T&) {}
inline float reciprocal_approx(float x) { return 1.f / x; }

template <int LANES>
float lanes_sum(float x) {
    for (int i = 1; i < LANES; i *= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}
template <int LANES>
float lanes_max(float x) {
    for (int i = 1; i < LANES; i *= 2) x = std::fmax(x, __shfl_xor_sync(0xffffffff, x, i));
    return x;
}

constexpr uint32_t NOTHING = 0xffffffff;
inline uint32_t larger_bits(float x, float y) { return std::max(__float_as_uint(x), __float_as_uint(y)); }
// Numbers that the kernel in front may still change are others, if a test wants it: some less, or one; much more at the first looks; or less
// for the first warp only.
extern "C" int emulator_stale;
int emulator_stale = 0;
inline int ld_relaxed(const int* p) {
    if (emulator::thread->begun) return *p;
    const bool less = emulator_stale == 1 || (emulator_stale == 4 && emulator::thread->index < 32);
    if (emulator_stale == 3 && emulator::thread->meetings < 3) return 0x7fffffff;
    return less ? *p * 7 / 10 : emulator_stale == 2 ? *p - 1 : *p;
}
inline float4 nothings() { const float x = __uint_as_float(NOTHING); return {x, x, x, x}; }
inline float2 ld_relaxed(const float* p) {  // again and again, until another block has left it
    ++emulator::events, emulator::yield();
    return {p[0], p[1]};
}
inline float4 ld_relaxed_4(const float* p) { return {p[0], p[1], p[2], p[3]}; }
inline void st_relaxed(float* p, float2 x) {
    if (__float_as_uint(x.x) != NOTHING && std::min(__float_as_uint(p[0]), __float_as_uint(p[1])) != NOTHING)
        emulator::fail("numbers that are left twice");
    p[0] = x.x, p[1] = x.y, ++emulator::events;
}
inline void st_relaxed_4(float* p, float4 x) { p[0] = x.x, p[1] = x.y, p[2] = x.z, p[3] = x.w; }

inline void prefetch_l2(const void* p, uint32_t bytes) {
    volatile unsigned char last = static_cast<const unsigned char*>(p)[bytes - 1];  // it must be there
    (void)last;
    if (reinterpret_cast<uint64_t>(p) % 16 || bytes % 16) emulator::fail("a prefetch that is not aligned");
}
inline void prefetch_l2(const void* p) { prefetch_l2(p, 16); }

inline void named_barrier_sync(int id, int threads) { emulator::sync(id, threads); }

template <int BYTES>
void cp_async(uint32_t to, uint64_t from, int bytes) {
    unsigned char* place = emulator::shared(to, BYTES);
    if (bytes && from % BYTES) emulator::fail("cp.async from an address that is not aligned");
    if (bytes < 0 || bytes > BYTES) emulator::fail("cp.async of that many bytes", bytes);
    if (WATCHES) emulator::mark(to, BYTES, emulator::STARTS);
    auto copy = [=] {
        if (WATCHES) emulator::mark(smem_address(place), BYTES, emulator::LANDS);
        std::memset(place, 0, BYTES);
        if (bytes) std::memcpy(place, reinterpret_cast<const void*>(from), bytes);
    };
    if (!WATCHES && emulator::is_in_a_hurry())
        copy();
    else
        emulator::thread->copies.add(copy);
}
constexpr unsigned long long L2_NORMAL = 0, L2_READ_ONCE = 1, L2_KEPT = 2;
inline void cp_async_16(uint32_t to, const void* from, bool read, unsigned long long = L2_NORMAL) {
    cp_async<16>(to, reinterpret_cast<uint64_t>(from), read ? 16 : 0);
}
inline void cp_async_4(uint32_t to, const void* from, bool read) {
    cp_async<4>(to, reinterpret_cast<uint64_t>(from), read ? 4 : 0);
}
inline void cp_async_commit() { emulator::thread->copies.commit(); }
template <int PENDING>
void cp_async_wait() {
    emulator::thread->copies.wait(PENDING);
}

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row);
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row);
inline void lds(float (&v)[4], uint32_t address) { std::memcpy(v, emulator::shared(address, 16), 16); }
template <class T>
T value_at(uint32_t address) {
    T v;
    std::memcpy(&v, emulator::shared(address, sizeof v), sizeof v);
    return v;
}
inline float2 lds_2(uint32_t address) { return value_at<float2>(address); }
inline uint64_t lds_64(uint32_t address) { return value_at<uint64_t>(address); }
inline uint32_t lds_16(uint32_t address) { return value_at<uint16_t>(address); }
inline void sts_64(uint32_t address, uint64_t v) { std::memcpy(emulator::shared(address, 8), &v, 8); }
template <class T>
void sts(uint32_t address, T v) {
    std::memcpy(emulator::shared(address, sizeof v), &v, sizeof v);
}
inline void sts_32(uint32_t address, uint32_t v) { std::memcpy(emulator::shared(address, 4), &v, 4); }

inline void sts_128(uint32_t address, float4 v) { std::memcpy(emulator::shared(address, 16), &v, 16); }

// Element i of two that are packed in a register.
template <class T>
float element(uint64_t packed, int i) {
    return wide(T{static_cast<unsigned short>(packed >> 16 * i)});
}
extern "C" long long emulator_mmas;  // of all threads so far
long long emulator_mmas = 0;
template <class T>
void multiply_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ++emulator_mmas;
    multiply_m16n8k16<T>(d, a, b0, b1);
}
void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

inline float exp2_approx(float x) {
    const float y = std::exp2(x);
    return y < 0x1p-126f ? 0.f : y;
}
inline float tanh_approx(float x) { return std::tanh(x); }
template <class T>
uint32_t pack2(float lo, float hi) {
    return narrow<T>(lo).bits | static_cast<uint32_t>(narrow<T>(hi).bits) << 16;
}
inline uint32_t round_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
