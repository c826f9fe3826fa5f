"""append8.cu: new tokens into caches of 8 bits, its source on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import played_gpu
import pytest
from emulated import needs_compiler
from exhaustive import exhaustive
from reference import DTYPES
from test_append import on_gpu_rotary, some_tokens
from test_emulated import emulated, emulator  # noqa: F401

import cufa
from cufa.compiler import source
from cufa.cpu import append as cpu
from cufa.launch import append as launch
from cufa.problem.tokens import Tokens
from cufa.quantized.rows import KINDS, MEAN_TOKENS, numbers_of, quantized_rows

LARGEST = np.finfo(np.float32).max
runs = pytest.mark.usefixtures("emulated")


def in_8_bits(tokens: Tokens, kind: str, smooth: bool = False) -> Tokens:
    """Return the same tokens for a cache of bytes that stand for NaN, and of such scales."""
    changed: dict[str, Any] = {
        name: np.full(cache.shape, 0x7F, np.uint8).view(KINDS[kind].on_host)
        for name, cache in (("k_cache", tokens.k_cache), ("v_cache", tokens.v_cache))
    }
    if smooth:
        b, h, _, d = tokens.k.shape
        changed["k_mean"] = np.arange(b * h * d, dtype=np.float32).reshape(b, h, d) % 7
    for name in ("k_scale", "v_scale"):
        changed[name] = np.full(tokens.k_cache.shape[:3], np.nan, np.float32)
    return tokens._replace(**changed)


def assert_agrees(
    tokens: Tokens, put: Callable[[np.ndarray], Any] = played_gpu.on_gpu, stores: Any = None
) -> None:
    """Assert that the kernel writes what the CPU does, and nothing else.

    Bits are the same where nothing is turned; else a number may have been rounded the other way.
    """
    kind = next(k for k in KINDS.values() if k.on_host == tokens.k_cache.dtype)
    arrays = {n: x for n, x in tokens._asdict().items() if isinstance(x, np.ndarray)}
    there: dict[str, Any] = {}
    for name, array in arrays.items():
        given = name in ("k", "v", "q", "turned_q")
        bare = array.view(kind.on_device) if "cache" in name else array
        there[name] = (put if given else played_gpu.on_gpu)(bare)
    rotary = None if tokens.rotary is None else on_gpu_rotary(tokens.rotary)
    launch.append(tokens._replace(**{**there, "rotary": rotary}))
    copies: dict[str, Any] = {name: array.copy() for name, array in arrays.items()}
    here: Any = tokens._replace(**copies)
    cpu.append(here)
    for name in ("v_cache", "v_scale", "starts", "lengths", "k", "v"):
        expected, got = getattr(here, name), there[name].get()
        if "scale" not in name:
            expected, got = (np.ascontiguousarray(x).view(np.uint8) for x in (expected, got))
        np.testing.assert_array_equal(got, expected, err_msg=name)
    k, scale = there["k_cache"].get().view(kind.on_host), there["k_scale"].get()
    np.testing.assert_allclose(scale, here.k_scale, 1e-5)
    if tokens.k_mean is not None:
        np.testing.assert_allclose(there["k_mean"].get(), here.k_mean, 1e-5, 1e-5)
    elif tokens.rotary is None:
        np.testing.assert_array_equal(k.view(np.uint8), here.k_cache.view(np.uint8))
        return
    got, expected = numbers_of(k, scale, np), numbers_of(here.k_cache, here.k_scale, np)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    differs = ~np.isclose(got, expected, 1e-5, 1e-5) & ~np.isnan(expected)
    assert differs.mean() < 0.002
    steps = np.abs(expected) * 2**-3 + scale[..., None] * (1 if kind.is_integer else 2**-9)
    assert (np.abs(got - expected) <= steps)[differs].all()
    eps = {2: 8e-3, 4: 1e-6}[tokens.k.itemsize]
    if tokens.turned_q is None:
        return
    turned_q, q = (x.astype(np.float32) for x in (there["turned_q"].get(), here.turned_q))
    np.testing.assert_allclose(turned_q, q, eps, eps)


@needs_compiler
@runs
@exhaustive("others", one_in=7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [0, 1, 7, 16])
@pytest.mark.parametrize(
    ("d", "dv", "dim"),
    [(64, 64, 64), (64, 32, 32), (256, 128, 16), (40, 24, 22), (11, 3, 6), (131, 255, 130)],
)
def test_kernel_agrees_with_the_cpu(
    rng: np.random.Generator,
    d: int,
    dv: int,
    dim: int,
    page_size: int,
    interleaved: bool,
    dtype: str,
    kind: str,
) -> None:
    rotary = cufa.Rotary.of_theta(100.0, dim, 50, interleaved=interleaved)
    for seq in (1, 9):
        tokens = some_tokens(rng, dtype, seq=seq, d=d, dv=dv, rotary=rotary, page_size=page_size)
        assert_agrees(in_8_bits(tokens, kind))


@needs_compiler
@runs
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_cpu_where_nothing_is_turned(
    rng: np.random.Generator, kind: str
) -> None:
    for dtype, d, put in (
        ("bfloat16", 64, played_gpu.on_gpu),
        ("float32", 256, played_gpu.on_gpu),
        ("float16", 11, played_gpu.one_in),
        ("bfloat16", 48, lambda x: played_gpu.on_gpu(x.swapaxes(1, 2)).swapaxes(1, 2)),
    ):
        tokens = some_tokens(rng, dtype, seq=9, d=d, dv=d, rotary=None)
        tokens.k[...] *= np.exp2(rng.integers(-9, 9, tokens.k.shape)).astype(tokens.k.dtype)
        tokens.k[0, 1, 3] = 0
        tokens.v[0, 0, 8] = 0
        tokens.k[1, 0, 8, 2], tokens.v[1, 1, 8, 3], tokens.v[2, 0, 7, 1] = np.nan, np.inf, -np.inf
        assert_agrees(in_8_bits(tokens, kind), put)


@needs_compiler
@runs
@pytest.mark.parametrize("kind", KINDS)
def test_means_are_taken_off(rng: np.random.Generator, kind: str) -> None:
    """Those of sequences that begin; others keep theirs, and one that takes no token as well."""
    for dtype, d, dim, interleaved in (
        ("bfloat16", 64, 0, False),
        ("float16", 128, 64, False),
        ("float32", 256, 256, True),
        ("bfloat16", 11, 6, True),
    ):
        for seq in (1, 40):
            turns: Any = {"interleaved": interleaved}
            rotary = cufa.Rotary.of_theta(1e4, dim, 50, **turns) if dim else None
            tokens = some_tokens(rng, dtype, seq=seq, d=d, dv=d, rotary=rotary)
            tokens.k[...] += np.array(3 * rng.standard_normal((1, 2, 1, d)), tokens.k.dtype)
            tokens.k[1, 0, -1, 3], tokens.k[0, 1, -1, 2] = np.nan, np.inf
            tokens.starts[3], tokens.lengths[3] = 0, 0
            assert_agrees(in_8_bits(tokens, kind, smooth=True))


@needs_compiler
@runs
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_of_float32(rng: np.random.Generator, kind: str, smooth: bool) -> None:
    tokens = some_tokens(rng, "float32", seq=1, d=64, dv=64, rotary=None)
    tokens.starts[:], tokens.lengths[:] = 0, 1
    tokens.k[...], tokens.v[...] = LARGEST, -LARGEST
    assert_agrees(in_8_bits(tokens, kind, smooth))


@needs_compiler
@runs
@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_between_two_of_8_bits(kind: str) -> None:
    """Ties go to even, numbers below the least normal one as well."""
    rows = np.zeros((1, 1, 50, 256), np.float32)
    each = np.arange(256, dtype=np.uint8).view(KINDS[kind].on_host).astype(np.float32)
    finite = np.sort(each[np.isfinite(each)])
    tie = (finite[1:] + finite[:-1]) / 2
    for i, x in enumerate((tie, np.nextafter(tie, np.float32(500)), np.nextafter(tie, -tie))):
        rows[0, 0, i, : x.size], rows[0, 0, i, -1] = x, KINDS[kind].largest
    tokens = some_tokens(np.random.default_rng(0), "float32", seq=50, d=256, dv=256, rotary=None)
    tokens = tokens._replace(k=np.broadcast_to(rows, tokens.k.shape).copy(), v=tokens.v)
    tokens.starts[:], tokens.lengths[:] = 0, 50
    assert_agrees(in_8_bits(tokens, kind))


@needs_compiler
@runs
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_device_finds_is_not_written_outside(rng: np.random.Generator, kind: str) -> None:
    tokens = some_tokens(rng, "float16", seq=3, d=8, dv=8, rotary=None, page_size=16)
    assert tokens.block_table is not None
    tokens.block_table[0] = -1
    tokens.block_table[1] = len(tokens.k_cache)
    tokens.starts[:] = (0, 0, 2**31 - 4, -(2**31))
    tokens.lengths[:] = (3, 3, 2**31 - 1, -5)
    there: dict[str, Any] = {
        name: played_gpu.on_gpu(x.view(KINDS[kind].on_device) if "cache" in name else x)
        for name, x in in_8_bits(tokens, kind)._asdict().items()
        if x is not None
    }
    launch.append(tokens._replace(**there))
    for name in ("k_scale", "v_scale"):
        assert np.isnan(there[name].get()).all()
    for name in ("k_cache", "v_cache"):
        assert (there[name].get() == 0x7F).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_within_half_a_step(rng: np.random.Generator, kind: str) -> None:
    x = rng.standard_normal((3, 50, 64), np.float32) * np.exp2(rng.integers(-30, 30, (3, 50, 1)))
    x = x.astype(np.float32)
    x[1, 7] = 0
    values, scales = quantized_rows(x, KINDS[kind])
    assert values.dtype == KINDS[kind].on_host
    assert (scales[1, 7], np.abs(numbers_of(values, scales, np)[1, 7]).max()) == (1, 0)
    error = np.abs(numbers_of(values, scales, np) - x)
    relative = 0 if kind == "int8" else np.abs(x) / 16
    step = scales[..., None] * (1 if kind == "int8" else 2**-9)
    assert (error <= np.maximum(relative, step / 2) * (1 + 1e-5)).all()
    largest = np.abs(x).max(axis=-1)[scales != 1]
    np.testing.assert_allclose(scales[scales != 1] * KINDS[kind].largest, largest, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", range(5))
def test_the_largest_numbers_stay_finite(steps: int, kind: str) -> None:
    x = np.full((1, 64), LARGEST - steps * np.float32(2.0**104))
    np.testing.assert_allclose(numbers_of(*quantized_rows(x, KINDS[kind]), np), x, 1e-6)


def test_the_kernel_takes_as_many_tokens() -> None:
    text = source.text("means8")
    assert f"constexpr int TOKENS = {MEAN_TOKENS};" in text


def test_what_is_not_finite() -> None:
    x = np.array([[1, -2, 3], [1, np.nan, 3], [-np.inf, 2, 0], [np.nan] * 3], np.float32)
    fp8, scales = quantized_rows(x, KINDS["fp8"])
    np.testing.assert_array_equal(np.isnan(numbers_of(fp8, scales, np)), ~np.isfinite(x))
    np.testing.assert_allclose(scales, np.array([3 / 448, 3 / 448, 2 / 448, 1]))
    int8, scales = quantized_rows(x, KINDS["int8"])
    assert np.isnan(numbers_of(int8, scales, np)[1:]).all()
    np.testing.assert_allclose(scales[0], 3 / 127)
    assert not int8[1:].any()
    for kind in KINDS.values():
        values, scales = quantized_rows(np.zeros((2, 0, 5), np.float32), kind)
        assert (values.shape, scales.shape) == ((2, 0, 5), (2, 0))
