"""cufa.quantize on a GPU: as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from quantized_alike import assert_alike, assert_dequantized_alike
from reference import DTYPES

import cufa
from cufa.api.quantize_qkv import prepare_qkv
from cufa.launch.quantize import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 96, 100, 128, 192, 256])
@pytest.mark.parametrize(
    "options",
    [{}, {"block": 16}, {"block": 512}, {"granularity": "head"}, {"granularity": "tensor"}],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True])
def test_is_as_on_the_cpu(
    rng: np.random.Generator, cupy: Any, d: int, dtype: str, options: Any, transposed: bool
) -> None:
    x = rng.standard_normal((2, 3, 700, d), np.float32).astype(DTYPES[dtype])
    x[0, 1, 3, 4], x[1, 2, 600, 0] = np.nan, np.inf
    for hadamard in (False, True):
        its = {**options, "hadamard": hadamard, "transposed": transposed, "seed": 7}
        found, expected = cufa.quantize(cupy.asarray(x), **its), cufa.quantize(x, **its)
        assert_alike(found, expected)
        assert_dequantized_alike(found, expected)


@pytest.mark.parametrize("d", [64, 100, 128, 192, 256])
@pytest.mark.parametrize("options", [{}, {"block": 32}, {"granularity": "head"}], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_sequences_in_blocks_of_their_own(
    rng: np.random.Generator, cupy: Any, d: int, options: Any, transposed: bool
) -> None:
    x = rng.standard_normal((3000, 3, d), np.float32).astype(np.float16)
    offsets = np.array([0, 0, 7, 135, 135, 1300, 1301, 2990], np.int32)
    how = {**options, "layout": "thd", "transposed": transposed, "hadamard": not transposed}
    expected = cufa.quantize(x, cu_seqlens=offsets, **how)
    for given in (offsets, cupy.asarray(offsets)):
        found = cufa.quantize(cupy.asarray(x), cu_seqlens=given, **how)
        assert_alike(found, expected)
        assert_dequantized_alike(found, expected)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("is_captured", [False, True])
def test_qkv_right_behind_the_kernels_that_write_them(
    rng: np.random.Generator, cupy: Any, d: int, is_captured: bool
) -> None:
    """The launches overlap, but none begins before its array is there."""
    shape = 2, 1 << 11 - d.bit_length(), 8192, d
    sources = [
        [cupy.asarray(rng.standard_normal(shape, np.float32).astype(np.float16)) for _ in "qkv"]
        for _ in range(2)
    ]
    how: list[dict[str, Any]] = [{"hadamard": True}] * 2 + [{"transposed": True}]
    expected = [
        [cufa.quantize(x, **each) for x, each in zip(arrays, how, strict=True)]
        for arrays in sources
    ]
    arrays = [cupy.zeros(shape, np.float16) for _ in "qkv"]
    of_call: list[Any] = []

    def call() -> None:
        of_call[:] = cufa.quantize_qkv(*arrays)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        if is_captured:
            call()
            call()  # now there is memory for another one
            of_call.clear()
            stream.synchronize()
            stream.begin_capture()
            call()
            call = stream.end_capture().launch
        for turn in range(20):
            for array, source in zip(arrays, sources[turn % 2], strict=True):
                array *= source  # and it waits for the turn before
                array[...] = source
            call()
            same = [
                (found.values == its.values).all() & (found.scales == its.scales).all()
                for found, its in zip(of_call, expected[turn % 2], strict=True)
            ]
            assert all(same)


def test_lengths_right_behind_the_kernel_that_writes_them(
    rng: np.random.Generator, cupy: Any
) -> None:
    """A launch that overlaps has not waited for it."""
    shape = 64, 4, 1024, 128
    arrays = {
        name: cupy.asarray(rng.standard_normal(shape, np.float32).astype(np.float16))
        for name in "qkv"
    }
    used = cupy.zeros(64, np.int32)
    lengths = [cupy.asarray(rng.integers(1, 1024, 64), np.int32) for _ in range(2)]
    none = dict.fromkeys("qkv")

    def call() -> list[Any]:
        each = dict.fromkeys("qkv", used)
        made, launches = prepare_qkv(arrays, none, each, hadamard=True, transposed=True)
        run(launches)
        return [x.values for x in made.values()]

    expected = []
    for its in lengths:
        used[...] = its
        cupy.cuda.Device().synchronize()
        expected.append(call())
        cupy.cuda.Device().synchronize()
    for turn in range(200):
        used[...] = lengths[turn % 2]
        found = call()
        for values, other in zip(found, expected[turn % 2], strict=True):
            assert (values == other).all(), turn
