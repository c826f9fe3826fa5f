"""The backward kernels' source on the host: gradients of a bias, and of arrays that are read."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import score_arrays
import score_mods
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import on_gpu
from reference_backward import ExpectedGradients, gradients_of
from test_backward import READ, formula_options
from test_emulated_backward import (
    FP32,
    MMA,
    Case,
    drawn,
    emulated,
    emulator,
    forms,
    gradients,
    name_of,
)

import cufa

pytestmark = needs_compiler

__all__ = ["emulated", "emulator"]  # fixtures

SIZES = (2, 4, 2, 40, 150)

#: Along batch, heads, queries and keys.
SHAPES = [
    tuple(n if has else 1 for n, has in zip((2, 4, 40, 150), axes, strict=True))
    for axes in itertools.product((False, True), repeat=4)
]
SAMPLE = ((MMA, (1, 4, 40, 150)), (MMA, (1, 4, 1, 150)), (FP32, (2, 1, 40, 1)), (MMA, (1, 4, 1, 1)))

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


@forms
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@exhaustive("backward", but=lambda form, shape: (form, shape) in SAMPLE)
def test_a_bias_of_each_shape(
    emulated: Emulator, rng: np.random.Generator, form: Case, shape: tuple[int, ...]
) -> None:
    """In any order, and in a fixed one."""
    dtype = (np.float32, form[1])[sum(shape) % 2]
    bias = score_arrays.bias(rng, (shape[0], shape[1], 1, *shape[2:]), np.float32)
    options = {"bias": bias.astype(dtype), "sinks": score_arrays.sinks(rng, SIZES), "causal": True}
    arrays = drawn(rng, form, SIZES, **options)
    expected = ExpectedGradients(*arrays[:4], **options)
    expected.assert_accepts(gradients(arrays, wrt=("bias",), **options), "alone")
    wrt = (*"qkv", "bias", "sinks")
    expected.assert_accepts(gradients(arrays, wrt=wrt, **options), "together")
    expected.assert_accepts(in_any_order(emulated, arrays, wrt=wrt, **options), "in order")


#: The largest derivative of a score by an element.
STEEPEST = {"alibi": 150.0, "even steps": 150 / 32, "relative positions": 1.0, "all": 13.0}


def bound(arrays: tuple[np.ndarray, ...], name: str, options: dict[str, Any]) -> float:
    """Return the error that is accepted of an element: 2^-19 of the sum of all that is added."""
    shape = (*arrays[1].shape[:3], arrays[2].shape[2])
    offsets = np.zeros(shape, np.float32)
    function = options["score_mod"]

    def with_offsets(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(score, b, h, q_idx, kv_idx) + offsets[b, h, q_idx, kv_idx]

    given = options | {"score_mod": with_offsets}
    (of_scores,) = cufa.attention_backward(*arrays, wrt=("offsets",), **given)
    return float(np.abs(of_scores).sum()) * STEEPEST[name] * 2.0**-19


@forms
@pytest.mark.parametrize("name", READ)
@exhaustive("backward", but=lambda form, name: (form, name) in ((MMA, "all"), (FP32, "alibi")))
def test_arrays_that_a_function_reads(
    emulated: Emulator, rng: np.random.Generator, form: Case, name: str
) -> None:
    """As on the host, where sums are float64: in any order, and in a fixed one."""
    draw, make = score_mods.FEATURES[name]
    read = {each: np.asarray(array) for each, array in draw(rng, SIZES).items()}
    host, there = make(read), make({each: on_gpu(array) for each, array in read.items()})
    arrays = drawn(rng, form, SIZES, **formula_options(host, SIZES))
    wrt = (*READ[name], "q")
    expected = gradients_of(wrt, cufa.attention_backward(*arrays, wrt=wrt, **host))
    allowed = bound(arrays, name, host)
    for found in (
        gradients(arrays, wrt=wrt, **there),
        in_any_order(emulated, arrays, wrt=wrt, **there),
    ):
        for each in READ[name]:
            assert found[each].dtype == read[each].dtype
            assert found[each].shape == read[each].shape
            wide = expected[each].astype(np.float64)
            rounding = np.spacing(np.abs(expected[each]).max()).astype(np.float64)
            error = np.abs(found[each].astype(np.float64) - wide).max()
            assert error <= allowed + rounding, each
