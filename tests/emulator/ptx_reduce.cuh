// The functions of cufa/kernels/ptx_reduce.cuh on the host.
#pragma once
#include "ptx.cuh"

inline void red_add(float* p, float x) { *p += x; }
inline int draw(int* p) { return (*p)++; }
inline int ld_acquire(const int* p) {  // again and again, until another block has left it
    ++emulator::events, emulator::yield();
    return *p;
}
inline void st_release(int* p, int x) { *p = x, ++emulator::events; }
inline void fence_gpu() {}
inline int lanes_before_with(uint64_t x) {
    return emulator::meet<1>({x}, [=](auto& words, int lane) {
        int before = 0;
        for (int i = 0; i < lane; ++i) before += words[i][0] == x;
        return before;
    });
}
