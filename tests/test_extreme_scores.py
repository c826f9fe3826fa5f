"""Scores as users hide keys with: rows whose scores are all very low, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import random_inputs

import cufa

LOWEST = float(np.finfo(np.float32).min)
DTYPES = ("float16", "bfloat16", "float32")
ROW = 3  # whose scores are all low


def low(value: float) -> np.ndarray:
    bias = np.zeros((1, 1, 9, 600), np.float32)
    bias[:, :, ROW] = value
    return bias


def by_bias(value: float) -> dict[str, Any]:
    return {"bias": low(value)}


def by_score_mod(value: float) -> dict[str, Any]:
    return {"score_mod": lambda s, b, h, i, j: np.where(i == ROW, value, s)}


def by_both(value: float) -> dict[str, Any]:
    half = np.float32(value / 2)
    return {
        "bias": low(value / 2),
        "score_mod": lambda s, b, h, i, j: s + np.where(i == 3, half, 0),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [-1e9, -1e30, LOWEST])
@pytest.mark.parametrize("way", [by_bias, by_score_mod, by_both])
def test_a_row_of_low_scores_is_the_mean(
    rng: np.random.Generator, way: Any, value: float, dtype: str
) -> None:
    """Products of q and k are lost in such scores, which are equal then."""
    q, k, v = random_inputs(rng, dtype, hq=2, sq=9, sk=600, d=16)
    plain, plain_lse = cufa.attention(q, k, v, return_lse=True)
    out, lse = cufa.attention(q, k, v, return_lse=True, **way(value))
    others = np.arange(9) != ROW
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}[dtype]
    mean = v.astype(np.float64).mean(axis=2)
    np.testing.assert_allclose(out[:, :, ROW].astype(np.float64), mean, 0, tolerance)
    np.testing.assert_allclose(lse[:, :, ROW], value + np.log(600), 1e-6)
    np.testing.assert_allclose(
        out[:, :, others].astype(np.float64), plain[:, :, others].astype(np.float64), 0, tolerance
    )
    np.testing.assert_allclose(lse[:, :, others], plain_lse[:, :, others], 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [by_bias, by_score_mod, by_both])
def test_a_row_of_infinitely_low_scores_is_zero(
    rng: np.random.Generator, way: Any, dtype: str
) -> None:
    q, k, v = random_inputs(rng, dtype, hq=2, sq=9, sk=600, d=16)
    out, lse = cufa.attention(q, k, v, return_lse=True, **way(-np.inf))
    assert not out[:, :, ROW].any()
    assert (lse[:, :, ROW] == -np.inf).all()
    others = np.arange(9) != ROW
    assert np.isfinite(lse[:, :, others]).all()
    assert out[:, :, others].astype(np.float32).any(axis=-1).all()
