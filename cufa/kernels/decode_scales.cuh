// The scales of K and V of 8 bits: those of K are factors of scores, those of V of weights.
#pragma once
#include "ptx.cuh"

// The scales of the columns of S that a lane holds; `scales` is where its first ones are in shared
// memory.
template <int NT>
struct ColumnScales {
    float2 of[NT];

    __device__ explicit ColumnScales(uint32_t scales) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) of[nt] = lds_2(scales + nt * 32);
    }
    __device__ void times(float x) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) of[nt].x *= x, of[nt].y *= x;
    }
    __device__ float largest() const {  // of this lane
        float most = 0.f;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) most = fmaxf(most, fmaxf(fabsf(of[nt].x), fabsf(of[nt].y)));
        return most;
    }
    template <int MT>
    __device__ void scale(float (&rS)[MT][NT][4]) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int i = 0; i < NT * 4; ++i)
                rS[mt][i / 4][i % 4] *= i % 2 ? of[i / 4].y : of[i / 4].x;
    }
};

template <int MT, int NT>
__device__ void scale_columns(float (&rS)[MT][NT][4], uint32_t scales) {
    ColumnScales<NT>(scales).scale(rS);
}

// Brings the scales of V into P. Their products must fit float16, so the scales, and with them O,
// are in a unit that grows with the largest scale so far. Without scales there is nothing to do.
template <bool SCALED>
struct ValueScales {
    template <int MT, int OT>
    __device__ void conclude(float (&rO)[MT][OT][4]) const {}
};
template <>
struct ValueScales<true> {
    // The largest scale is less than this in the unit, a power of two: P goes up to 2^8, and the
    // more of 2^16 is used, the more is left of keys with small scales.
    static constexpr float MOST = 0x1p7f;

    float per_unit = 0x1p126f;  // a power of two

    template <int MT, int NT, int OT>
    __device__ void scale(float (&rP)[MT][NT][4], float (&rO)[MT][OT][4], uint32_t scales) {
        ColumnScales<NT> columns(scales);
        columns.times(per_unit);
        if (__any_sync(0xffffffff, columns.largest() >= MOST)) {
            columns = ColumnScales<NT>(scales);
            const float before = inverse(per_unit), most = lanes_max<4>(columns.largest());
            per_unit =
                fmaxf(inverse(__uint_as_float(__float_as_uint(most) & 0x7f800000)), 0x1p-126f) *
                (MOST / 2);
            multiply(rO, per_unit * before);
            columns.times(per_unit);
        }
        columns.scale(rP);
    }
    template <int MT, int OT>
    __device__ void conclude(float (&rO)[MT][OT][4]) const {
        multiply(rO, inverse(per_unit));
    }

 private:
    static __device__ float inverse(float power) {  // of a power of two
        return __uint_as_float(0x7f000000 - __float_as_uint(power));
    }
    template <int MT, int OT>
    static __device__ void multiply(float (&rO)[MT][OT][4], float x) {
#pragma unroll
        for (int i = 0; i < MT * OT * 4; ++i) rO[i / 4 / OT][i / 4 % OT][i % 4] *= x;
    }
};
