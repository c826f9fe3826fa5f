// Instructions for elements of 8 bits: those that expand them to 16, and a product of integers.
#pragma once
#include "ptx.cuh"

// Four of the eight bytes of `a` (0 to 3) and `b` (4 to 7): each digit of `which`, from the lowest
// on, is the number of one; with 8 added, its sign in all bits.
__device__ inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t which) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(which));
    return y;
}

// a b + c of two packed numbers, rounded once.
template <class T>
__device__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c);
template <>
__device__ inline uint32_t fma2<float16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
template <>
__device__ inline uint32_t fma2<bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// D += A B of 8-bit integers, exactly: A 16x32 by rows, B 32x8 by columns.
__device__ inline void mma_m16n8k32_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Whether there is an instruction for e4m3, which this is: two numbers as float16, exactly.
#if __CUDA_ARCH__ >= 890
constexpr bool EXPANDS_E4M3 = true;
#else
constexpr bool EXPANDS_E4M3 = false;
#endif
__device__ inline void expand_e4m3(uint32_t (&two)[2], uint32_t four) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(two[0]), "=r"(two[1])
        : "r"(four));
#endif
}
