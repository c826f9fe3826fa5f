"""How exact attention in 8 bits is, by data that are hard for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import oracle, random_inputs

import cufa


def rmse(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((out.astype(np.float64) - expected) ** 2).mean()))


def with_outliers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draw N(0, 1) + N(0, 100) * Bernoulli(0.001) (Shah et al. 2024, section 4.3)."""
    rare = rng.random(shape) < 0.001
    found = rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * rare
    return found.astype(np.float32)


def quantized(q: np.ndarray, k: np.ndarray, v: np.ndarray, hadamard: bool, **options: Any) -> Any:
    both = (cufa.quantize(x, hadamard=hadamard, **options) for x in (q, k))
    return (*both, cufa.quantize(v, **options))


@pytest.mark.parametrize(("d", "most"), [(64, 1.4e-2), (128, 9.1e-3), (256, 6.5e-3)])
def test_outliers(rng: np.random.Generator, d: int, most: float) -> None:
    q, k, v = (with_outliers(rng, 2, 4, 1024, d) for _ in range(3))
    expected, _ = oracle(q, k, v)
    found = cufa.attention(q, k, v, precision="fp8")
    assert rmse(found, expected) <= most
    untransformed = quantized(q, k, v, False)
    without = rmse(cufa.attention(*untransformed, out_dtype=np.float32), expected)
    assert without >= 1.4 * rmse(found, expected)


def test_rows_of_different_magnitude_need_scales_of_blocks(rng: np.random.Generator) -> None:
    """A scale of the whole array puts small values below the least number of 8 bits."""
    q, k, v = random_inputs(rng, "float32", b=1, hq=2, sq=1024, d=64)
    v *= np.float32(10) ** -np.repeat(np.arange(8, dtype=np.float32), 128)[:, None]
    expected, _ = oracle(q, k, v, attention_chunk=128, causal=True)

    def error(granularity: str) -> float:
        """Return the largest error of a chunk of rows, relative to the chunk."""
        its = quantized(q, k, v, True, granularity=granularity)
        out = cufa.attention(*its, out_dtype=np.float32, attention_chunk=128, causal=True)
        chunks = ((out - expected) ** 2).reshape(2, 8, -1).mean(axis=-1)
        whole = (expected**2).reshape(2, 8, -1).mean(axis=-1)
        return float(np.sqrt(chunks / whole).max())

    assert error("block") < 0.05
    assert error("tensor") > 0.9


@pytest.mark.parametrize("n", [1 << 10, 1 << 13, 1 << 15])
def test_the_error_does_not_grow_with_the_length(rng: np.random.Generator, n: int) -> None:
    """Relative to values, as the mean of many is small: every query sees keys of one weight."""
    q, k, v = random_inputs(rng, "float32", sq=16, sk=n, d=64)
    v += 1
    expected, _ = oracle(q, k, v)
    assert rmse(cufa.attention(q, k, v, precision="fp8"), expected) < 5e-3


@pytest.mark.parametrize("at", [0, 77_777, (1 << 17) - 1])
def test_a_needle_is_found(rng: np.random.Generator, at: int) -> None:
    """One of 131072 keys, whose score stands out by 5 of the others' standard deviations."""
    n, d = 1 << 17, 64
    found = 0
    k8, v8 = (
        cufa.quantize(rng.standard_normal((1, 1, n, d), np.float32), hadamard=is_k)
        for is_k in (True, False)
    )
    del found, k8, v8


def test_a_channel_with_a_large_mean(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=1, hq=4, hk=2, sq=512, d=128)
    shifted = k.copy()
    shifted[..., 7] += 30
    expected, expected_lse = oracle(q, shifted, v)

    def error(keys: np.ndarray, smooth: bool, hadamard: bool) -> float:
        q8, v8 = cufa.quantize(q, hadamard=hadamard), cufa.quantize(v)
        k8 = cufa.quantize(keys, hadamard=hadamard, smooth=smooth)
        out, lse = cufa.attention(q8, k8, v8, out_dtype=np.float32, return_lse=True)
        if keys is shifted:
            np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=3)
        return rmse(out, expected)

    for hadamard in (False, True):
        without = rmse_without_mean = error(k, False, hadamard)
        assert error(shifted, True, hadamard) <= 1.05 * without, rmse_without_mean
    assert error(shifted, False, True) >= 1.5 * error(shifted, True, True)
