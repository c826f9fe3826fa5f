"""Calls of `attention` that are like an earlier one: what they still notice."""

from __future__ import annotations

import copy
import gc
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from played_gpu import Gpu, on_gpu

import cufa
from cufa.features.window import NO_WINDOW
from cufa.launch import calls
from cufa.remembered import remember

#: Types are the concern of tests/test_types.py.
attention: Any = cufa.attention
attention_backward: Any = cufa.attention_backward

#: One option each that differs from its default.
OPTIONS: list[dict[str, Any]] = [
    *({}, {"causal": True}, {"causal": "top-left"}, {"window": (9, 0)}, {"window": (0, 9)}),
    *({"scale": 0.5}, {"scale": np.float64(0.25)}, {"softcap": 20.0}, {"return_lse": True}),
    *({"attention_chunk": 64}, {"layout": "bshd"}, {"batch_invariant": True}),
    *({"kernel": "fa3_wgmma"}, {"causal": True, "scale": 0.5}),
]


def array(dtype: Any = np.float16) -> Any:
    return on_gpu(np.ones((2, 4, 200, 64), dtype))


def test_are_not_checked_in_full_again(gpu: Gpu) -> None:
    """Whatever the call in front was, and whether its options were the same objects."""
    x = array()
    for _ in range(2):
        for options in OPTIONS:
            for _ in range(2):
                attention(x, x, x, **{name: copy.deepcopy(y) for name, y in options.items()})
    assert gpu.parsed == len(OPTIONS)
    assert len(gpu.launches) == 4 * len(OPTIONS)


@pytest.mark.parametrize(
    ("name", "known", "other"),
    [
        ("causal", True, 1),
        ("return_lse", False, 0),
        ("batch_invariant", False, 0.0),
        ("window", (1, 0), (True, 0)),
        ("window", (1, 0), [1, 0]),
        ("scale", 1.0, True),
        ("attention_chunk", 1, 1.0),
        ("kernel", None, 0),
    ],
)
def test_equal_values_of_other_types_are_refused(
    gpu: Gpu, name: str, known: object, other: object
) -> None:
    x = array()
    for _ in range(2):
        attention(x, x, x, **{name: known})
    with pytest.raises(TypeError, match=name):
        attention(x, x, x, **{name: other})


def test_arrays_are_neither_compared_nor_left_out(gpu: Gpu) -> None:
    """Not even where a call before had None in their place."""
    x, slopes = array(), on_gpu(np.ones(4, np.float32))
    for _ in range(2):
        attention(x, x, x, alibi_slopes=None, window=NO_WINDOW)
        attention(x, x, x, alibi_slopes=slopes, window=NO_WINDOW)
    assert gpu.parsed == 2
    with pytest.raises(ValueError, match="alibi_slopes"):
        attention(x, x, x, alibi_slopes=on_gpu(np.ones(3, np.float32)), window=NO_WINDOW)


def test_arguments_that_are_not_options_are_checked(gpu: Gpu) -> None:
    x = array()
    for _ in range(2):
        attention(x, x, x, causal=True)
    y = array(np.float32)
    with pytest.raises(TypeError, match="k"):
        attention(x, y, x, causal=True)
    with pytest.raises(ValueError, match="out"):
        attention(x, x, x, causal=True, out=x)
    on_host = np.ones((1, 1, 4, 8), np.float32)
    assert isinstance(attention(on_host, on_host, on_host, causal=True), np.ndarray)


def test_wrong_names_and_numbers_of_arguments(gpu: Gpu) -> None:
    x = array()
    attention(x, x, x)
    with pytest.raises(TypeError, match=r"attention\(\) got an unexpected .* 'is_causal'"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match=r"attention\(\) missing 1 required .*'v'"):
        attention(x, x)
    with pytest.raises(TypeError, match=r"attention\(\) takes 3 positional"):
        attention(x, x, x, None)


def test_a_dropout_is_not_left_out(gpu: Gpu) -> None:
    """Its seed differs from call to call."""
    x = array()
    for p, seed in ((0.0, None), (0.5, 1), (0.5, 2), (0.0, None), (0, None)):
        attention(x, x, x, dropout_p=p, seed=seed)
    assert gpu.parsed == 2
    with pytest.raises(ValueError, match="seed"):
        attention(x, x, x, dropout_p=0.5, seed=None)


def fails(*_: object) -> Any:
    raise ZeroDivisionError


#: Numbers that compare as others do not.
EQUAL_TO_ALL: Any = type(
    "EqualToAll", (int,), {"__eq__": lambda *_: True, "__hash__": int.__hash__}
)
NOT_COMPARABLE: Any = type("NotComparable", (int,), {"__eq__": fails, "__hash__": fails})
NOT_HASHABLE: Any = type("NotHashable", (int,), {"__hash__": None})
EQUAL_FLOAT: Any = type(
    "EqualFloat", (float,), {"__eq__": lambda *_: True, "__hash__": lambda _: 1}
)


def test_subclasses_of_numbers_are_checked_in_full(gpu: Gpu) -> None:
    """How they compare does not matter."""
    x = array()
    attention(x, x, x, window=(1, 0))
    for kind in (EQUAL_TO_ALL, NOT_COMPARABLE, NOT_HASHABLE):
        for left in (1, 9, 9):
            attention(x, x, x, window=(kind(left), 0))
    assert gpu.parsed == 10
    for scale in (0.1, 3.0):
        attention(x, x, x, scale=EQUAL_FLOAT(scale))
    assert gpu.parsed == 12
    on_host = np.ones((1, 1, 4, 8), np.float32)
    for _ in range(2):
        attention(on_host, on_host, on_host, window=(NOT_COMPARABLE(1), 0))


def halved(_: object, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 0.5


NO_HASH: Any = type("NoHash", (type,), {"__hash__": None, "__eq__": lambda a, b: a is b})
HALVED: Any = NO_HASH("Halved", (), {"__call__": halved})


def test_objects_of_a_type_that_has_no_hash(gpu: Gpu) -> None:
    x, on_host = array(), np.ones((1, 1, 4, 8), np.float32)
    attention(on_host, on_host, on_host, score_mod=HALVED())
    attention(x, x, x, score_mod=HALVED())
    for name in ("bias", "seed"):
        with pytest.raises(TypeError, match=name):
            attention(x, x, x, **{name: HALVED()})


BUFFER = memoryview(bytearray(b"x"))  # whose hash raises a ValueError


@pytest.mark.parametrize("inside", [[1], BUFFER])
@pytest.mark.parametrize("options", [{}, {"precision": "fp8"}], ids=str)
def test_tuples_of_what_has_no_hash(gpu: Gpu, inside: object, options: dict[str, Any]) -> None:
    x, lse = array(), on_gpu(np.zeros((2, 4, 200), np.float32))
    for name in ("window", "scale", "layout"):
        value = ((inside,), 0)
        with pytest.raises((TypeError, ValueError), match=name):
            attention(x, x, x, **{name: value}, **options)
        with pytest.raises((TypeError, ValueError), match=name):
            attention_backward(x, x, x, x, x, lse, **{name: value})
    with pytest.raises(TypeError, match="sinks"):
        attention(x, x, x, sinks=types.SimpleNamespace(dtype=BUFFER), **options)


@pytest.mark.parametrize("options", [{}, {"precision": "fp8"}], ids=str)
def test_equal_times_are_different_numbers(gpu: Gpu, options: dict[str, Any]) -> None:
    x = array()
    for left in (np.timedelta64(12, "M"), np.timedelta64(1, "Y")):
        attention(x, x, x, window=(left, 0), **options)
    assert gpu.parsed == 2


def test_refused_options_are_not_kept(gpu: Gpu) -> None:
    class Refused:
        pass

    x, refused = array(), Refused()
    kept = weakref.ref(refused)
    with pytest.raises(TypeError, match="scale"):
        attention(x, x, x, scale=refused)
    del refused
    gc.collect()
    assert kept() is None


def test_threads(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share memories that are full."""
    monkeypatch.setattr(calls, "_latest_choices", {})
    x, on_host, interval = array(), np.ones((1, 1, 1, 8), np.float32), sys.getswitchinterval()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            for each in (x, on_host):
                attention(each, each, each, scale=float(rng.integers(90) + 1))

    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
    finally:
        sys.setswitchinterval(interval)


def test_what_is_forgotten_may_call_again() -> None:
    """It is deleted without the lock."""
    memory: dict[int, Any] = {}

    class Last:
        def __del__(self) -> None:
            remember(memory, 7, None, 2)

    for key in range(4):
        remember(memory, key, Last(), 2)
    assert len(memory) <= 2
