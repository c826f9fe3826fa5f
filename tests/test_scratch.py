"""launch/scratch.py: what launches share, outside of captures and in them."""

from __future__ import annotations

import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")

from cufa.launch import scratch


class Numbers:
    """An array of CuPy's pool, as far as its address goes."""

    def __init__(self, address: int) -> None:
        self.data = SimpleNamespace(ptr=address)


class Field:
    """A device with memory that begins at 1 << 40, and at most one capture at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capture: tuple[int, int] | None = None
        self.stream = 0
        self.allocated: list[tuple[int, int]] = []
        self.pool: dict[int, int] = {}  # address and bytes of arrays that are alive
        cuda = SimpleNamespace(get_current_stream=lambda: self)
        cupy = SimpleNamespace(empty=self._empty, cuda=cuda)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(scratch, "_capture", lambda: self.capture)
        monkeypatch.setattr(scratch.counters, "zeros", self._zeros)
        self.memory = scratch.Scratch(0)

    @property
    def ptr(self) -> int:
        """Of the current stream."""
        return self.stream

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self.capture is not None

    def _empty(self, floats: int, dtype: Any) -> Any:
        assert self.capture is None
        address = max((a + n for a, n in self.pool.items()), default=4096)
        self.pool[address] = 4 * floats
        array = Numbers(address)
        weakref.finalize(array, self.pool.pop, address)
        return array

    def _zeros(self, nbytes: int) -> Any:
        assert self.capture is None
        first = (1 << 40) + sum(size for _, size in self.allocated)
        self.allocated.append((first, nbytes))
        return SimpleNamespace(ptr=first)

    def captured(self, number: int, *launches: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the addresses that the launches of a capture have."""
        self.capture = number, 0
        try:
            return [self.memory.take(*launch)[:2] for launch in launches]
        finally:
            self.capture = None


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Field:
    return Field(monkeypatch)


def test_words_of_a_capture_hold_no_numbers_of_another_launch(field: Field) -> None:
    field.memory.take(5000, 100_000)
    few, many = field.captured(1, (132, 100_000), (5000, 20_000))
    assert few == many
    words, numbers = few
    assert words + 4 * 5000 <= numbers
    ((first, size),) = [(a, n) for a, n in field.allocated if a <= words < a + n]
    assert numbers + 4 * 100_000 <= first + size


def test_captures_have_memory_of_their_own(field: Field) -> None:
    field.memory.take(100, 1000)
    taken = [field.captured(i, (100, 1000), (7, 10)) for i in range(8)]
    assert all(first == second for first, second in taken)
    assert len({first for first, _ in taken}) == 8
    with pytest.raises(RuntimeError, match=r"call cufa\.decode with such arrays before it"):
        field.captured(8, (100, 1000))
    field.memory.take(100, 1000)
    field.captured(8, (100, 1000))


def test_a_launch_that_is_larger_than_any_before(field: Field) -> None:
    field.memory.take(10, 10)
    with pytest.raises(RuntimeError, match="no memory is set aside"):
        field.captured(1, (10, 1 << 22))
    with pytest.raises(RuntimeError, match="at most 65536 blocks, not 65537"):
        field.captured(1, (65537, 10))
    field.memory.take(10, 1 << 22)
    field.captured(1, (10, 1 << 22))


def test_memory_that_is_set_aside_is_bounded(field: Field) -> None:
    for floats in range(1, 40_000_000, 1_000_003):
        field.memory.take(100, floats)
    kept = [memory.ptr for memory in field.memory._reserves]
    assert len(kept) == 1
    assert len(field.allocated) < 40  # it grows seldom


# --- outside of captures ---


def test_the_launches_of_a_stream_have_the_same_numbers(field: Field) -> None:
    words, numbers, _ = field.memory.take(100, 1000)
    others, again, _ = field.memory.take(100, 700)
    assert numbers == again
    assert others >= words + 400
    assert len(field.pool) == 1
    field.stream = 77
    _, elsewhere, _ = field.memory.take(100, 1000)
    assert elsewhere >= numbers + 4000 or elsewhere + 4000 <= numbers
    field.stream = 0
    assert field.memory.take(100, 1000)[1] == numbers


def test_numbers_live_until_their_launch_is_queued(field: Field) -> None:
    """Also if another thread has needed more for the same stream meanwhile."""
    _, numbers, kept = field.memory.take(100, 1000)
    _, more, _ = field.memory.take(100, 50_000)
    assert field.pool[numbers] >= 4000
    assert more >= numbers + 4000
    assert field.pool[more] >= 200_000
    del kept
    assert list(field.pool) == [more]


def test_numbers_that_are_kept_are_bounded(field: Field) -> None:
    for stream in range(3, 200):
        field.stream = stream
        field.memory.take(100, 1000)
    assert len(field.pool) == 64
    address, size = field.memory.take(100, 1 << 26)[1:][0], 4 << 26
    assert address not in field.pool  # given back at once
    assert sum(field.pool.values()) < size
    field.stream = 3  # given up, and made anew
    field.memory.take(100, 1000)
    assert len(field.pool) == 64


def test_each_thread_has_a_default_stream_of_its_own(field: Field) -> None:
    field.stream = 2  # cudaStreamPerThread
    numbers = [field.memory.take(100, 1000)[1]]
    thread = threading.Thread(target=lambda: numbers.append(field.memory.take(100, 1000)[1]))
    thread.start()
    thread.join()
    assert len(set(numbers)) == 2


def test_words_go_round(field: Field) -> None:
    """Those of a launch are not another's before many launches have been."""
    taken = [field.memory.take(132, 1000)[0] for _ in range(20_000)]
    assert len(set(taken)) == (1 << 20) // 132
    assert taken[0] == taken[len(set(taken))]
    large = field.memory.take(1 << 20, 1000)[0]
    assert {a for a, n in field.allocated if a <= large and large + (4 << 20) <= a + n}
