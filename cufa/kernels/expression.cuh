// The words of a caller's own expression, see cufa/features/expression: NumPy's functions on bool,
// int, long long and float, and arrays. Where C++ and NumPy differ, it is as in NumPy: integers
// wrap around, quotients are rounded down, what is divided by zero is 0 or, of floats, not finite,
// and the larger and the smaller one of a number and NaN is NaN.
#pragma once
#include "ptx.cuh"
#include "ptx_convert.cuh"
#include "score.cuh"

namespace numpy {

// Integers of a number of bits that wrap around.
template <class T>
struct Wraps {
    using type = T;
};
template <>
struct Wraps<int> {
    using type = uint32_t;
};
template <>
struct Wraps<long long> {
    using type = uint64_t;
};
template <class T>
using Wrapping = typename Wraps<T>::type;

// --- arithmetic ---

template <class T>
__device__ T add(T a, T b) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
}
template <class T>
__device__ T subtract(T a, T b) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
}
template <class T>
__device__ T multiply(T a, T b) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
}
template <class T>
__device__ T square(T a) {
    return multiply(a, a);
}
template <class T>
__device__ T negative(T a) {
    return subtract(T(0), a);
}
__device__ inline float negative(float a) { return -a; }
template <class T>
__device__ T absolute(T a) {
    return a < 0 ? negative(a) : a;
}
__device__ inline float absolute(float a) { return fabsf(a); }
__device__ inline float fabs(float a) { return fabsf(a); }
template <class T>
__device__ T sign(T a) {
    return a > 0 ? T(1) : a < 0 ? T(-1) : a;
}

// The remainder has the sign of the divisor in `remainder`, and of the dividend in `fmod`.
template <class T>
__device__ T floor_divide(T a, T b) {
    if (b == 0) return 0;
    if (b == -1) return negative(a);
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
template <class T>
__device__ T fmod(T a, T b) {
    return b == 0 || b == -1 ? 0 : a % b;
}
template <class T>
__device__ T remainder(T a, T b) {
    const T rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ inline float divide(float a, float b) { return a / b; }
__device__ inline float fmod(float a, float b) { return fmodf(a, b); }
__device__ inline float remainder(float a, float b) {
    const float rest = fmodf(a, b);
    if (rest == 0.f) return copysignf(0.f, b);
    return (rest < 0.f) != (b < 0.f) ? rest + b : rest;
}
__device__ inline float floor_divide(float a, float b) {
    if (b == 0.f) return a / b;
    const float rest = fmodf(a, b);
    const float quotient = (a - rest) / b - (rest != 0.f && (rest < 0.f) != (b < 0.f));
    const float rounded = floorf(quotient);
    return quotient == 0.f             ? copysignf(0.f, a / b)
           : quotient - rounded > 0.5f ? rounded + 1.f
                                       : rounded;
}

template <class T>
__device__ T maximum(T a, T b) {
    return a > b || a != a ? a : b;
}
template <class T>
__device__ T minimum(T a, T b) {
    return a < b || a != a ? a : b;
}
template <class T>
__device__ T fmax(T a, T b) {
    return a > b || b != b ? a : b;
}
template <class T>
__device__ T fmin(T a, T b) {
    return a < b || b != b ? a : b;
}

// --- functions of floats ---

__device__ inline float power(float a, float b) { return powf(a, b); }
__device__ inline float sqrt(float a) { return sqrtf(a); }
__device__ inline float exp(float a) { return expf(a); }
__device__ inline float exp2(float a) { return exp2f(a); }
__device__ inline float expm1(float a) { return expm1f(a); }
__device__ inline float log(float a) { return logf(a); }
__device__ inline float log2(float a) { return log2f(a); }
__device__ inline float log10(float a) { return log10f(a); }
__device__ inline float log1p(float a) { return log1pf(a); }
__device__ inline float sin(float a) { return sinf(a); }
__device__ inline float cos(float a) { return cosf(a); }
__device__ inline float tan(float a) { return tanf(a); }
__device__ inline float arcsin(float a) { return asinf(a); }
__device__ inline float arccos(float a) { return acosf(a); }
__device__ inline float arctan(float a) { return atanf(a); }
__device__ inline float arctan2(float a, float b) { return atan2f(a, b); }
__device__ inline float sinh(float a) { return sinhf(a); }
__device__ inline float cosh(float a) { return coshf(a); }
__device__ inline float tanh(float a) { return tanhf(a); }
__device__ inline float hypot(float a, float b) { return hypotf(a, b); }
__device__ inline float copysign(float a, float b) { return copysignf(a, b); }
__device__ inline float rint(float a) { return rintf(a); }
__device__ inline float floor(float a) { return floorf(a); }
__device__ inline float ceil(float a) { return ceilf(a); }
__device__ inline float trunc(float a) { return truncf(a); }
__device__ inline bool isnan(float a) { return a != a; }
__device__ inline bool isinf(float a) { return fabsf(a) == INF; }
__device__ inline bool isfinite(float a) { return fabsf(a) < INF; }

// --- comparisons, logic and bits ---

template <class T>
__device__ bool less(T a, T b) {
    return a < b;
}
template <class T>
__device__ bool less_equal(T a, T b) {
    return a <= b;
}
template <class T>
__device__ bool greater(T a, T b) {
    return a > b;
}
template <class T>
__device__ bool greater_equal(T a, T b) {
    return a >= b;
}
template <class T>
__device__ bool equal(T a, T b) {
    return a == b;
}
template <class T>
__device__ bool not_equal(T a, T b) {
    return a != b;
}
__device__ inline bool logical_and(bool a, bool b) { return a && b; }
__device__ inline bool logical_or(bool a, bool b) { return a || b; }
__device__ inline bool logical_xor(bool a, bool b) { return a != b; }
__device__ inline bool logical_not(bool a) { return !a; }
template <class T>
__device__ T bitwise_and(T a, T b) {
    return static_cast<T>(a & b);
}
template <class T>
__device__ T bitwise_or(T a, T b) {
    return static_cast<T>(a | b);
}
template <class T>
__device__ T bitwise_xor(T a, T b) {
    return static_cast<T>(a ^ b);
}
template <class T>
__device__ T invert(T a) {
    return ~a;
}
// A shift by all bits, or more, leaves nothing but the sign.
template <class T>
__device__ T left_shift(T a, T b) {
    return b >= 0 && b < static_cast<T>(8 * sizeof(T))
               ? static_cast<T>(static_cast<Wrapping<T>>(a) << b)
               : 0;
}
template <class T>
__device__ T right_shift(T a, T b) {
    return b >= 0 && b < static_cast<T>(8 * sizeof(T)) ? a >> b : -(a < 0);
}

// --- arrays ---

// The place that an index means: a negative one counts from the end, and one beyond the array means
// the nearest; `length` > 0.
__device__ inline uint32_t place(uint32_t index, int length) {
    return min(index, static_cast<uint32_t>(length - 1));
}
template <class I>
__device__ uint32_t place(I index, int length) {
    if (index < 0) index += length;
    return static_cast<uint32_t>(max(min(index, static_cast<I>(length - 1)), static_cast<I>(0)));
}

// An array of any lengths and strides, in bytes: an address then takes two multiply-adds. Nothing
// beyond the array is read.
template <class T, int RANK>
struct Array {
    const T* data;
    long long strides[RANK];
    int lengths[RANK];

    template <class... Indices>
    __device__ T at(Indices... indices) const {
        static_assert(sizeof...(Indices) == RANK, "an index an axis");
        const char* found = reinterpret_cast<const char*>(data);
        int axis = 0;
        ((found += place(indices, lengths[axis]) * strides[axis], ++axis), ...);
        return *reinterpret_cast<const T*>(found);
    }
};
template <class T>
struct Array<T, 0> {
    const T* data;
    __device__ T at() const { return *data; }
};

// An element in the type that expressions compute in.
template <class To, class T>
__device__ To read(T x) {
    return static_cast<To>(x);
}
template <>
__device__ inline float read<float>(float16 x) {
    return to_float(x);
}
template <>
__device__ inline float read<float>(bfloat16 x) {
    return to_float(x);
}

}  // namespace numpy
