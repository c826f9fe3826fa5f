// Parts of rows in global memory, read and written as float32: N elements at once, 16 bytes of them
// (or, as what 16 bytes of another type become, 8 or 32) at an address that is aligned so; or a
// single element anywhere.
#pragma once
#include "ptx_convert.cuh"

template <int N, class T>
__device__ void load_chunk(float (&x)[N], const T* p) {
    if constexpr (N == 1) {
        x[0] = to_float(*p);
    } else {
        constexpr int PER_WORD = 4 / sizeof(T), WORDS = N / PER_WORD;
        static_assert(WORDS % 4 == 0, "loads are of 16 bytes");
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 loaded = reinterpret_cast<const uint4*>(p)[i / 4];
            const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                if constexpr (PER_WORD == 1) {
                    x[i + w] = __uint_as_float(words[w]);
                } else {
                    x[2 * (i + w)] = to_float(T{static_cast<unsigned short>(words[w])});
                    x[2 * (i + w) + 1] = to_float(T{static_cast<unsigned short>(words[w] >> 16)});
                }
            }
        }
    }
}

// Rounded to nearest.
template <class T>
__device__ T from_float(float x) {
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return T{static_cast<unsigned short>(pack2<T>(x, 0.f))};
}

template <int N, class T>
__device__ void store_chunk(T* p, const float (&x)[N]) {
    if constexpr (N == 1) {
        *p = from_float<T>(x[0]);
    } else {
        constexpr int PER_WORD = 4 / sizeof(T), WORDS = N / PER_WORD;
        uint32_t words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            if constexpr (PER_WORD == 1)
                words[i] = __float_as_uint(x[i]);
            else
                words[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
        }
        if constexpr (WORDS == 2) {
            *reinterpret_cast<uint2*>(p) = {words[0], words[1]};
        } else {
            static_assert(WORDS % 4 == 0, "stores are of 8 or 16 bytes");
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                reinterpret_cast<uint4*>(p)[i / 4] = {words[i], words[i + 1], words[i + 2],
                                                      words[i + 3]};
        }
    }
}
