// The PTX instructions by which blocks add up numbers in global memory, one a function. sm_80 and
// later.
#pragma once
#include "ptx.cuh"

// Adds to a number in global memory, in no order.
__device__ inline void red_add(float* p, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
// Returns a number of global memory, which then is one larger.
__device__ inline int draw(int* p) {
    int x;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// A number that one block leaves for another, and what it has written before that.
__device__ inline int ld_acquire(const int* p) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ inline void st_release(int* p, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
// Writes of this thread come before those of a thread that it meets after this.
__device__ inline void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// How many of the warp's lanes before this one have the same value.
__device__ inline int lanes_before_with(uint64_t x) {
    const unsigned same = __match_any_sync(0xffffffff, x);
    return __popc(same & ((1u << threadIdx.x % 32) - 1));
}
