"""The backward kernels' source on the host: gradients of a bias and of arrays that functions read."""

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
from reference_backward import ExpectedGradients
from test_backward import READ, formula_options
from test_emulated_backward import (
    FP32,
    FP32_SHARED,
    MMA,
    MMA_SHARED,
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
