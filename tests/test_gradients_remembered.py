"""Gradients of calls that are like an earlier one: what they still notice."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from played_gpu import Gpu, on_gpu

import cufa
from cufa.launch import gradient_calls, workspace

#: Types are the concern of tests/test_types.py.
backward: Any = cufa.attention_backward


@pytest.fixture(autouse=True)
def own_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_of_device", {})


def array(*shape: int, dtype: Any = np.float16) -> Any:
    return on_gpu(np.ones(shape or (2, 4, 200, 64), dtype))


def call(x: Any = None, lse: Any = None, **options: Any) -> Any:
    x = array() if x is None else x
    b, h, s, _ = x.shape
    if options.get("layout") == "bshd":
        h, s = s, h
    lse = array(b, h, s, dtype=np.float32) if lse is None else lse
    return backward(x, x, x, x, x, lse, **options)


def test_are_not_checked_in_full_again(gpu: Gpu) -> None:
    launched = []
    for _ in range(3):
        found = call(causal=True)
        assert [x.shape for x in found] == [(2, 4, 200, 64)] * 3
        launched.append(len(gpu.launches))
    assert gpu.parsed == 1
    assert launched[0] > 0
    assert launched[1:] == [2 * launched[0], 3 * launched[0]]


def test_all_options_are_part_of_the_key() -> None:
    parameters = inspect.signature(cufa.attention_backward).parameters.values()
    others = [p.name for p in parameters if p.default not in (None, p.empty)]
    assert set(others) <= set(gradient_calls.OPTIONS)


def test_options_are_not_those_of_another_call(gpu: Gpu) -> None:
    calls: list[dict[str, Any]] = [
        *({}, {"causal": True}, {"causal": "top-left"}, {"window": (9, 0)}, {"window": (0, 9)}),
        *({"scale": 0.5}, {"softcap": 20.0}, {"attention_chunk": 64}, {"layout": "bshd"}),
        *({"deterministic": True}, {"wrt": ("q",)}, {"wrt": ("v", "k")}),
        *({"x": array(2, 4, 200, 128)}, {"x": array(2, 4, 201, 64)}),
        {"x": array(2, 4, 400, 64)[:, :, ::2]},
        {"x": array(dtype=np.float32)},
    ]
    for _ in range(2):
        for options in calls:
            found = call(**options)
            x = options.get("x", array())
            assert len(found) == len(options.get("wrt", "qkv"))
            assert {(each.shape, each.dtype) for each in found} == {(x.shape, x.dtype)}
    assert gpu.parsed == len(calls)


def test_equal_values_of_other_types_are_refused(gpu: Gpu) -> None:
    for options in ({"causal": True}, {"deterministic": False}, {"window": (1, 0)}, {"scale": 1.0}):
        call(**options)
    for name, value in (
        *(("causal", 1), ("deterministic", 0), ("window", (True, 0)), ("scale", True)),
        *(("window", [1, 0]), ("kernel", "bwd_mma"), ("wrt", ("x",))),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            call(**{name: value})


def test_options_that_cannot_be_hashed(gpu: Gpu) -> None:
    class Odd(float):
        def __hash__(self) -> int:
            raise RuntimeError("no hash")

    for count in (1, 2):
        call(scale=Odd(0.5))
        assert gpu.parsed == count


def test_calls_with_other_arrays_are_checked(gpu: Gpu) -> None:
    call()
    lengths = on_gpu(np.array([200, 100], np.int32))
    others: list[dict[str, Any]] = [
        *({"sinks": array(4, dtype=np.float32)}, {"lengths_k": lengths}),
        *({"alibi_slopes": array(4, dtype=np.float32)}, {"dropout_p": 0.5, "seed": 0}),
        *({"bias": array(200, 200)}, {"bias": array(200, 200), "wrt": ("q", "bias")}),
        *({"wrt": ["q"]}, {"score_mod": lambda score, b, h, q_idx, kv_idx: score}),
    ]
    for options in others * 2:
        before = gpu.parsed
        call(**options)
        assert gpu.parsed == before + 1, options
    with pytest.raises(ValueError, match="lse"):
        call(lse=array(2, 4, 199, dtype=np.float32))
    with pytest.raises(TypeError, match="lse"):
        call(lse=array(2, 4, 200))
    x, lse = array(), array(2, 4, 200, dtype=np.float32)
    with pytest.raises(ValueError, match="out"):
        backward(x, x, x, x, array(2, 4, 199, 64), lse)


def parts(whole: Any) -> dict[str, Any]:
    """Return places for gradients of `array()`, interleaved in one array."""
    return {name: whole[:, :, :, i] for i, name in enumerate(("dq", "dk", "dv"))}


def test_gradients_go_where_they_are_asked_for(gpu: Gpu) -> None:
    for _ in range(2):
        into = parts(array(2, 4, 200, 3, 64))
        found = call(**into)
        assert all(a is b for a, b in zip(found, into.values(), strict=True))
        dk = array()
        found = call(dk=dk, wrt=("k", "q"))
        assert found[0] is dk
        assert found[1].shape == dk.shape
    assert gpu.parsed == 2


def test_places_may_lie_anywhere(gpu: Gpu) -> None:
    kept = [call(dq=array(), dk=array(), dv=array()) for _ in range(4)]
    assert gpu.parsed == 1
    parts_of = [parts(array(2, 4, 200, 3, 64)) for _ in range(2)]
    assert all(len(call(**into)) == 3 for into in parts_of)
    assert gpu.parsed == 2
    assert len(kept) == 4


def test_places_are_arrays(gpu: Gpu) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match="dk must be a NumPy or a CuPy array, not Quantized"):
            call(dk=cufa.quantize(array()))


def test_gradients_never_go_to_what_is_read(gpu: Gpu) -> None:
    x, lse, whole = array(), array(2, 4, 200, dtype=np.float32), array(2, 4, 200, 4, 64)
    for read in (x, whole[:, :, :, 3]):
        call(read, lse, **parts(array(2, 4, 200, 3, 64)))
    with pytest.raises(ValueError, match=r"dk .* shares memory with q"):
        call(x, lse, **{**parts(array(2, 4, 200, 3, 64)), "dk": x})
    one = array()
    with pytest.raises(ValueError, match=r"dk .* shares memory with dq"):
        call(x, lse, dq=one, dk=one)
    with pytest.raises(ValueError, match=r"dv .* shares memory with q"):
        call(whole[:, :, :, 2], lse, **parts(whole))
    before = gpu.parsed
    call(whole[:, :, :, 3], lse, **parts(whole))  # next to each other: checked in full
    call(x, lse, dq=one, dk=array())
    call(x, lse, dq=array(), dk=one)
    assert gpu.parsed == before + 2


def test_copies_are_made_in_each_call(gpu: Gpu) -> None:
    """A call copies q for a negative scale, odd rows, and a log-sum-exp with gaps."""
    gaps = array(2, 4, 400, dtype=np.float32)[:, :, ::2]
    for options in ({"scale": -0.5}, {"x": array(2, 4, 200, 65)}, {"lse": gaps}):
        for _ in range(2):
            before = gpu.parsed
            call(**options)
            assert gpu.parsed == before + 1, options


def test_another_device(gpu: Gpu) -> None:
    x, lse = array(), array(2, 4, 200, dtype=np.float32)
    call(x, lse)
    gpu.current = 1
    with pytest.raises(ValueError, match="is on device 0"):
        call(x, lse)
