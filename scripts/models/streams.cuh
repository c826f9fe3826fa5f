// PTX that these kernels need in addition to that of cufa/kernels/ptx.cuh.
#pragma once
#include "ptx.cuh"

// 16 bytes that are read once: they leave the first-level cache to what is read again. With .nc the compiler would move
// these loads behind wait_for_previous().
__device__ inline uint4 load_once(const void* p) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
}

// Programmatic dependent launch: a kernel may begin while the one before it ends, and waits before it touches what that
// one reads or writes. Where a launch does not ask for it, neither does anything.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
