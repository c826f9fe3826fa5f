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


def test_the_error_does_not_grow_with_the_length(rng: np.random.Generator) -> None:
    """Relative to the result, which is smaller the more values it is the mean of."""
    errors = []
    for n in (1 << 10, 1 << 13, 1 << 17):
        q, k, v = random_inputs(rng, "float32", sq=32, sk=n, d=64)
        expected, _ = oracle(q, k, v)
        found = cufa.attention(q, k, v, precision="fp8")
        errors.append(rmse(found, expected) / float(np.sqrt((expected**2).mean())))
    assert max(errors) <= 1.3 * errors[0]


def test_needles_are_found(rng: np.random.Generator) -> None:
    """Each of 200 queries has a key of its own, of 131072, whose score stands out by 5."""
    n, d, draws = 1 << 17, 64, 200
    q, k, v = random_inputs(rng, "float32", sq=draws, sk=n, d=d)
    at = rng.choice(n, draws, replace=False)
    k[0, 0, at] = 0
    others = (q[0, 0] @ k[0, 0].T).max(axis=-1, keepdims=True) / 8
    k[0, 0, at] = q[0, 0] * (others + 5) * 8 / (q[0, 0] ** 2).sum(axis=-1, keepdims=True)
    out = cufa.attention(q, k, v, precision="fp8")[0, 0]
    assert np.array_equal((out @ v[0, 0].T).argmax(axis=-1), at)


@pytest.mark.parametrize("hadamard", [False, True])
def test_a_channel_with_a_large_mean(rng: np.random.Generator, hadamard: bool) -> None:
    """Softmax does not depend on it, but it takes the bits of the others."""
    q, k, v = random_inputs(rng, "float32", b=1, hq=4, hk=2, sq=512, d=128)
    shifted = k.copy()
    shifted[..., 7] += 30
    q8, v8 = cufa.quantize(q, hadamard=hadamard), cufa.quantize(v)

    def error(keys: np.ndarray, smooth: bool) -> tuple[float, float]:
        k8 = cufa.quantize(keys, hadamard=hadamard, smooth=smooth)
        out, lse = cufa.attention(q8, k8, v8, out_dtype=np.float32, return_lse=True)
        expected, expected_lse = oracle(q8.dequantize(), keys, v)
        return rmse(out, expected), rmse(lse, expected_lse)

    without, with_mean, smoothed = error(k, False), error(shifted, False), error(shifted, True)
    assert smoothed[0] <= 1.02 * without[0]
    assert smoothed[1] <= 1.1 * without[1]
    assert with_mean[0] >= 1.5 * smoothed[0], with_mean
