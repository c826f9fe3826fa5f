"""Scores as users hide keys with: rows whose scores are all very low."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import KERNELS
from low_scores import VALUES, WAYS, assert_right
from reference import random_inputs, to_host

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


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_of_low_numbers(rng: np.random.Generator, dtype: str, way: Any) -> None:
    """On the CPU, in 2 to 4 axes, and of a prompt, of one query and of several sequences."""
    of_masks(rng, dtype, way, lambda x: x, {})


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_masks_of_low_numbers_on_the_gpu(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, way: Any
) -> None:
    of_masks(rng, dtype, way, cupy.asarray, {"kernel": kernel})


def of_masks(
    rng: np.random.Generator, dtype: str, way: Any, on: Any, options: dict[str, Any]
) -> None:
    """Compare `attention` and `attention_varlen` to what float32 arithmetic gives."""
    for value in VALUES:
        for sq, sk, d, causal in ((150, 150, 64, True), (40, 600, 128, False), (1, 300, 64, False)):
            arrays = random_inputs(rng, dtype, hq=2, hk=1, sq=sq, sk=sk, d=d)
            asked: dict[str, Any] = {"causal": causal, "return_lse": True, **options}
            asked |= way(value, (sq, sk), on)
            q, k, v = map(on, arrays)
            out, lse = map(to_host, cufa.attention(q, k, v, **asked))
            assert_right(out, lse, arrays, way, value, causal)

            a, b, c = arrays
            one = a[:, :1], b, c
            for given in ((a[0, :1], b[0], c[0]), (a[0, 0], b[0, 0], c[0, 0])):  # without heads
                q, k, v = map(on, given)
                out, lse = map(to_host, cufa.attention(q, k, v, **asked))
                assert out.ndim == given[0].ndim
                out, lse = out.reshape(1, 1, sq, d), lse.reshape(1, 1, sq)
                assert_right(out, lse, one, way, value, causal)

            q, k, v = (on(np.concatenate([x[0].swapaxes(0, 1)] * 2)) for x in arrays)
            cu_q, cu_k = (on(np.array([0, n, 2 * n], np.int32)) for n in (sq, sk))
            asked |= {"max_seqlen_q": sq, "max_seqlen_k": sk}
            out, lse = map(to_host, cufa.attention_varlen(q, k, v, cu_q, cu_k, **asked))
            for its in (slice(sq), slice(sq, None)):
                its_out, its_lse = out[its].swapaxes(0, 1)[None], lse[None, :, its]
                assert_right(its_out, its_lse, arrays, way, value, causal)
