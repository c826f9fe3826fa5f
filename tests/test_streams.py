"""compiler/streams.py: which streams are kept, and how long."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from played_gpu import Stream as ForeignStream

cupy = pytest.importorskip("cupy")

from cufa.compiler import streams  # noqa: E402
from cufa.compiler.streams import Streams  # noqa: E402

_MOST = streams._MOST


class Stream(cupy.cuda.Stream):  # type: ignore[misc, name-defined]
    """Stands for a stream of CuPy's."""

    capturing = done = False

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __del__(self) -> None:
        """Leave the driver alone."""

    def is_capturing(self) -> bool:
        """Whether it is being captured."""
        return self.capturing


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give what stands for the driver's function the thread's mode of capture, the last one."""
    modes = [0]

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]
        return 0

    monkeypatch.setattr(streams, "_exchange_capture_mode", lambda: exchange)
    return modes


def given(kept: Streams, first: int, end: int) -> list[weakref.ref[Stream]]:
    """Keep new streams that nobody else has."""
    references = []
    for number in range(first, end):
        stream = Stream(100 + number)
        assert kept.keep(stream)
        references.append(weakref.ref(stream))
    return references


def there(references: list[weakref.ref[Stream]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_streams_stay_while_work_is_pending(modes: list[int]) -> None:
    kept = Streams()
    references = given(kept, 0, 3 * _MOST)
    assert there(references) == 3 * _MOST
    assert modes[-1] == 0  # as it was
    assert streams._RELAXED in modes


def test_streams_whose_work_is_done_go() -> None:
    kept = Streams()
    references = given(kept, 0, _MOST)
    for reference in references[1:]:
        reference().done = True  # type: ignore[union-attr]
    assert there(references) == _MOST
    references += given(kept, _MOST, _MOST + 1)
    assert there(references) == 2
    references[0]().done = True  # type: ignore[union-attr]
    references += given(kept, _MOST + 1, 2 * _MOST)
    assert references[0]() is None


def test_it_is_not_looked_at_each_launch_what_is_done(modes: list[int]) -> None:
    """However many streams there are."""
    kept = Streams()
    references = given(kept, 0, 100 * _MOST)
    assert there(references) == 100 * _MOST
    assert len(modes) < 20


def test_streams_that_somebody_has_are_not_asked() -> None:
    """They may be captured, which is over when a stream is asked what is pending in it."""

    class Asked(Stream):
        @property
        def done(self) -> bool:  # type: ignore[override]
            raise AssertionError

    kept = Streams()
    streams_of_others = [Asked(1000 + number) for number in range(2 * _MOST)]
    for stream in streams_of_others:
        assert kept.keep(stream)
    references = given(kept, 0, 4 * _MOST)
    assert there(references) == 4 * _MOST
    assert all(kept._kept[stream.ptr] is stream for stream in streams_of_others)


def test_those_of_threads_that_have_them() -> None:
    """What a thread has is not let go by another one, at whatever point of a launch it is."""
    kept, problems = Streams(), []

    def launches(first: int) -> None:
        for number in range(first, first + 500):
            stream = Stream(number)
            stream.done = True
            if not (kept.keep(stream) and kept._kept.get(number) is stream):
                problems.append(number)

    threads = [threading.Thread(target=launches, args=(1000 * (n + 1),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(kept._kept) <= 2 * _MOST + 4


@pytest.mark.parametrize("ptr", [0, 1, 55])
def test_streams_of_cupy(ptr: int) -> None:
    assert Streams().keep(Stream(ptr))


def test_streams_that_others_may_destroy() -> None:
    """That of a thread goes with the thread."""
    kept = Streams()
    assert not kept.keep(ForeignStream(ptr=56))
    assert not kept.keep(Stream(streams._PER_THREAD))
    assert not kept._kept


def test_a_stream_with_the_name_of_one_that_has_gone() -> None:
    """It is another one: what is kept is an object."""
    kept, streams_of_one_name = Streams(), [Stream(5), Stream(5)]
    for stream in streams_of_one_name:
        kept.keep(stream)
    assert kept._kept[5] is streams_of_one_name[1]
