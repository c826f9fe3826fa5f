"""launch/workspace.py: memory of a stream's calls, and of captures."""

from __future__ import annotations

import sys
import threading
import time
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from played_gpu import Gpu, Stream, on_gpu
from test_launch import in_threads

pytest.importorskip("cupy")

import cufa
from cufa.compiler import jit
from cufa.launch import backward, workspace


class Field:
    """Streams, with at most one capture at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capture: tuple[int, int] | None = None
        self.stream = 0
        self.made: list[int] = []
        cuda = SimpleNamespace(get_current_stream=lambda: self)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, empty=self._empty))
        monkeypatch.setattr(workspace, "current_capture", lambda: self.capture)
        self.memory = workspace.Workspace()

    @property
    def ptr(self) -> int:
        """Name the current stream."""
        return self.stream

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self.capture is not None

    def _empty(self, shape: tuple[int], dtype: Any) -> Any:
        assert self.capture is None, "memory is allocated in a capture"
        self.made.append(shape[0])
        return SimpleNamespace(size=shape[0])


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Field:
    return Field(monkeypatch)


def test_calls_of_a_stream_have_the_same_memory(field: Field) -> None:
    first = field.memory.take(100)
    assert field.memory.take(60) is first
    larger = field.memory.take(200)
    assert larger is not first
    assert field.memory.take(100) is larger
    field.stream = 7
    assert field.memory.take(100) is not larger
    assert field.made == [100, 200, 100]


def test_a_capture_takes_that_of_its_stream_for_good(field: Field) -> None:
    field.stream = 7
    before = field.memory.take(100)
    field.capture = (1, 7)
    assert field.memory.take(100) is before
    assert field.memory.take(50) is before
    with pytest.raises(ValueError, match="make such a call before it"):
        field.memory.take(101)
    field.capture = None
    assert field.memory.take(100) is not before
    field.capture = (2, 7)
    assert field.memory.take(100) is not before


def test_a_capture_without_a_call_before(field: Field) -> None:
    field.memory.take(100)
    field.stream, field.capture = 7, (1, 7)
    with pytest.raises(ValueError, match="no memory is set aside"):
        field.memory.take(100)


def test_memory_that_is_kept_is_bounded(field: Field) -> None:
    for stream in range(20):
        field.stream = stream + 3
        field.memory.take(10)
    field.stream = 3
    field.memory.take(10)
    assert len(field.made) == 21


def test_launches_of_threads_do_not_mix(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a stream have the same memory: all launches of one come before those of another."""
    launched: list[int] = []

    def kernel(*_: Any) -> Any:
        def launch(*_: Any) -> None:
            launched.append(threading.get_ident())
            time.sleep(0.002)  # another thread may run here

        return launch

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(backward, "_prepared", {})
    monkeypatch.setattr(workspace, "_of_device", {})
    x, lse = on_gpu(np.ones((1, 2, 40, 32), np.float32)), on_gpu(np.ones((1, 2, 40), np.float32))
    in_threads(4, lambda _: cufa.attention_backward(x, x, x, x, x, lse))
    assert [len([*launches]) for _, launches in groupby(launched)] == [3] * 4


def test_a_capture_that_is_refused_writes_nothing(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, or of a place for a copy."""
    monkeypatch.setattr(backward, "_prepared", {})
    monkeypatch.setattr(workspace, "_of_device", {})
    monkeypatch.setattr(workspace, "current_capture", lambda: (1, 0))
    x, lse = on_gpu(np.ones((1, 2, 40, 32), np.float32)), on_gpu(np.ones((1, 2, 40), np.float32))
    turned = on_gpu(np.ones((1, 2, 32, 40), np.float32)).swapaxes(2, 3)
    nan = np.full((1, 2, 40, 32), np.nan, np.float32)
    given: dict[str, Any] = {name: on_gpu(nan) for name in ("dq", "dk")}
    lengths, wrt = on_gpu(np.array([30], np.int32)), ("q", "k")
    gpu.stream = Stream(capturing=True)
    of_turned = on_gpu(np.ones((1, 40, 2), np.float32)).swapaxes(1, 2)
    for dout, out, of_out, message in (
        (x, x, lse, "a backward pass is captured .* no memory is set aside"),
        (x, turned, lse, "out .* would be copied"),
        (turned, x, lse, "dout .* would be copied"),
        (x, x, of_turned, "lse .* would be copied"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            cufa.attention_backward(dout, x, x, x, out, of_out, lengths_k=lengths, wrt=wrt, **given)
    assert all(np.isnan(place.get()).all() for place in given.values())
    assert not gpu.launches
