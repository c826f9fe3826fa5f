"""Rotary: tables, and how caches turn by them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, to_host

import cufa
from cufa.api.options import Layout


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_apply_is_what_a_cache_does(
    xp: ModuleType, rng: np.random.Generator, layout: Layout, interleaved: bool, dtype: str
) -> None:
    """Bit by bit, at the positions that a cache would have them at."""
    rotary = cufa.Rotary.of_theta(100.0, 8, 50, interleaved=interleaved, xp=xp)
    for shape in ((2, 3, 7, 16), (1, 4, 1, 11), (3, 2, 1, 8)):
        b, h, s, d = shape
        cache = cufa.KVCache(b, h, 50, d, dtype=dtype, layout=layout, rotary=rotary, xp=xp)
        x = rng.standard_normal((b, h, 11, d), np.float32).astype(DTYPES[dtype])
        x = xp.asarray(x if layout == "bhsd" else x.swapaxes(1, 2))
        cache.append(x, x)
        x = xp.asarray(rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]))
        x = x if layout == "bhsd" else xp.ascontiguousarray(x.swapaxes(1, 2))
        expected = to_host(cache.append(x, x, q=x))
        given = to_host(x).copy()
        for positions in (
            *(11, np.int64(11), 11 + np.arange(s), np.arange(11, 11 + s, dtype=np.uint8)),
            np.tile(11 + np.arange(s), (b, 1)),
            np.repeat(np.tile(11 + np.arange(s), (b, 1)), 2, axis=1)[:, ::2],
            *(xp.asarray(11 + np.arange(s)), xp.asarray(np.tile(11 + np.arange(s), (b, 1)))),
        ):
            got = rotary.apply(x, positions, layout=layout)
            assert (got.dtype, got.shape, got.flags.c_contiguous) == (x.dtype, x.shape, True)
            np.testing.assert_array_equal(to_host(got), expected)
        np.testing.assert_array_equal(to_host(x), given)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_apply_at_any_positions(xp: ModuleType, rng: np.random.Generator, layout: Layout) -> None:
    frequencies = rng.random(3)
    rotary = cufa.Rotary.of_frequencies(frequencies, 50, xp=xp)
    angles = np.arange(50)[:, None] * frequencies
    x = rng.standard_normal((2, 3, 5, 11), np.float32)
    positions = rng.integers(0, 50, (2, 5))
    expected = np.empty_like(x)
    for i in range(2):
        for j in range(5):
            one = x[i : i + 1, :, j : j + 1]
            expected[i : i + 1, :, j : j + 1] = turned(one, positions[i, j], angles, False)
    strided = xp.asarray(np.repeat(x, 2, axis=-1))[..., ::2]
    for array in (xp.asarray(x), strided, xp.asarray(x[::-1].copy())[::-1]):
        swapped = array if layout == "bhsd" else array.swapaxes(1, 2)
        for places in (positions, xp.asarray(positions)):
            got = to_host(rotary.apply(swapped, places, layout=layout))
            got = got if layout == "bhsd" else got.swapaxes(1, 2)
            np.testing.assert_allclose(got, expected, atol=1e-5)


def test_apply_without_all_axes(xp: ModuleType, rng: np.random.Generator) -> None:
    rotary = cufa.Rotary.of_theta(100.0, 8, 50, xp=xp)
    x = xp.asarray(rng.standard_normal((2, 5, 8), np.float32))
    whole = to_host(rotary.apply(x[:, None], 3))
    np.testing.assert_array_equal(to_host(rotary.apply(x, 3)), whole[:, 0])
    np.testing.assert_array_equal(to_host(rotary.apply(x[1], 3 + np.arange(5))), whole[1, 0])
    assert rotary.apply(x[:, :0], 50).shape == (2, 0, 8)
    assert rotary.apply(x[:0], np.zeros((0, 5), int)).shape == (0, 5, 8)
    assert repr(rotary) == f"Rotary of 50 positions, 8 elements in halves, {xp.__name__}"
    other = cufa.Rotary(rotary.cos, rotary.sin, interleaved=True)
    assert "interleaved" in repr(other)


def test_apply_of_what_does_not_fit(xp: ModuleType) -> None:
    rotary = cufa.Rotary.of_theta(100.0, 8, 50, xp=xp)
    x = xp.ones((2, 3, 5, 16), np.float32)
    for call, error, message in (
        ({"x": x.tolist()}, TypeError, "x must be a NumPy or a CuPy array"),
        ({"x": x.astype(np.float64)}, TypeError, "x has dtype float64: one of float16"),
        ({"x": x[0, 0, 0]}, ValueError, "x has shape .* 2 to 4 axes"),
        ({"x": x[..., :6]}, ValueError, "the rotary turns 8 elements, but head_dim is 6"),
        ({"layout": "sbhd"}, ValueError, "layout must be"),
        ({"positions": -1}, ValueError, "positions is -1: .* has positions 0 to 49"),
        ({"positions": 46}, ValueError, "positions is 46: the last of 5 tokens .* position 50"),
        ({"positions": True}, TypeError, "positions must be a NumPy or a CuPy array, not bool"),
        ({"positions": 1.0}, TypeError, "positions must be a NumPy or a CuPy array, not float"),
        ({"positions": [0, 1, 2, 3, 4]}, TypeError, "positions must be .*, not list"),
        ({"positions": np.arange(4)}, ValueError, r"positions has shape \(4,\), but \(5,\)"),
        ({"positions": np.ones((1, 5), int)}, ValueError, r"\(1, 5\), but \(2, 5\) is needed"),
        ({"positions": np.arange(5.0)}, TypeError, "positions has dtype float64: integers"),
        ({"positions": np.arange(46, 51)}, ValueError, r"positions\[4\] is 50: the rotary has"),
        ({"positions": np.arange(-1, 4)}, ValueError, r"positions\[0\] is -1"),
    ):
        arguments: dict[str, Any] = {"x": x, "positions": 0, **call}
        with pytest.raises(error, match=message):
            rotary.apply(arguments.pop("x"), arguments.pop("positions"), **arguments)


@pytest.mark.gpu
def test_apply_cannot_be_captured(cupy: Any, stream: Any) -> None:
    rotary = cufa.Rotary.of_theta(100.0, 8, 50, xp=cupy)
    x = cupy.ones((2, 3, 5, 16), np.float32)
    rotary.apply(x, 0)
    stream.begin_capture()
    with pytest.raises(RuntimeError, match=r"Rotary\.apply cannot be captured"):
        rotary.apply(x, 0)
    stream.end_capture()


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
