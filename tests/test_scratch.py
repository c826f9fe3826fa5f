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


class Memory:
    """Memory of CuPy's pool, as far as its address goes."""

    def __init__(self, address: int) -> None:
        self.ptr = address
        self.filled = 0

    def memset_async(self, byte: int, nbytes: int) -> None:
        """Count the bytes that are all ones."""
        assert byte == 0xFF
        self.filled = nbytes


class Field:
    """A device with memory that begins at 1 << 40, and at most one capture at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capture: tuple[int, int] | None = None
        self.stream = 0
        self.allocated: list[tuple[int, int]] = []
        self.pool: dict[int, int] = {}  # address and bytes of arrays that are alive
        cuda = SimpleNamespace(get_current_stream=lambda: self, alloc=self._alloc)
        cupy = SimpleNamespace(cuda=cuda)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(scratch, "current_capture", lambda: self.capture)
        monkeypatch.setattr(scratch.counters, "filled", self._filled)
        self.memory = scratch.Scratch()

    @property
    def ptr(self) -> int:
        """The number of the current stream."""
        return self.stream

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self.capture is not None

    def _alloc(self, nbytes: int) -> Any:
        assert self.capture is None
        address = max((a + n for a, n in self.pool.items()), default=4096)
        self.pool[address] = nbytes
        memory = Memory(address)
        weakref.finalize(memory, self.pool.pop, address)
        return memory

    def _filled(self, nbytes: int, byte: int) -> Any:
        assert self.capture is None
        assert byte == 0xFF
        first = (1 << 40) + sum(size for _, size in self.allocated)
        self.allocated.append((first, nbytes))
        return SimpleNamespace(ptr=first)

    def captured(self, number: int, *launches: int) -> list[int]:
        """Return the addresses that the launches of a capture have, by the numbers of each."""
        self.capture = number, 0
        try:
            return [self.memory.take(floats).address for floats in launches]
        finally:
            self.capture = None


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Field:
    return Field(monkeypatch)


def test_captures_have_memory_of_their_own(field: Field) -> None:
    field.memory.take(1000)
    taken = [field.captured(i, 1000, 10) for i in range(8)]
    assert all(first == second for first, second in taken)
    assert len({first for first, _ in taken}) == 8
    with pytest.raises(RuntimeError, match=r"make such a call before it"):
        field.captured(8, 1000)
    field.memory.take(1000)
    field.captured(8, 1000)
    field.memory.take(1000)  # makes up for that one
    for i in range(8):
        field.captured(9 + i, 1000)


def test_a_launch_that_is_larger_than_any_before(field: Field) -> None:
    field.memory.take(10)
    with pytest.raises(RuntimeError, match="no memory is set aside"):
        field.captured(1, 1 << 22)
    field.memory.take(1 << 22)
    (address,) = field.captured(1, 1 << 22)
    ((first, size),) = [(a, n) for a, n in field.allocated if a <= address < a + n]
    assert address + (4 << 22) <= first + size


def test_memory_that_is_set_aside_is_bounded(field: Field) -> None:
    for floats in range(1, 40_000_000, 1_000_003):
        field.memory.take(floats)
    assert len(field.memory._reserves) == 1
    assert len(field.allocated) < 40  # it grows seldom
    assert max(size for _, size in field.allocated) == 128 << 20
    with pytest.raises(RuntimeError, match="more than 128 MiB"):
        field.captured(1, 40_000_000)
    field.captured(1, 32 << 20)


# --- outside of captures ---


def test_the_launches_of_a_stream_have_the_same_memory(field: Field) -> None:
    place = field.memory.take(1000)
    assert field.memory.take(700) == place
    assert place.memory.filled == place.nbytes >= 4000
    assert len(field.pool) == 1
    field.stream = 77
    elsewhere = field.memory.take(1000).address
    assert elsewhere >= place.address + 4000 or elsewhere + 4000 <= place.address
    field.stream = 0
    assert field.memory.take(1000) == place


def test_memory_lives_until_its_launch_is_queued(field: Field) -> None:
    """Also if another thread has needed more for the same stream meanwhile."""
    place = field.memory.take(1000)
    more = field.memory.take(500_000).address
    assert field.pool[place.address] >= 4000
    assert more >= place.address + 4000
    assert field.pool[more] >= 2_000_000
    del place
    assert list(field.pool) == [more]


def test_memory_that_is_kept_is_bounded(field: Field) -> None:
    for stream in range(3, 200):
        field.stream = stream
        field.memory.take(1000)
    assert len(field.pool) == 64
    place = field.memory.take(1 << 26)
    assert place.memory.filled == field.pool[place.address] == 4 << 26
    del place  # given back at once
    assert sum(field.pool.values()) < 4 << 26
    field.stream = 3  # given up, and made again
    field.memory.take(1000)
    assert len(field.pool) == 64


def test_each_thread_has_a_default_stream_of_its_own(field: Field) -> None:
    field.stream = 2  # cudaStreamPerThread
    numbers = [field.memory.take(1000).address]
    for _ in range(3):  # what stands for a thread that has ended comes again
        thread = threading.Thread(target=lambda: numbers.append(field.memory.take(1000).address))
        thread.start()
        thread.join()
    assert len(set(numbers)) == 4
