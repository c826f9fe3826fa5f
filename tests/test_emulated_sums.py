"""The backward kernels' source on the host: gradients of a bias, and of arrays that are read."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import played_gpu
import pytest
import score_arrays
import score_mods
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import on_gpu
from read_arrays import assert_accepts
from reference_backward import ExpectedGradients
from test_backward import READ, formula_options
from test_emulated_backward import (
    FP32_SHARED,
    MMA,
    MMA_SHARED,
    WGMMA_ROWS,
    Case,
    drawn,
    emulated,
    emulator,
    gradients,
    name_of,
)
from test_varlen import ragged

import cufa

pytestmark = needs_compiler

__all__ = ["emulated", "emulator"]  # fixtures

SIZES = (2, 4, 1, 38, 150)

#: Along batch, heads, queries and keys.
SHAPES = [
    tuple(n if has else 1 for n, has in zip((2, 4, 38, 150), axes, strict=True))
    for axes in itertools.product((False, True), repeat=4)
]
#: Two forms have all; another tile, and a device whose kernel of products is another, have some.
CASES = [
    *itertools.product((MMA, FP32_SHARED), SHAPES),
    *itertools.product(
        (MMA_SHARED, WGMMA_ROWS), ((1, 4, 38, 150), (2, 1, 1, 150), (1, 1, 38, 1), (1, 4, 1, 1))
    ),
]
SAMPLE = (
    *((MMA, (1, 4, 38, 150)), (MMA, (1, 4, 1, 1)), (FP32_SHARED, (2, 1, 38, 1))),
    (WGMMA_ROWS, (1, 4, 38, 150)),
)

#: Orders in which blocks and warps run.
ORDERS = ((False, 0), (True, 3), (False, 5))


def in_any_order(
    emulator: Emulator, arrays: tuple[np.ndarray, ...], **options: Any
) -> dict[str, np.ndarray]:
    """Return gradients of which no order of blocks and warps changes a bit."""
    found = []
    for emulator.last_first, emulator.seed in ORDERS:
        found.append(gradients(arrays, deterministic=True, **options))
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert gradient.tobytes() == other[name].tobytes(), f"d{name}"
    return found[0]


@pytest.mark.parametrize(("form", "shape"), CASES, ids=name_of)
@exhaustive("backward", but=lambda form, shape: (form, shape) in SAMPLE)
def test_a_bias_of_each_shape(
    emulated: Emulator, rng: np.random.Generator, form: Case, shape: tuple[int, ...]
) -> None:
    """In any order, and in a fixed one."""
    dtype = (np.float32, form[1])[sum(shape) % 2]
    b, h, q, k = shape
    bias = score_arrays.bias(rng, (b, h, 1, q, k), np.float32)
    options: dict[str, Any] = {
        "bias": bias.astype(dtype),
        "sinks": score_arrays.sinks(rng, SIZES),
        "causal": True,
    }
    arrays = drawn(rng, form, SIZES, **options)
    expected = ExpectedGradients(*arrays[:4], **options)
    expected.assert_accepts(gradients(arrays, wrt=("bias",), **options), "alone")
    wrt = (*"qkv", "bias")
    expected.assert_accepts(gradients(arrays, wrt=wrt, **options), "together")
    expected.assert_accepts(in_any_order(emulated, arrays, wrt=wrt, **options), "in order")


@pytest.mark.parametrize("form", [MMA, FP32_SHARED], ids=name_of)
@pytest.mark.parametrize("name", READ)
@exhaustive("backward", but=lambda form, name: form is MMA and name == "all")
def test_arrays_that_a_function_reads(
    emulated: Emulator, rng: np.random.Generator, form: Case, name: str
) -> None:
    """As on the host, where sums are float64: in any order, and in a fixed one."""
    draw, make = score_mods.FEATURES[name]
    read = {each: np.asarray(array) for each, array in draw(rng, SIZES).items()}
    host, there = make(read), make({each: on_gpu(array) for each, array in read.items()})
    arrays = drawn(rng, form, SIZES, **formula_options(host, SIZES))
    wrt = (*READ[name], "q")
    for found in (
        gradients(arrays, wrt=wrt, **there),
        in_any_order(emulated, arrays, wrt=wrt, **there),
    ):
        found.pop("q")
        assert_accepts(found, arrays, name, host)


def test_an_array_that_a_function_refers_to_alone(rng: np.random.Generator) -> None:
    """Its gradient is 0; and one of float64 is added up in float32."""
    sizes = (1, 2, 1, 20, 40)
    unread, wide = np.ones(3, np.float32), np.zeros((2, 40))

    def made(unread: Any, wide: Any) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + wide[h, kv_idx] * (unread.shape[0] / 3)

    arrays = drawn(rng, MMA, sizes)
    there = {"score_mod": made(on_gpu(unread), on_gpu(wide))}
    found = gradients(arrays, wrt=("unread", "wide"), **there)
    assert not found["unread"].any()
    assert found["wide"].dtype == np.float64
    bias = np.zeros((1, 2, 1, 40), np.float32)
    expected = gradients(arrays, wrt=("bias",), bias=bias)["bias"][0, :, 0]
    np.testing.assert_allclose(found["wide"], expected, rtol=1e-4, atol=1e-6)


def test_arrays_whose_names_resemble_those_of_gradients(rng: np.random.Generator) -> None:
    """A function reads `dtable` and `dbias`: they are inputs, and stay as they are."""
    numbers: list[Any] = [on_gpu(np.full(40, n, np.float32)) for n in (0, 0, 0.5, 0.25)]
    bias, table, dtable, dbias = numbers

    def added(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[kv_idx] * dtable[kv_idx] + dbias[kv_idx]

    arrays = drawn(rng, MMA, (1, 2, 1, 20, 40))
    found = gradients(arrays, wrt=("bias", "table"), bias=bias, score_mod=added)
    np.testing.assert_allclose(found["table"], found["bias"] / 2, rtol=1e-4, atol=1e-6)
    assert np.abs(found["bias"]).max() > 0.1
    assert (dtable.get() == 0.5).all()
    assert (dbias.get() == 0.25).all()


@pytest.mark.parametrize("form", [MMA, FP32_SHARED], ids=name_of)
def test_sequences_of_any_lengths(emulated: Emulator, rng: np.random.Generator, form: Case) -> None:
    """A bias, and an array that a function reads, of sequences in a row: as on NumPy arrays."""
    _, dtype, d, dv = form
    lengths = ((5, 0, 40, 1), (7, 3, 90, 0))
    q, k, _, cu_q, cu_k = ragged(rng, dtype, lengths, 2, 1, d, played_gpu)
    v = ragged(rng, dtype, lengths, 2, 1, dv, played_gpu)[2]
    dout = rng.standard_normal((*q.shape[:2], dv), np.float32).astype(q.dtype)
    table = rng.standard_normal(16, np.float32)
    bias = rng.standard_normal((1, 2, 40, 90), np.float32)

    def made(table: Any) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + table[(q_idx + 3 * kv_idx + b) % 16]

    offsets = {"max_seqlen_q": 40, "max_seqlen_k": 90, "causal": True}
    host: dict[str, Any] = {"bias": bias, "score_mod": made(table), **offsets}
    there: dict[str, Any] = {"bias": on_gpu(bias), "score_mod": made(on_gpu(table)), **offsets}
    q, dout = q[: cu_q[-1]], dout[: cu_q[-1]]
    out, lse = cufa.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **host)
    arrays, wrt = (dout, q, k, v, out, lse, cu_q, cu_k), ("bias", "table", "q")
    expected = cufa.attention_varlen_backward(*arrays, wrt=wrt, **host)
    first: list[bytes] = []
    for emulated.last_first, emulated.seed in ORDERS:
        given = map(on_gpu, arrays)
        found = cufa.attention_varlen_backward(*given, wrt=wrt, deterministic=True, **there)
        for name, x, y in zip(wrt[:2], found, expected, strict=False):
            most = np.abs(y).max()
            np.testing.assert_allclose(x.get(), y, rtol=1e-4, atol=1e-5 * most, err_msg=name)
        first = first or [x.get().tobytes() for x in found]
        assert first == [x.get().tobytes() for x in found]
