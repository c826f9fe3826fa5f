// The words of an expression that adds up gradients of arrays.
#pragma once
#include "array_sums.cuh"
#include "expression.cuh"

namespace numpy {

// The number of an element of an array, axis by axis; indices as in `Array::at`.
template <class T, int RANK, class... Indices>
__device__ long long number(const Array<T, RANK>& array, Indices... indices) {
    static_assert(sizeof...(Indices) == RANK, "an index an axis");
    long long found = 0;
    int axis = 0;
    ((found = found * array.lengths[axis] + place(indices, array.lengths[axis]), ++axis), ...);
    return found;
}
template <class T>
__device__ long long number(const Array<T, 0>& array) {
    return 0;
}

}  // namespace numpy
