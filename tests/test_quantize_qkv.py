"""cufa.quantize_qkv: what three calls of cufa.quantize return."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from played_gpu import Gpu, Stream, on_gpu
from test_emulated import emulated, emulator  # noqa: F401

import cufa
from cufa.compiler import jit
from cufa.quantized.transform import sign_bits
from cufa.specs import quantize as spec
from cufa.specs.structs import numbers_of

CALL: Any = cufa.quantize_qkv
OFFSETS = np.array([0, 7, 135, 300], np.int32)


def drawn(rng: np.random.Generator, *shape: int) -> list[np.ndarray]:
    return [rng.standard_normal(shape, np.float32).astype(np.float16) for _ in range(3)]


def assert_same(found: cufa.Quantized, expected: cufa.Quantized) -> None:
    for name in ("values", "scales"):
        its, other = getattr(found, name), getattr(expected, name)
        its = its if isinstance(its, np.ndarray) else its.get()
        np.testing.assert_array_equal(its.view(np.uint8), other.view(np.uint8))
    for name in ("shape", "dtype", "granularity", "block", "hadamard", "seed", "transposed"):
        assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.parametrize(
    "options",
    [{}, {"granularity": "head", "seed": 5}, {"block": 256}, {"hadamard": False}],
    ids=str,
)
def test_is_three_calls(rng: np.random.Generator, options: dict[str, Any]) -> None:
    arrays = drawn(rng, 2, 3, 300, 64)
    of_qk = {"hadamard": True} | options
    of_v = of_qk | {"hadamard": False}
    q, k, v = CALL(*arrays, **options)
    assert_same(q, cufa.quantize(arrays[0], **of_qk))
    assert_same(k, cufa.quantize(arrays[1], **of_qk))
    assert_same(v, cufa.quantize(arrays[2], transposed=True, **of_v))


def test_attention_is_that_of_precision(rng: np.random.Generator) -> None:
    arrays = drawn(rng, 2, 2, 200, 80)
    found = cufa.attention(*cufa.quantize_qkv(*arrays), causal=True, out_dtype=np.float16)
    expected = cufa.attention(*arrays, causal=True, precision="fp8")
    np.testing.assert_array_equal(found, expected)
    packed = drawn(rng, 300, 2, 64)
    made = CALL(*packed, layout="thd", cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)
    q8, k8, v8 = made
    found = cufa.attention_varlen(q8, k8, v8, OFFSETS, OFFSETS, out_dtype=np.float16)
    q, k, v = packed
    expected = cufa.attention_varlen(q, k, v, OFFSETS, OFFSETS, precision="fp8")
    np.testing.assert_array_equal(found, expected)


@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("options", [{}, {"granularity": "head"}], ids=str)
def test_the_kernels_write_the_bits_of_the_cpu(
    rng: np.random.Generator, options: dict[str, Any]
) -> None:
    """With rows that are copied first, an empty array, and sequences in blocks of their own."""
    for shape, sliced in (((1, 2, 150, 64), np.s_[:]), ((1, 2, 150, 80), np.s_[..., 1:65])):
        arrays = drawn(rng, *shape)
        found = CALL(*(on_gpu(x)[sliced] for x in arrays), **options)
        expected = CALL(*(x[sliced] for x in arrays), **options)
        for each, other in zip(found, expected, strict=True):
            assert_same(each, other)
    arrays = drawn(rng, 300, 2, 64)
    arrays[0] = arrays[0][:0]
    none = np.zeros(4, np.int32)
    its = {"layout": "thd", "cu_seqlens_q": none, "cu_seqlens_k": OFFSETS, **options}
    for each, other in zip(CALL(*map(on_gpu, arrays), **its), CALL(*arrays, **its), strict=True):
        assert_same(each, other)


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_launches_overlap_when_one_has_waited(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch waits for what is in front of the call, and so for all of its arrays."""
    seen: list[int] = []  # by launch
    place = {name: offset for name, offset, _ in numbers_of(spec.SPEC.params)}["overlaps"]

    def kernel(instance: Any, *where: Any) -> Any:
        launch = emulated_kernel(instance, *where)

        def launched(grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
            seen.append(ctypes.c_int.from_address(args[0].ptr + place).value)
            launch(grid, block, args, smem_bytes)

        return launched if instance.kernel == "quantize" else launch

    emulated_kernel = jit.kernel
    monkeypatch.setattr(jit, "kernel", kernel)
    q, k, v = map(on_gpu, drawn(rng, 1, 2, 40, 64))

    def launched_by(function: Any, *arrays: Any, **options: Any) -> list[int]:
        seen.clear()
        function(*arrays, **options)
        return seen[:]

    for _ in range(2):  # a new kind of arrays, and a known one
        assert launched_by(CALL, q, k, v) == [0, 1, 1]
        assert launched_by(CALL, q[:, :, :0], k, v) == [0, 1]
        assert launched_by(CALL, q, k, v, granularity="head") == [0] * 6
        assert launched_by(cufa.attention, q, k, v, precision="fp8") == [0, 1, 1]
        assert launched_by(cufa.quantize, q) == [0]


def test_what_does_not_fit(rng: np.random.Generator) -> None:
    q, k, v = drawn(rng, 300, 2, 64)
    for given, needed in (("q", "k"), ("k", "q")):
        message = f"cu_seqlens_{needed} is needed with cu_seqlens_{given}"
        with pytest.raises(ValueError, match=message):
            CALL(q, k, v, layout="thd", **{f"cu_seqlens_{given}": OFFSETS})
    with pytest.raises(ValueError, match="cu_seqlens_k has shape"):
        CALL(q, k, v, layout="thd", cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS[None])
    with pytest.raises(TypeError, match="k must be a NumPy or a CuPy array, not list"):
        CALL(q, [1.0], v)
    with pytest.raises(TypeError, match="v has dtype int8"):
        CALL(q, k, v.astype(np.int8))
    with pytest.raises(TypeError, match="hadamard must be"):
        CALL(q, k, v, hadamard="yes")
    with pytest.raises(ValueError, match="granularity"):
        CALL(q, k, v, granularity="row")
    with pytest.raises(ValueError, match="cu_seqlens_q: layout must be 'thd', not 'bhsd'"):
        CALL(q, k, v, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)


def test_what_a_capture_has_no_place_for(gpu: Gpu) -> None:
    x, odd = (on_gpu(np.ones((1, 2, 200, d), np.float16)) for d in (64, 65))
    gpu.stream = Stream(capturing=True)
    with pytest.raises(ValueError, match=r"v would be copied.* or give rows that are$"):
        CALL(x, x, odd)
    with pytest.raises(
        ValueError, match=r"block=256 needs memory.* in blocks of 128 rows or fewer"
    ):
        CALL(x, x, x, block=256)


def test_nothing_is_copied_of_empty_arrays_in_a_capture(gpu: Gpu) -> None:
    odd, none = on_gpu(np.ones((1, 2, 0, 65), np.float16)), on_gpu(np.zeros(1, np.int32))
    packed = on_gpu(np.ones((10, 2, 65), np.float16))
    gpu.stream = Stream(capturing=True)
    assert CALL(odd, odd, odd)[0].values.shape == (1, 2, 0, 96)
    cufa.quantize(packed, layout="thd", cu_seqlens=none)
    assert not gpu.launches


@pytest.mark.usefixtures("gpu")
def test_flags_and_seeds_of_numpy() -> None:
    x = np.ones((1, 2, 40, 64), np.float16)
    flag: Any = np.True_
    seed: Any = np.uint8(5)
    for there in (x, on_gpu(x)):
        found = cufa.quantize(there, transposed=flag, seed=seed)
        assert found.transposed is True
        assert type(found.seed) is int
    made = cufa.quantize(x, hadamard=True, seed=5)
    again = dataclasses.replace(made, seed=seed)
    sign_bits.cache_clear()
    np.testing.assert_array_equal(again.dequantize(), made.dequantize())
