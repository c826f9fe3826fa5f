"""cufa.quantize on NumPy arrays, what `Quantized` refuses, and that the kernel compiles."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from reference import DTYPES

import cufa
from cufa import device
from cufa.compiler import nvrtc
from cufa.quantized.transform import (
    COLUMNS,
    norm,
    restored,
    signs,
    sums,
    together,
    transformed,
)
from cufa.specs.quantize import CONVERT, LARGEST, WHOLE, instance

E4M3 = ml_dtypes.float8_e4m3fn
LEAST = np.float32(2.0**-126)


def drawn(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "layout", "stored"),
    [
        ((2, 3, 300, 64), "bhsd", (2, 3, 300, 64)),
        ((2, 300, 3, 80), "bshd", (2, 3, 300, 96)),
        ((300, 3, 100), "thd", (1, 3, 300, 128)),
        ((2, 300, 192), "bhsd", (2, 1, 300, 192)),
        ((300, 193), "bhsd", (1, 1, 300, 256)),
    ],
)
@pytest.mark.parametrize("hadamard", [False, True])
def test_shapes_and_the_way_back(
    rng: np.random.Generator,
    dtype: str,
    shape: tuple[int, ...],
    layout: Any,
    stored: tuple[int, ...],
    hadamard: bool,
) -> None:
    x = drawn(rng, *shape, dtype=dtype)
    x8 = cufa.quantize(x, hadamard=hadamard, layout=layout)
    assert x8.values.shape == stored
    assert x8.values.dtype == E4M3
    assert x8.scales.shape == (*stored[:2], 3)
    assert (x8.shape, x8.dtype, x8.block) == (shape, DTYPES[dtype], 128)
    back = x8.dequantize()
    assert (back.shape, back.dtype) == (shape, x.dtype)
    error = back.astype(np.float32) - x.astype(np.float32)
    if not hadamard:  # half of the last of three bits, and of the result's own
        assert (np.abs(error) <= (2.0**-4 + 2.0**-8) * np.abs(x.astype(np.float32)) + 1e-4).all()
    assert np.sqrt((error**2).mean()) < 0.03


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"block": 16}, [slice(0, 16), slice(16, 32), slice(32, 40)]),
        ({}, [slice(0, 40)]),
        ({"granularity": "head"}, [slice(0, 40)]),
    ],
)
def test_a_scale_is_of_the_largest_number(
    rng: np.random.Generator, options: dict[str, Any], parts: list[slice]
) -> None:
    x = drawn(rng, 2, 3, 40, 64) * np.float32(2) ** np.arange(40, dtype=np.float32)[:, None]
    x8 = cufa.quantize(x, **options)
    for i, rows in enumerate(parts):
        largest = np.abs(x[:, :, rows]).max(axis=(2, 3))
        assert np.array_equal(x8.scales[..., i], largest / np.float32(448))
        inverse = 1 / x8.scales[..., i, None, None]
        expected = np.clip(x[:, :, rows] * inverse, -448, 448).astype(E4M3)
        assert np.array_equal(x8.values[:, :, rows].view(np.uint8), expected.view(np.uint8))
    assert np.abs(x8.values.astype(np.float32)).max(axis=(2, 3)).min() == 448


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_scale_of_transformed_rows(rng: np.random.Generator, columns: int) -> None:
    """The largest number is that of the transform, whose norm is part of the scale."""
    x = drawn(rng, 1, 1, 128, columns)
    x8 = cufa.quantize(x, hadamard=True, seed=3)
    largest = np.abs(transformed(x, 3, np)).max()
    assert x8.scales[0, 0, 0] == largest / np.float32(448)
    assert np.abs(x8.values.astype(np.float32)).max() == 448
    inverse = 1 / x8.scales[0, 0, 0] * norm(columns)
    expected = np.clip(sums(x, 3, np) * inverse, -448, 448).astype(E4M3)
    assert np.array_equal(x8.values.view(np.uint8), expected.view(np.uint8))


def test_one_scale_of_a_tensor(rng: np.random.Generator) -> None:
    x = drawn(rng, 2, 3, 40, 64)
    x[1, 2, 3, 4] = -1e3
    x8 = cufa.quantize(x, granularity="tensor", hadamard=False)
    assert x8.scales.shape == (1, 1, 1)
    assert x8.scales[0, 0, 0] == np.float32(1e3) / np.float32(448)
    assert x8.dequantize()[1, 2, 3, 4] == pytest.approx(-1e3)


@pytest.mark.parametrize("seq", [1, 128, 300])
def test_values_may_be_transposed(rng: np.random.Generator, seq: int) -> None:
    x = drawn(rng, 2, 3, seq, 80)
    rows, columns = (cufa.quantize(x, transposed=way) for way in (False, True))
    assert columns.values.shape == (2, 3, -(-seq // 128), 96, 128)
    assert np.array_equal(rows.scales, columns.scales)
    assert np.array_equal(rows.dequantize(), columns.dequantize())
    pairs = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
    order = [32 * part + 2 * pair + i for part in range(3) for pair in pairs for i in range(2)]
    for key in range(seq):
        of_sixteen = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15].index(key % 16)
        at = key % 128 // 16 * 16 + of_sixteen
        stored = columns.values[:, :, key // 128, :, at]
        assert np.array_equal(stored, rows.values[:, :, key][..., order])
    behind = columns.values.view(np.uint8)[:, :, -1].sum(axis=(0, 1, 2)) == 0
    assert behind.sum() == -seq % 128


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_transform_keeps_products(rng: np.random.Generator, columns: int) -> None:
    x, y = drawn(rng, 50, columns), drawn(rng, 50, columns)
    tx, ty = (transformed(z, 7, np) for z in (x, y))
    np.testing.assert_allclose(tx @ ty.T, x @ y.T, rtol=0, atol=1e-4)
    np.testing.assert_allclose(restored(tx, 7, np), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_transform_is_a_matrix_of_hadamard(columns: int) -> None:
    n = together(columns)
    assert n == {96: 32, 192: 64}.get(columns, columns)
    one = np.array([[1.0]])
    for _ in range(n.bit_length() - 1):  # Sylvester's
        one = np.block([[one, one], [one, -one]])
    whole = np.kron(np.eye(columns // n), one) / np.sqrt(n)
    found = transformed(np.eye(columns, dtype=np.float32), 3, np)
    np.testing.assert_allclose(found, signs(3, columns)[:, None] * whole, rtol=1e-6, atol=0)


def test_an_outlier_is_spread() -> None:
    x = np.zeros((1, 128), np.float32)
    x[0, 17] = 128
    np.testing.assert_allclose(np.abs(transformed(x, 0, np)), 128**0.5, rtol=1e-6)


def test_signs_are_of_the_seed() -> None:
    drawn_signs = np.stack([signs(seed, 256) for seed in range(64)])
    assert set(np.unique(drawn_signs)) == {-1, 1}
    assert np.abs(drawn_signs.mean(axis=0)).max() < 0.6
    assert np.abs(drawn_signs.mean(axis=1)).max() < 0.3
    assert np.array_equal(signs(5, 64), signs(5, 256)[:64])
    assert not np.array_equal(signs(5, 64), signs(5 + 2**32, 64))


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
def test_infinities_and_nan_become_nan_and_change_no_scale(
    rng: np.random.Generator, granularity: Any
) -> None:
    x = drawn(rng, 1, 2, 40, 192)
    clean = cufa.quantize(x, granularity=granularity)
    x[0, 0, 3, 5], x[0, 0, 4, 6], x[0, 1, 39, 191] = np.nan, np.inf, -np.inf
    x8 = cufa.quantize(x, granularity=granularity)
    bad = ~np.isfinite(x)
    assert (x8.values.view(np.uint8)[bad] == 0x7F).all()
    assert np.isnan(x8.dequantize()[bad]).all()
    largest = np.abs(clean.dequantize()[bad]).max()
    assert largest < 4  # the largest numbers are others
    assert np.array_equal(x8.scales, clean.scales)
    assert np.array_equal(x8.values[~bad], clean.values[~bad])


def test_infinities_and_nan_fill_what_is_transformed_together(rng: np.random.Generator) -> None:
    x = drawn(rng, 1, 1, 40, 192)
    x[0, 0, 3, 5], x[0, 0, 4, 70] = np.nan, np.inf
    values = cufa.quantize(x, hadamard=True).values.view(np.uint8)[0, 0] == 0x7F
    expected = np.zeros((40, 192), bool)
    expected[3, :64] = expected[4, 64:128] = True
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("number", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38])
def test_numbers_of_any_size(number: float) -> None:
    x = np.full((16, 64), number, np.float32)
    x8 = cufa.quantize(x)
    assert (x8.scales >= LEAST).all()
    np.testing.assert_allclose(x8.dequantize(), x, rtol=0.05, atol=float(LEAST) * 2.0**-10)


@pytest.mark.parametrize("shape", [(0, 2, 3, 64), (2, 0, 3, 64), (2, 2, 0, 64), (0, 5)])
@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
def test_empty_arrays(shape: tuple[int, ...], granularity: Any) -> None:
    x8 = cufa.quantize(np.zeros(shape, np.float16), granularity=granularity, smooth=True)
    assert x8.dequantize().shape == shape
    assert (x8.scales == 1).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
def test_sequences_have_blocks_of_their_own(
    rng: np.random.Generator, hadamard: bool, transposed: bool
) -> None:
    """Each has the numbers that it has alone, whatever the others hold."""
    x = drawn(rng, 300, 3, 80)
    x[135:] *= 1e6
    offsets = np.array([0, 0, 7, 135, 135, 300])
    how: dict[str, Any] = {"layout": "thd", "hadamard": hadamard, "block": 64}
    x8 = cufa.quantize(x, cu_seqlens=offsets, transposed=transposed, **how)
    assert x8.scales.shape == (1, 3, 2 * (300 // 128 + 5))
    assert x8.shape == x.shape
    assert "5 sequences" in repr(x8)
    found = x8.dequantize()
    for first, end in itertools.pairwise(offsets):
        alone = cufa.quantize(x[first:end], **how).dequantize()
        np.testing.assert_array_equal(found[first:end], alone)


def test_tokens_of_no_sequence(rng: np.random.Generator) -> None:
    x = drawn(rng, 300, 2, 64)
    for offsets in ([0, 10, 200], [0]):
        x8 = cufa.quantize(x, layout="thd", cu_seqlens=np.array(offsets))
        assert not x8.dequantize()[offsets[-1] :].any()
        assert x8.dequantize()[: offsets[-1]].all()
    assert cufa.quantize(x[:0], layout="thd", cu_seqlens=np.array([0, 0])).dequantize().size == 0


def test_offsets_are_those_of_the_call() -> None:
    offsets = np.array([0, 10, 40])
    x8 = cufa.quantize(np.ones((40, 2, 64), np.float16), layout="thd", cu_seqlens=offsets)
    offsets[1] = 20
    assert x8.cu_seqlens is not None
    assert x8.cu_seqlens.tolist() == [0, 10, 40]


def test_strides_do_not_matter(rng: np.random.Generator) -> None:
    wide = drawn(rng, 2, 40, 3, 130, dtype="float16")
    x = wide[:, ::-1, :, 1::2].swapaxes(1, 2)
    found, expected = (cufa.quantize(y, hadamard=True) for y in (x, np.ascontiguousarray(x)))
    assert np.array_equal(found.values, expected.values)
    assert np.array_equal(found.scales, expected.scales)


def test_smooth_takes_the_mean_of_columns_off(rng: np.random.Generator) -> None:
    x = drawn(rng, 2, 3, 400, 64)
    x[..., 9] += 30
    for hadamard in (False, True):
        x8 = cufa.quantize(x, smooth=True, hadamard=hadamard)
        assert x8.mean is not None
        assert np.abs(x8.scales).max() < 6 / 448
        error = np.abs(x8.dequantize() - x)
        assert error.max() < 0.25
        if not hadamard:
            np.testing.assert_allclose(x8.mean, x.mean(axis=2), rtol=0, atol=1e-5)
    x[0, 0, 5, 9] = np.nan
    its = cufa.quantize(x, smooth=True)
    assert its.mean is not None
    assert np.isfinite(its.mean).all()


def test_a_large_mean_is_not_taken_off() -> None:
    """A number less such a mean could be infinite."""
    x = np.full((7, 64), 1e38, np.float32)
    x[0] = -3.3e38
    np.testing.assert_allclose(cufa.quantize(x, smooth=True).dequantize(), x, 0.07)


def test_it_is_frozen_and_says_what_it_is(rng: np.random.Generator) -> None:
    x8 = cufa.quantize(drawn(rng, 4, 300, 64, dtype="bfloat16"), hadamard=True, seed=3)
    assert repr(x8) == (
        "Quantized(shape=(4, 300, 64), dtype=bfloat16, layout='bhsd', granularity='block', "
        "block=128, hadamard=True, seed=3, numpy)"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        x8.seed = 4  # type: ignore[misc]


X = np.zeros((1, 2, 40, 64), np.float32)


@pytest.mark.parametrize(
    ("x", "options", "kind", "message"),
    [
        ([1.0], {}, TypeError, "x must be a NumPy or a CuPy array, not list"),
        (X.astype(np.float64), {}, TypeError, "x has dtype float64: one of float16"),
        (X.astype(">f4"), {}, TypeError, "non-native byte order"),
        (np.ma.masked_array(X), {}, TypeError, "x is a masked array"),
        (X[0, 0, 0], {}, ValueError, r"x has shape \(64,\): 4 axes"),
        (np.zeros((4, 257), np.float32), {}, ValueError, "head_dim must be 1 to 256, not 257"),
        (X, {"layout": "thd"}, ValueError, "x has shape .* layout 'thd' is of 3 axes"),
        (X, {"layout": "sbhd"}, ValueError, "layout must be 'bhsd', 'bshd' or 'thd'"),
        (X, {"layout": None}, TypeError, "layout must be a string"),
        (X, {"granularity": "row"}, ValueError, "granularity must be .*, not 'row'"),
        (X, {"granularity": None}, TypeError, "granularity must be a string, not NoneType"),
        (X, {"granularity": "head", "block": 64}, ValueError, "block must be None where"),
        (X, {"block": 100}, ValueError, "block must be a power of two, 16 to 1024, not 100"),
        (X, {"block": 8}, ValueError, "block must be 16 to 1024, not 8"),
        (X, {"block": 64.0}, TypeError, "block must be an integer, not float"),
        (X, {"hadamard": 1}, TypeError, "hadamard must be True or False, not int"),
        (X, {"transposed": 1}, TypeError, "transposed must be True or False, not int"),
        (X, {"smooth": 1}, TypeError, "smooth must be True or False, not int"),
        (X, {"seed": -1}, ValueError, "seed must be 0 to"),
        (X, {"seed": 1.0}, TypeError, "seed must be an integer"),
        (X, {"cu_seqlens": np.array([0, 40])}, ValueError, "cu_seqlens: layout must be 'thd'"),
        *(
            (X[0], {"layout": "thd", "cu_seqlens": offsets, **more}, kind, message)
            for offsets, more, kind, message in (
                ([0, 2], {}, TypeError, "cu_seqlens must be a NumPy or a CuPy array"),
                (np.array(2), {}, ValueError, r"cu_seqlens has shape \(\), but \(sequences \+ 1"),
                (np.array([0.0, 2]), {}, TypeError, "cu_seqlens has dtype float64: integers"),
                (np.array([1, 2]), {}, ValueError, r"cu_seqlens\[0\] is 1: it must be 0"),
                (np.array([0, 3]), {}, ValueError, r"cu_seqlens\[-1\] is 3, but there are 2 rows"),
                (np.array([0, 2]), {"block": 256}, ValueError, "block must be 16 to 128, not 256"),
                (np.array([0, 2]), {"smooth": True}, ValueError, "smooth must be False, since"),
            )
        ),
    ],
)
def test_errors_name_the_argument(
    x: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        cufa.quantize(x, **options)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"scales": np.ones((1, 2), np.float32)}, ValueError, r"scales has .* \(1, 2, 1\) is"),
        ({"scales": np.ones((1, 2, 1))}, TypeError, "scales has dtype float64, but float32"),
        ({"scales": [1.0]}, TypeError, "scales must be a NumPy or a CuPy array"),
        ({"block": 16}, ValueError, r"scales has .* \(1, 2, 3\) is needed"),
        ({"granularity": "tensor", "block": None}, ValueError, r"\(1, 1, 1\) is needed"),
        ({"values": np.zeros((1, 2, 40, 64), np.uint8)}, TypeError, "values has dtype uint8"),
        ({"shape": (1, 2, 40, 65)}, ValueError, r"values has .* \(1, 2, 40, 96\) is needed"),
        ({"shape": 40}, TypeError, "shape must be a tuple of sizes"),
        ({"shape": (1, 2, 40.0, 64)}, TypeError, "shape must be a tuple of integers, not float"),
        ({"scales": np.zeros((1, 2, 1), np.float32)}, ValueError, "scales must be positive and"),
        ({"scales": np.full((1, 2, 1), np.nan, "f4")}, ValueError, "scales must be positive and"),
        ({"dtype": "float16"}, TypeError, "dtype must be that of float16, bfloat16, float32"),
        ({"dtype": np.dtype(np.float64)}, TypeError, "dtype must be that of"),
        ({"hadamard": "yes"}, TypeError, "hadamard must be True or False"),
        ({"seed": -3}, ValueError, "seed must be"),
        ({"layout": "thd"}, ValueError, "layout 'thd' is of 3 axes"),
        ({"mean": np.zeros((1, 2, 1), np.float32)}, ValueError, "mean has shape"),
        ({"cu_seqlens": np.array([0, 40], np.int32)}, ValueError, "layout must be 'thd'"),
        ({"cu_seqlens": [0, 40]}, TypeError, "cu_seqlens must be a NumPy or a CuPy array"),
    ],
)
def test_parts_must_fit_each_other(
    changed: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        dataclasses.replace(cufa.quantize(X), **changed)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_120"])
@exhaustive("quantize", but=lambda arch: arch == "sm_90a")
def test_compiles_without_spills(arch: str) -> None:
    cases = [(dtype, columns, True, False, WHOLE) for dtype in DTYPES for columns in COLUMNS]
    cases += [("bfloat16", 128, False, True, WHOLE), ("float32", 96, False, True, CONVERT)]
    for case in (*cases, ("bfloat16", 192, True, False, LARGEST)):
        its = instance(*case)
        compiled = nvrtc.compile_variant(its, device.of_arch(arch).arch)
        spilled = 64 if case[0] == "float32" else 0
        assert compiled.spill_bytes <= spilled, case
        assert compiled.stack_bytes <= spilled, case
        assert "warning" not in compiled.log.lower()
