// The functions of ptx.cuh on the host.
using uint32_t = unsigned int;
#undef INF
#undef NAN
#define INF __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
struct float16 { static constexpr float max = 65504.f; unsigned short bits; };
struct bfloat16 { static constexpr float max = 0x1.fep127f; unsigned short bits; };
inline float wide(float16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
inline float wide(bfloat16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
inline uint32_t smem_address(const void* p) { return (uint32_t)((const unsigned char*)p - smem); }
inline int block_index() { return emu::block; }
inline int thread_index() { return emu::current->tid; }
inline int thread_index_anew() { return emu::current->tid; }
inline float copy_of(float x) { return x; }
template <int LANES, class T> T lanes_sum(T x) { for (int i = 1; i < LANES; i *= 2) x += __shfl_xor_sync(0xffffffff, x, i); return x; }
template <int LANES> float lanes_max(float x) { for (int i = 1; i < LANES; i *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, i)); return x; }
inline void cp_async_16(uint32_t dst, const void* src, bool read) {
    if (dst % 16 || (read && (uintptr_t)src % 16)) { fprintf(stderr, "cp.async: misaligned\n"); abort(); }
    if (dst + 16 > emu::smem_bytes) { fprintf(stderr, "cp.async beyond shared memory\n"); abort(); }
    emu::current->open.push_back({smem + dst, read ? (const unsigned char*)src : nullptr});
}
inline void cp_async_commit() { auto& f = *emu::current; f.groups.push_back(std::move(f.open)); f.open.clear(); }
template <int PENDING> void cp_async_wait() {
    auto& f = *emu::current;
    while ((int)f.groups.size() > PENDING) {
        for (auto& c : f.groups.front()) { if (c.src) memcpy(c.dst, c.src, 16); else memset(c.dst, 0, 16); }
        f.groups.pop_front();
    }
}
inline void check_smem(uint32_t a, int n) { if (a % n || a + n > emu::smem_bytes) { fprintf(stderr, "shared memory address %u of %d bytes, of %u\n", a, n, emu::smem_bytes); abort(); } }
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t a) {
    check_smem(a, 16); uint64_t m[1] = {a}; uint32_t o[4];
    emu::meet<1>(m, [&](auto& v, int lane) { for (int i = 0; i < 4; ++i) memcpy(&o[i], smem + v[8 * i + lane / 4][0] + lane % 4 * 4, 4); return 0; });
    for (int i = 0; i < 4; ++i) r[i] = o[i];
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t a) {
    check_smem(a, 16); uint64_t m[1] = {a}; uint32_t o[4];
    emu::meet<1>(m, [&](auto& v, int lane) {
        for (int i = 0; i < 4; ++i) { uint16_t x[2]; for (int e = 0; e < 2; ++e) memcpy(&x[e], smem + v[8 * i + lane % 4 * 2 + e][0] + lane / 4 * 2, 2); o[i] = x[0] | (uint32_t)x[1] << 16; }
        return 0; });
    for (int i = 0; i < 4; ++i) r[i] = o[i];
}
inline void lds(float (&v)[4], uint32_t a) { check_smem(a, 16); memcpy(v, smem + a, 16); }
inline void sts_32(uint32_t a, uint32_t v) { check_smem(a, 4); memcpy(smem + a, &v, 4); }
inline void sts_128(uint32_t a, float4 v) { check_smem(a, 16); memcpy(smem + a, &v, 16); }
template <class T> float half_of(uint32_t x, int i) { T t; t.bits = (unsigned short)(x >> 16 * i); return wide(t); }
template <class T> void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint64_t m[6] = {a[0], a[1], a[2], a[3], b0, b1};
    emu::meet<6>(m, [&](auto& v, int lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2; float s = d[i];
            for (int k = 0; k < 16; ++k)
                s += half_of<T>((uint32_t)v[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * half_of<T>((uint32_t)v[col * 4 + k % 8 / 2][4 + k / 8], k % 2);
            d[i] = s;
        }
        return 0; });
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint64_t m[6] = {a[0], a[1], a[2], a[3], b0, b1};
    emu::meet<6>(m, [&](auto& v, int lane) {
        auto f = [](uint64_t x) { return __uint_as_float((uint32_t)x & 0xffffe000u); };
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2; float s = d[i];
            for (int k = 0; k < 8; ++k) s += f(v[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * f(v[col * 4 + k % 4][4 + k / 4]);
            d[i] = s;
        }
        return 0; });
}
inline float exp2_approx(float x) { float y = exp2f(x); return fabsf(y) < 0x1p-126f ? 0.f : y; }
template <class T> unsigned short rounded(float x);
template <> inline unsigned short rounded<float16>(float x) { _Float16 h = (_Float16)x; unsigned short u; memcpy(&u, &h, 2); return u; }
template <> inline unsigned short rounded<bfloat16>(float x) { uint32_t u = __float_as_uint(x); if (x != x) return 0x7fff; return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16); }
template <class T> uint32_t pack2(float lo, float hi) { return rounded<T>(lo) | (uint32_t)rounded<T>(hi) << 16; }
inline uint32_t round_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
template <class T> T narrow(float x) { T y; y.bits = rounded<T>(x); return y; }
