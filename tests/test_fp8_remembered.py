"""Calls in 8 bits that are like an earlier one: what they still notice."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from played_gpu import Gpu, Stream, on_gpu

import cufa
from cufa.launch import counters, fp8_calls

#: Types are the concern of tests/test_types.py.
attention: Any = cufa.attention

Run = Callable[..., Any]


def array(*shape: int, dtype: Any = np.float16) -> Any:
    return on_gpu(np.ones(shape or (2, 4, 200, 64), dtype))


def from_16_bits(x: Any = None, **options: Any) -> Any:
    x = array() if x is None else x
    return attention(x, x, x, **({"precision": "fp8"} | options))


def in_8_bits(x: Any = None, **options: Any) -> Any:
    x = array() if x is None else x
    how = {"layout": options["layout"]} if "layout" in options else {}
    arrays = cufa.quantize_qkv(x, x, x, **how)
    return attention(*arrays, **({"out_dtype": np.float16} | options))


runs = pytest.mark.parametrize("run", [from_16_bits, in_8_bits])


@runs
def test_are_not_checked_in_full_again(gpu: Gpu, run: Run) -> None:
    launched = []
    for _ in range(3):
        run(causal=True)
        launched.append(len(gpu.launches))
    assert gpu.parsed == 1
    assert launched == [4, 8, 12]


def test_all_options_are_part_of_the_key() -> None:
    parameters = inspect.signature(cufa.attention).parameters.values()
    others = [p.name for p in parameters if p.default is not None and p.name not in "qkv"]
    assert set(others) <= set(fp8_calls.OPTIONS)


@runs
def test_options_are_not_those_of_another_call(gpu: Gpu, run: Run) -> None:
    calls: list[dict[str, Any]] = [
        *({}, {"causal": True}, {"causal": "top-left"}, {"window": (9, 0)}, {"window": (0, 9)}),
        *({"scale": 0.5}, {"softcap": 20.0}, {"return_lse": True}, {"attention_chunk": 64}),
        *({"layout": "bshd"}, {"out_dtype": "bfloat16"}, {"batch_invariant": True}),
        *({"kernel": "fp8_wgmma"}, {"x": array(2, 4, 200, 128)}, {"x": array(2, 4, 201, 64)}),
        {"x": array(2, 4, 400, 64)[:, :, ::2]},
    ]
    for _ in range(2):
        for options in calls:
            result = run(**options)
            out = result[0] if options.get("return_lse") else result
            assert out.shape == options.get("x", array()).shape
            assert out.dtype.name == options.get("out_dtype", "float16")
    # Quantized, the strided array is like the first one.
    assert gpu.parsed == len(calls) - (run is in_8_bits)


@runs
def test_equal_values_of_other_types_are_refused(gpu: Gpu, run: Run) -> None:
    for options in ({"causal": True}, {"return_lse": False}, {"window": (1, 0)}, {"scale": 1.0}):
        run(**options)
    for name, value in (("causal", 1), ("return_lse", 0), ("window", (True, 0)), ("scale", True)):
        with pytest.raises(TypeError, match=name):
            run(**{name: value})
    with pytest.raises(TypeError, match="window"):
        run(window=[1, 0])
    with pytest.raises(TypeError, match="scale"):
        run(scale=memoryview(bytearray(b"x")))  # whose hash raises ValueError


def others() -> list[dict[str, Any]]:
    """Return new arrays besides q, k and v."""
    lengths, slopes = on_gpu(np.array([200, 100], np.int32)), array(4, dtype=np.float32)
    return [
        *({"out": array()}, {"sinks": slopes}, {"alibi_slopes": slopes}, {"lengths_k": lengths}),
        *({"lengths_q": lengths, "lengths_k": lengths}, {"lengths_k": lengths, "sinks": slopes}),
    ]


@runs
def test_calls_with_other_arrays_are_known_by_what_these_are_like(gpu: Gpu, run: Run) -> None:
    run()
    for options in others():
        run(**options)
    assert gpu.parsed == 1 + len(others())
    for options in others():
        launched = len(gpu.launches)
        result = run(**options)
        assert len(gpu.launches) > launched
        assert options.get("out", result) is result
    assert gpu.parsed == 1 + len(others())


@runs
def test_calls_with_other_arrays_are_checked(gpu: Gpu, run: Run) -> None:
    for _ in range(2):
        for options in others():
            run(**options)
    known = gpu.parsed
    long = on_gpu(np.array([200, 100]))  # int64, which a call converts
    on_host = np.array([200, 100], np.int32)
    strided = on_gpu(np.array([200, 0, 100, 0], np.int32))[::2]
    full: list[dict[str, Any]] = [
        *({"lengths_k": long}, {"lengths_k": long}, {"lengths_k": on_host}),
        *({"lengths_k": strided}, {"lengths_k": strided}, {"dropout_p": 0.5, "seed": 3}),
    ]
    for count, options in enumerate(full):
        run(**options)
        assert gpu.parsed == known + count + 1, options
    for name, wrong in (
        ("sinks", array(3, dtype=np.float32)),
        ("lengths_k", on_gpu(np.array([200], np.int32))),
        ("lengths_q", on_gpu(np.array([2.0, 1.0], np.float32))),
        ("out", array(2, 4, 200, 128)),
        ("mask", array(200, 200, dtype=bool)),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            run(**{name: wrong})


def test_an_out_that_is_read_is_refused(gpu: Gpu) -> None:
    x, lengths = array(), on_gpu(np.array([200, 100], np.int32))
    q, k, v = cufa.quantize_qkv(x, x, x)
    for _ in range(2):
        attention(q, k, v, out_dtype=np.float16, out=array(), lengths_k=lengths)
    out = array()
    values = out.view(np.uint8).reshape(-1)[: q.values.size].reshape(q.values.shape)
    again = dataclasses.replace(q, values=values)
    with pytest.raises(ValueError, match=r"out .* shares memory with q"):
        attention(again, k, v, out_dtype=np.float16, out=out, lengths_k=lengths)


def test_a_quantized_of_odd_types(gpu: Gpu) -> None:
    """Its fields are of plain types, whatever it is given."""
    x = array()
    q, k, v = cufa.quantize_qkv(x, x, x)
    attention(q, k, v, out_dtype=np.float16)
    odd: Any = type("Odd", (int,), {"__eq__": lambda *_: True, "__hash__": lambda _: hash(64)})
    text: Any = type("Text", (str,), {"__hash__": None})
    more = {"granularity": text("block"), "layout": text("bhsd")}
    fewer = [dataclasses.replace(y, shape=(2, 4, 200, odd(60)), **more) for y in (q, k, v)]
    assert attention(*fewer, out_dtype=np.float16).shape == (2, 4, 200, 60)
    assert gpu.parsed == 2


def test_arrays_of_another_transform_or_device(gpu: Gpu) -> None:
    x = array()
    q, k, v = cufa.quantize_qkv(x, x, x)
    attention(q, k, v, out_dtype=np.float16)
    with pytest.raises(ValueError, match="k was quantized with hadamard=True, seed=1"):
        attention(q, cufa.quantize(x, hadamard=True, seed=1), v, out_dtype=np.float16)
    with pytest.raises(TypeError, match="k is of type"):
        attention(q, x, v, out_dtype=np.float16)
    gpu.current = 1
    with pytest.raises(ValueError, match=r"q .* is on device 0"):
        attention(q, k, v, out_dtype=np.float16)


def test_copies_are_made_in_each_call(gpu: Gpu) -> None:
    """A call copies values that are not transposed, q for a negative scale, and odd rows."""
    x = array()
    q, k, _ = cufa.quantize_qkv(x, x, x)
    for count in (1, 2):
        attention(q, k, cufa.quantize(x), out_dtype=np.float16)
        assert gpu.parsed == count
    for count in (3, 4):
        in_8_bits(scale=-0.5)
        assert gpu.parsed == count
    for count in (5, 6):
        from_16_bits(array(2, 4, 200, 65))
        assert gpu.parsed == count


def test_captures(gpu: Gpu) -> None:
    x = array()
    arrays = cufa.quantize_qkv(x, x, x)
    for _ in range(2):
        from_16_bits(x)
        attention(*arrays, out_dtype=np.float16)
    gpu.stream = Stream(capturing=True)
    attention(*arrays, out_dtype=np.float16)
    with pytest.raises(ValueError, match="precision: q, k and v would be quantized"):
        from_16_bits(x)


def test_a_first_call_in_a_capture(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reserves no counters, as that takes memory."""
    monkeypatch.setattr(counters, "_of_device", {})
    x = array(8, 16, 1000, 64)
    arrays = cufa.quantize_qkv(x, x, x)
    gpu.stream = Stream(capturing=True)
    with pytest.raises(RuntimeError, match=r"call cufa\.attention once before it"):
        attention(*arrays, causal=True, out_dtype=np.float16)
    gpu.stream = Stream()
    attention(*arrays, causal=True, out_dtype=np.float16)


def test_numpy_arrays_while_another_thread_imports_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    x, ends = np.ones((1, 2, 8, 64), np.float16), np.array([0, 8])
    out, lse = attention(x, x, x, return_lse=True)
    attention(x, x, x, precision="fp8")
    cufa.attention_backward(x, x, x, x, out, lse)
    packed = np.ones((8, 2, 64), np.float16)
    cufa.attention_varlen(packed, packed, packed, ends, ends)
    cufa.decode(x[:, :, :1], x, x)


def test_packed_sequences_without_offsets_are_refused(gpu: Gpu) -> None:
    """A call of another function is not taken for one of `attention`."""
    x = array(200, 4, 64)
    attention(x, x, x, precision="fp8", layout="bshd")
    none: Any = None
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        cufa.attention_varlen(x, x, x, none, none, precision="fp8")
