// The functions of cufa/kernels/ptx_convert.cuh on the host.
#pragma once
#include "ptx.cuh"

template <class T>
float to_float(T x) {
    return wide(x);
}
inline float to_float(float x) { return x; }
template <class T>
float low_to_float(uint32_t two) {
    return to_float(T{static_cast<unsigned short>(two)});
}
template <class T>
float high_to_float(uint32_t two) {
    return to_float(T{static_cast<unsigned short>(two >> 16)});
}
