"""launch/scratch.py: what launches share, outside of captures and in them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")

from cufa.launch import scratch


class Field:
    """A device with memory that begins at 1 << 40, and at most one capture at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capture: tuple[int, int] | None = None
        self.allocated: list[tuple[int, int]] = []
        self.memory = scratch.Scratch(0)
        empty = SimpleNamespace(empty=lambda n, t: SimpleNamespace(data=SimpleNamespace(ptr=7)))
        monkeypatch.setitem(sys.modules, "cupy", empty)
        monkeypatch.setattr(scratch, "is_capturing", lambda: self.capture is not None)
        monkeypatch.setattr(scratch, "_capture", lambda: self.capture)
        monkeypatch.setattr(scratch.counters, "zeros", self._zeros)

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
