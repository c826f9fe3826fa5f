// The functions of cufa/kernels/ptx_convert.cuh on the host.
#pragma once
#include "ptx.cuh"

template <class T>
float to_float(T x) {
    return wide(x);
}
inline float to_float(float x) { return x; }
