"""Rotary: tables, and how caches turn by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import DTYPES

import cufa


def turned(x: np.ndarray, first: int, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """Turn (b, h, n, d) in float64, as complex numbers; the first token is at position `first`."""
    x = x.astype(np.float64)
    dim = 2 * angles.shape[1]
    pairs = x[..., :dim].reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    pairs = pairs if interleaved else pairs.swapaxes(-1, -2)
    numbers = pairs[..., 0] + 1j * pairs[..., 1]
    numbers = numbers * np.exp(1j * angles[first : first + x.shape[2]])
    pairs = np.stack([numbers.real, numbers.imag], -1)
    pairs = pairs if interleaved else pairs.swapaxes(-1, -2)
    return np.concatenate([pairs.reshape(*x.shape[:-1], dim), x[..., dim:]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "head_dim"), [(8, 8), (6, 11), (2, 64), (64, 64)])
def test_keys_and_queries_are_turned(
    rng: np.random.Generator, dim: int, head_dim: int, interleaved: bool
) -> None:
    frequencies = rng.random(dim // 2)
    rotary = cufa.Rotary.of_frequencies(frequencies, 50, interleaved=interleaved)
    cache = cufa.KVCache(2, 3, 50, head_dim, head_dim_v=5, dtype="float32", rotary=rotary)
    angles = np.arange(50)[:, None] * frequencies
    begin = 0
    for n in (7, 1, 4):
        k = rng.standard_normal((2, 3, n, head_dim), np.float32)
        v = rng.standard_normal((2, 3, n, 5), np.float32)
        q = rng.standard_normal((2, 6, n, head_dim), np.float32)
        given = q.copy()
        got = cache.append(k, v, q=q)
        np.testing.assert_array_equal(q, given)
        np.testing.assert_allclose(got, turned(q, begin, angles, interleaved), atol=1e-5)
        keys, values = (x[:, :, begin : begin + n] for x in cache.layer())
        np.testing.assert_allclose(keys, turned(k, begin, angles, interleaved), atol=1e-5)
        np.testing.assert_array_equal(values, v)
        begin += n


def test_theta_factors_and_magnitude() -> None:
    factors = np.array([1.0, 2, 4])
    rotary = cufa.Rotary.of_theta(100.0, 6, 1000, factors=factors, magnitude=0.5)
    angles = np.arange(1000)[:, None] * 100.0 ** -(np.arange(3) / 3) / factors
    np.testing.assert_array_equal(rotary.cos, (0.5 * np.cos(angles)).astype(np.float32))
    np.testing.assert_array_equal(rotary.sin, (0.5 * np.sin(angles)).astype(np.float32))
    assert (rotary.dim, rotary.positions) == (6, 1000)


def test_each_layer_may_have_its_own(rng: np.random.Generator) -> None:
    rotaries = [cufa.Rotary.of_theta(theta, 8, 20) for theta in (10.0, 1000.0)]
    both = cufa.KVCache(2, 3, 20, 8, dtype="float32", layers=2, rotary=rotaries)
    both.extend(5)
    k, v, q = (rng.standard_normal((2, 3, 5, 8)).astype(np.float32) for _ in range(3))
    for layer, rotary in enumerate(rotaries):
        alone = cufa.KVCache(2, 3, 20, 8, dtype="float32", rotary=rotary)
        expected = alone.append(k, v, q=q)
        np.testing.assert_array_equal(both.write(k, v, q=q, layer=layer), expected)
        np.testing.assert_array_equal(both.layer(layer)[0], alone.layer()[0])
    with pytest.raises(ValueError, match="rotary has 2 embeddings, but there are 3 layers"):
        cufa.KVCache(2, 3, 20, 8, dtype="float32", layers=3, rotary=rotaries)


def test_without_a_rotary_queries_pass(rng: np.random.Generator) -> None:
    cache = cufa.KVCache(1, 1, 4, 8, dtype="float32")
    q = rng.standard_normal((1, 2, 1, 8), np.float32)
    assert cache.append(q[:, :1], q[:, :1], q=q) is q
    assert cache.append(q[:, :1], q[:, :1]) is None


TABLE = np.zeros((10, 4), np.float32)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cos": [1.0]}, TypeError, "cos must be a NumPy or a CuPy array"),
    ({"cos": TABLE[0]}, ValueError, r"cos has shape \(4,\)"),
    ({"sin": TABLE[1:]}, ValueError, r"sin has shape \(9, 4\)"),
    ({"interleaved": 1}, TypeError, "interleaved must be True or False"),
    ({"cos": TABLE.astype(complex)}, TypeError, "cos has dtype complex128: real numbers"),
    ({"sin": TABLE.astype(str)}, TypeError, "sin has dtype str[0-9]*: real numbers"),
    ({"sin": TABLE.astype(object)}, TypeError, "sin has dtype object: real numbers"),
    ({"sin": TABLE > 0}, TypeError, "sin has dtype bool: real numbers"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_tables(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cufa.Rotary(**{"cos": TABLE, "sin": TABLE, **change})


BAD_THETA: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"theta": "10"}, TypeError, "theta must be a real number, not str"),
    ({"theta": 0}, ValueError, "theta must be more than 0"),
    ({"theta": float("nan")}, ValueError, "theta must be finite"),
    ({"theta": 10**400}, ValueError, "theta must be finite"),
    ({"rotary_dim": 5}, ValueError, "rotary_dim must be even"),
    ({"rotary_dim": 0}, ValueError, "rotary_dim must be 1 to"),
    ({"rotary_dim": 8.0}, TypeError, "rotary_dim must be an integer"),
    ({"positions": 0}, ValueError, "positions must be 1 to"),
    ({"positions": 2.0}, TypeError, "positions must be an integer"),
    ({"factors": np.ones(3)}, ValueError, r"factors has shape \(3,\): a number or \(4,\)"),
    ({"factors": 0.0}, ValueError, "factors must not be 0"),
    ({"factors": "2"}, TypeError, "factors has dtype str"),
    ({"magnitude": "2"}, TypeError, "magnitude must be a real number"),
    ({"magnitude": np.inf}, ValueError, "magnitude must be finite"),
    ({"magnitude": 1e39}, ValueError, "magnitude 1e.39 give cosines and sines that are no finite"),
    ({"factors": 1e-308}, ValueError, "frequencies up to .* give cosines and sines that are no"),
    ({"interleaved": 0}, TypeError, "interleaved must be True or False"),
    ({"xp": "numpy"}, TypeError, "xp must be the module numpy or cupy"),
    ({"xp": None}, TypeError, "xp must be the module numpy or cupy"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_THETA)
def test_bad_thetas(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cufa.Rotary.of_theta(**{"theta": 10.0, "rotary_dim": 8, "positions": 10, **change})


@pytest.mark.parametrize(
    ("frequencies", "error", "message"),
    [
        (np.ones((2, 2)), ValueError, r"frequencies has shape \(2, 2\)"),
        (1.0, ValueError, r"frequencies has shape \(\)"),
        ([], ValueError, r"frequencies has shape \(0,\)"),
        ([1, [2]], TypeError, "frequencies must be a NumPy array or a number, not list"),
        (np.ones(2, complex), TypeError, "frequencies has dtype complex128"),
        ([np.nan], ValueError, "frequencies must be finite"),
        (np.ma.masked_equal([1.0, 2.0], 1.0), TypeError, "frequencies is a masked array"),
    ],
)
def test_bad_frequencies(frequencies: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cufa.Rotary.of_frequencies(frequencies, 10)


def test_tables_of_other_kinds_become_float32() -> None:
    for dtype in ("float16", "float64", "int64", "bfloat16"):
        table = TABLE.astype(DTYPES.get(dtype, dtype))
        assert cufa.Rotary(table, table).sin.dtype == np.float32


def test_bad_dims() -> None:
    rotary = cufa.Rotary(TABLE, TABLE)
    with pytest.raises(ValueError, match="rotary turns 8 elements, but head_dim is 6"):
        cufa.KVCache(1, 1, 10, 6, dtype="float32", rotary=rotary)
    with pytest.raises(ValueError, match="rotary has 10 positions, but sequences may have 11"):
        cufa.KVCache(1, 1, 11, 8, dtype="float32", rotary=rotary)
    with pytest.raises(TypeError, match=r"rotary must be a cufa\.Rotary"):
        cufa.KVCache(1, 1, 10, 8, dtype="float32", rotary=TABLE)  # type: ignore[arg-type]
