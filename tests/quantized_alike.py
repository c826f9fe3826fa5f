"""Comparisons of what `cufa.quantize` makes on a GPU and on the CPU."""

from __future__ import annotations

import dataclasses

import numpy as np

import cufa
from cufa.quantized.e4m3 import E4M3


def ordinals(values: np.ndarray) -> np.ndarray:
    """Return the number of each value of e4m3 in order; that of 0 is 0."""
    bits = values.view(np.uint8).astype(int)
    return np.where(bits < 128, bits, 128 - bits)


def assert_alike(found: cufa.Quantized, expected: cufa.Quantized) -> None:
    """Assert that both hold the same: bit by bit without a transform.

    Its sums are rounded in another order on a GPU. So scales may differ in the last bits, and a
    number that is between two of e4m3 may become either.
    """
    scales, values = found.scales.get(), found.values.get().view(E4M3)
    if expected.hadamard:
        np.testing.assert_allclose(scales, expected.scales, rtol=2**-20)
        numbers, others = values.astype(np.float32), expected.values.astype(np.float32)
        is_nan = np.isnan(numbers)
        np.testing.assert_array_equal(is_nan, np.isnan(others))
        steps = np.where(is_nan, 0, np.abs(ordinals(values) - ordinals(expected.values)))
        assert steps.max(initial=0) <= 1
        assert np.count_nonzero(steps) <= 2 + values.size / 2**15
    else:
        np.testing.assert_array_equal(scales, expected.scales)
        np.testing.assert_array_equal(values.view(np.uint8), expected.values.view(np.uint8))


def assert_dequantized_alike(found: cufa.Quantized, expected: cufa.Quantized) -> None:
    """Assert that both give the same numbers for what `found` holds."""
    values, scales = found.values.get().view(E4M3), found.scales.get()
    on_cpu = dataclasses.replace(expected, values=values, scales=scales).dequantize()
    there = found.dequantize()
    assert there.dtype == on_cpu.dtype
    # NumPy does not know NaN of bfloat16.
    np.testing.assert_array_equal(there.get().astype(np.float32), on_cpu.astype(np.float32))
