// Instructions of Hopper that only the backward pass takes.
#pragma once
#include "ptx_sm90.cuh"

// Waits until stores of TMA have written.
__device__ inline void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Orders this thread's own accesses to global memory and those that TMA makes for it: the ones
// before the fence come first, whichever kind they are.
__device__ inline void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
// As stmatrix_x4, of 8 x 8 matrices that are transposed on the way.
__device__ inline void stmatrix_x4_trans(uint32_t smem, uint32_t a, uint32_t b, uint32_t c,
                                         uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
// Copies bytes, a multiple of 16 of such an address, to shared memory; they count at the barrier.
__device__ inline void bulk_load(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(smem),
        "l"(gmem), "r"(bytes), "r"(bar)
        : "memory");
}
// Adds float32, a multiple of 16 bytes of them, from shared to global memory; commit and wait as
// for stores of TMA.
__device__ inline void bulk_add(float* gmem, uint32_t smem, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
        "r"(smem), "r"(bytes)
        : "memory");
}

// wgmma.mma_async, m64 nN k16: D = A B, or D += A B, of A and B in shared memory, K along the
// columns of A and the rows of B.
template <class T, int N>
struct WgmmaOfRows;

#define NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_64 NAMES_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SUMS_32 SUMS(0), SUMS(1), SUMS(2), SUMS(3)
#define SUMS_64 SUMS_32, SUMS(4), SUMS(5), SUMS(6), SUMS(7)
// A, B and ACCUMULATE are the names of the operands after the sums.
#define WGMMA_OF_ROWS(TYPE, NAME, N, A, B, ACCUMULATE)                                            \
    template <>                                                                                   \
    struct WgmmaOfRows<TYPE, N> {                                                                 \
        static __device__ void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE                           \
                         ", 0;\n"                                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME          \
                         " {" NAMES_##N "}, " A ", " B ", p, 1, 1, 0, 1;\n}"                      \
                         : SUMS_##N                                                               \
                         : "l"(a), "l"(b), "r"(accumulate));                                      \
        }                                                                                         \
    };
WGMMA_OF_ROWS(float16, "f16", 32, "%16", "%17", "%18")
WGMMA_OF_ROWS(float16, "f16", 64, "%32", "%33", "%34")
WGMMA_OF_ROWS(bfloat16, "bf16", 32, "%16", "%17", "%18")
WGMMA_OF_ROWS(bfloat16, "bf16", 64, "%32", "%33", "%34")
#undef NAMES_32
#undef NAMES_64
#undef SUMS
#undef SUMS_32
#undef SUMS_64
#undef WGMMA_OF_ROWS
