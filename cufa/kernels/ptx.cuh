// The PTX instructions that the kernels use, one a function. sm_80 and later.
#pragma once

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#define INF __int_as_float(0x7f800000)  // NVRTC has no INFINITY
#define NAN __int_as_float(0x7fffffff)

// The two 16-bit types, as bits: NVRTC then needs no header, and compiles faster.
struct float16 {
    static constexpr float max = 65504.f;
    unsigned short bits;
};
struct bfloat16 {
    static constexpr float max = 0x1.fep127f;
    unsigned short bits;
};

__device__ inline uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Read at each call: neither it nor anything computed from it occupies a register in between.
__device__ inline int block_index() {
    int i;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(i));
    return i;
}
// Signed: the compiler then folds divisions and remainders into fewer registers.
__device__ inline int thread_index() { return threadIdx.x; }

// Like block_index(), read at each call: it occupies no register through a main loop.
__device__ inline int reread_thread_index() {
    int i;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
    return i;
}

// A value twice over, in two registers that follow each other, the first of even number.
class Twice {
    uint64_t pair;

 public:
    __device__ Twice& operator=(float x) {
        asm volatile("mov.b64 %0, {%1, %1};" : "=l"(pair) : "f"(x));
        return *this;
    }
    __device__ float even() const { return half<0>(); }
    __device__ float odd() const { return half<1>(); }

 private:
    template <int I>
    __device__ float half() const {
        float x[2];
        asm("mov.b64 {%0, %1}, %2;" : "=f"(x[0]), "=f"(x[1]) : "l"(pair));
        return x[I];
    }
};

// Keeps this value in a register from here on: it is not computed where it is used.
__device__ inline void computed_here(int& x) { asm volatile("mov.b32 %0, %0;" : "+r"(x)); }
template <class T>
__device__ void computed_here(T*& p) {
    asm volatile("mov.b64 %0, %0;" : "+l"(p));
}

// Zero, not as a constant: what the compiler makes of many registers that become one takes it long.
__device__ inline float opaque_zero() {
    float x;
    asm("mov.b32 %0, 0;" : "=f"(x));
    return x;
}
// x = y if a == b, or if a < b: predicated instructions, since many branches compile slowly.
__device__ inline void set_if_equal(float& x, int a, int b, float y) {
    asm("{.reg .pred p; setp.eq.s32 p, %1, %2; @p mov.b32 %0, %3;}"
        : "+f"(x)
        : "r"(a), "r"(b), "f"(y));
}
__device__ inline void set_if_less(float& x, int a, int b, float y) {
    asm("{.reg .pred p; setp.lt.s32 p, %1, %2; @p mov.b32 %0, %3;}"
        : "+f"(x)
        : "r"(a), "r"(b), "f"(y));
}

// In a kernel that may be there before the one in front of it in its stream has ended, see
// cufa/compiler/dependent.py: lets the next kernel come likewise, when all blocks have called this;
// and waits for the end of the one in front. `known`, a number from 0 on, is computed before that.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_kernel_in_front(int known = 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; setp.ge.s32 p, %0, 0; @p griddepcontrol.wait;}" ::"r"(known)
                 : "memory");
#endif
}

// Over LANES neighbouring lanes, a power of two.
template <int LANES>
__device__ float lanes_sum(float x) {
#pragma unroll
    for (int i = 1; i < LANES; i *= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}
template <int LANES>
__device__ float lanes_max(float x) {  // NaN only if all are
#pragma unroll
    for (int i = 1; i < LANES; i *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, i));
    return x;
}

// Numbers that one block leaves in global memory for another to wait for: each is there as soon as
// its bits are not NOTHING, which no computation gives.
constexpr uint32_t NOTHING = 0xffffffff;
__device__ inline uint32_t larger_bits(float x, float y) {
    return max(__float_as_uint(x), __float_as_uint(y));
}
__device__ inline int ld_relaxed(const int* p) {  // from L2, whatever L1 may hold
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
__device__ inline float4 nothings() {  // in four registers, and not written again for each use
    float4 x;
    asm volatile("mov.b32 %0, -1; mov.b32 %1, -1; mov.b32 %2, -1; mov.b32 %3, -1;"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w));
    return x;
}
__device__ inline float2 ld_relaxed(const float* p) {
    float2 x;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p));
    return x;
}
__device__ inline float4 ld_relaxed_4(const float* p) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p));
    return x;
}
__device__ inline void st_relaxed(float* p, float2 x) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(x.x), "f"(x.y)
                 : "memory");
}
__device__ inline void st_relaxed_4(float* p, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}

// Fetches bytes into L2, a multiple of 16 from such an address on.
__device__ inline void prefetch_l2(const void* p, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
#endif
}

// Fetches what is around an address into L2.
__device__ inline void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Copies 16 or 4 bytes from global to shared memory, or writes zeros and reads nothing.
__device__ inline void cp_async_16(uint32_t smem, const void* gmem, bool read) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
                 "r"(read ? 16 : 0)
                 : "memory");
}
// How L2 keeps data: as all else; evicted first, for data that is read once; or evicted last.
constexpr unsigned long long L2_NORMAL = 0x10F0000000000000, L2_READ_ONCE = 0x12F0000000000000,
                             L2_KEPT = 0x14F0000000000000;
// The same, with such a policy.
__device__ inline void cp_async_16(uint32_t smem, const void* gmem, bool read,
                                   unsigned long long policy) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(smem),
        "l"(gmem), "r"(read ? 16 : 0), "l"(policy)
        : "memory");
}
__device__ inline void cp_async_4(uint32_t smem, const void* gmem, bool read) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(gmem),
                 "r"(read ? 4 : 0)
                 : "memory");
}
// The same of BYTES bytes, 16 or 4: `bytes` of them are read, zeros stand for the others.
template <int BYTES>
__device__ inline void cp_async(uint32_t smem, uint64_t gmem, int bytes) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem),
                     "l"(gmem), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(gmem),
                     "r"(bytes)
                     : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Four 8x8 matrices of 16-bit (or 8x4 of 32-bit) elements; lane i names row i % 8 of matrix i / 8.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

__device__ inline void lds(float (&v)[4], uint32_t smem) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(smem)
                 : "memory");
}
__device__ inline float2 lds_2(uint32_t smem) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem) : "memory");
    return v;
}
__device__ inline uint64_t lds_64(uint32_t smem) {
    uint64_t v;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(v) : "r"(smem) : "memory");
    return v;
}
__device__ inline uint32_t lds_16(uint32_t smem) {
    uint32_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
    return v;
}
__device__ inline void sts_64(uint32_t smem, uint64_t v) {
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(smem), "l"(v) : "memory");
}
__device__ inline void sts(uint32_t smem, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(v) : "memory");
}
template <class T>
__device__ void sts(uint32_t smem, T v) {  // float16 and bfloat16
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(smem), "h"(v.bits) : "memory");
}
__device__ inline void sts(uint32_t smem, unsigned char v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(smem), "r"(static_cast<uint32_t>(v)) : "memory");
}
__device__ inline void sts_32(uint32_t smem, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}

__device__ inline void sts_128(uint32_t smem, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(smem), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}

// D += A B on the tensor cores: A 16x16 by rows, B 16x8 by columns, float32 accumulators.
template <class T>
__device__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma_m16n8k16<float16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma_m16n8k16<bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with TF32 operands, k = 8. The hardware ignores the low 13 bits of each operand.
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x, relative error 2^-22; 2^-inf = 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Relative error 2^-11.
__device__ inline float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Relative error 2^-23; 1 / 0 = inf.
__device__ inline float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two float32 rounded to nearest and packed, `lo` in the low half.
template <class T>
__device__ uint32_t pack2(float lo, float hi);
template <>
__device__ inline uint32_t pack2<float16>(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
template <>
__device__ inline uint32_t pack2<bfloat16>(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// float32 rounded to TF32 (11 significant bits), as float32 bits. cvt.rna.tf32 takes twice the
// instructions for the same; it differs for NaN and for what rounds up to infinity.
__device__ inline uint32_t round_tf32(float x) {
    return (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
}

// A float32, rounded to nearest.
template <class T>
__device__ T narrow(float x) {
    T y;
    y.bits = static_cast<unsigned short>(pack2<T>(x, 0.f));
    return y;
}
template <>
__device__ inline float narrow<float>(float x) {
    return x;
}
