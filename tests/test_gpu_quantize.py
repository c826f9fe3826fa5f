"""cufa.quantize on a GPU: the bits of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import DTYPES

import cufa

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 96, 100, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [{}, {"block": 16}, {"block": 512}, {"granularity": "head"}, {"granularity": "tensor"}],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_is_the_cpu_bit_by_bit(
    rng: np.random.Generator, cupy: Any, d: int, dtype: str, options: Any, transposed: bool
) -> None:
    x = rng.standard_normal((2, 3, 700, d), np.float32).astype(DTYPES[dtype])
    x[0, 1, 3, 4], x[1, 2, 600, 0] = np.nan, np.inf
    for hadamard in (False, True):
        its = {**options, "hadamard": hadamard, "transposed": transposed, "seed": 7}
        found, expected = cufa.quantize(cupy.asarray(x), **its), cufa.quantize(x, **its)
        np.testing.assert_array_equal(found.scales.get(), expected.scales)
        np.testing.assert_array_equal(found.values.get(), expected.values.view(np.uint8))
        again, there = expected.dequantize(), found.dequantize()
        assert again.dtype == there.dtype
        # NumPy does not know NaN of bfloat16.
        np.testing.assert_array_equal(there.get().astype(np.float32), again.astype(np.float32))


@pytest.mark.parametrize("d", [64, 100, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"block": 32}, {"granularity": "head"}], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_sequences_in_blocks_of_their_own(
    rng: np.random.Generator, cupy: Any, d: int, options: Any, transposed: bool
) -> None:
    x = rng.standard_normal((3000, 3, d), np.float32).astype(np.float16)
    offsets = np.array([0, 0, 7, 135, 135, 1300, 1301, 2990], np.int32)
    how = {**options, "layout": "thd", "transposed": transposed, "hadamard": not transposed}
    expected = cufa.quantize(x, cu_seqlens=offsets, **how)
    for given in (offsets, cupy.asarray(offsets)):
        found = cufa.quantize(cupy.asarray(x), cu_seqlens=given, **how)
        np.testing.assert_array_equal(found.scales.get(), expected.scales)
        np.testing.assert_array_equal(found.values.get(), expected.values.view(np.uint8))
        np.testing.assert_array_equal(found.dequantize().get(), expected.dequantize())
