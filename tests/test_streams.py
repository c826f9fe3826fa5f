"""compiler/streams.py: which streams are kept, and how long."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any, ClassVar

import pytest
from played_gpu import Stream as ForeignStream

cupy = pytest.importorskip("cupy")

from cufa.compiler import streams  # noqa: E402
from cufa.compiler.streams import Streams  # noqa: E402


class Stream(cupy.cuda.Stream):  # type: ignore[misc, name-defined]
    """Stands for a stream of CuPy's."""

    capturing = done = False
    of_ptr: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.of_ptr[ptr] = self

    def __del__(self) -> None:
        """Leave the driver alone."""

    def is_capturing(self) -> bool:
        """Whether it is being captured."""
        return self.capturing


class Asked(Stream):
    """Says when it is asked whether it is done, if that is allowed."""

    broken = False

    def __init__(self, ptr: int) -> None:
        super().__init__(ptr)
        self.asked = 0

    @property
    def done(self) -> bool:  # type: ignore[override]
        """Whether it is done: never."""
        self.asked += 1
        if self.broken:
            raise RuntimeError("an error has invalidated the capture sequence")
        return False


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give what stands for the driver's function the thread's mode of capture, the last one."""
    modes = [0]

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]
        return 0

    def query(ptr: int) -> int:
        time.sleep(0)  # others' turn
        return 0 if Stream.of_ptr[ptr].done else 600  # CUDA_ERROR_NOT_READY

    monkeypatch.setattr(streams, "_exchange_capture_mode", lambda: exchange)
    monkeypatch.setattr(streams, "_query", lambda: query)
    return modes


def given(kept: Streams, first: int, end: int, kind: Any = Stream) -> list[weakref.ref[Any]]:
    """Keep new streams that nobody else has."""
    references = []
    for number in range(first, end):
        stream = kind(100 + number)
        assert kept.may_overlap(stream)
        references.append(weakref.ref(stream))
    return references


def there(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_streams_stay_while_work_is_pending(modes: list[int]) -> None:
    references = given(kept := Streams(), 0, 500)
    assert there(references) == len(kept._kept) == 500
    assert modes[-1] == 0  # as it was
    assert streams._RELAXED in modes


def test_streams_whose_work_is_done_go() -> None:
    """When others come: there are soon few."""
    kept = Streams()
    references = given(kept, 0, 100)
    for reference in references[1:]:
        reference().done = True  # type: ignore[union-attr]
    assert there(references) == 100
    references += given(kept, 100, 200)
    assert there(references[:100]) == 1
    references[0]().done = True  # type: ignore[union-attr]
    given(kept, 200, 300)
    assert references[0]() is None


def test_few_streams_are_kept_of_many_that_do_little() -> None:
    """Else CuPy's pool would keep the results of each."""
    kept = Streams()
    for number in range(500):
        stream = Stream(100 + number)
        assert kept.may_overlap(stream)
        stream.done = True
        del stream
        assert len(kept._kept) <= 2


def test_few_are_looked_at_when_one_comes() -> None:
    """However many there are; and none at the launches that follow in the same stream."""
    kept = Streams()
    references = given(kept, 0, 300, Asked)
    assert sum(reference().asked for reference in references) <= 2 * 300  # type: ignore[union-attr]
    stream = references[17]()
    before = [reference().asked for reference in references]  # type: ignore[union-attr]
    for _ in range(10):
        assert kept.may_overlap(stream)
    assert before == [reference().asked for reference in references]  # type: ignore[union-attr]


def test_streams_that_somebody_has_are_not_asked() -> None:
    """They may be captured, which is over when a stream is asked what is pending in it."""
    kept = Streams()
    streams_of_others = [Asked(1000 + number) for number in range(50)]
    for stream in streams_of_others:
        assert kept.may_overlap(stream)
    references = given(kept, 0, 200)
    assert there(references) == 200
    assert all(kept._kept[stream.ptr] is stream for stream in streams_of_others)
    assert not any(stream.asked for stream in streams_of_others)


def test_a_stream_of_a_capture_is_not_asked() -> None:
    """Nor does it matter to others what becomes of the one that its owner has dropped."""
    kept = Streams()
    (first,) = given(kept, 0, 1, Asked)
    first().capturing = True  # type: ignore[union-attr]
    given(kept, 1, 20)
    assert first().asked == 0  # type: ignore[union-attr]


def test_a_stream_that_cannot_be_asked() -> None:
    """The others go all the same."""
    kept = Streams()
    (first,) = given(kept, 0, 1, Asked)
    first().broken = True  # type: ignore[union-attr]
    references = given(kept, 1, 50)
    for reference in references:
        reference().done = True  # type: ignore[union-attr]
    given(kept, 50, 200)
    assert first().asked  # type: ignore[union-attr]
    assert there(references) == 0


def test_streams_of_threads() -> None:
    """What a thread has is not let go by another one, and of what none has no more stays."""
    kept, problems = Streams(), []

    def launches(first: int) -> None:
        for number in range(first, first + 500):
            stream = Stream(number)
            stream.done = True
            if not (kept.may_overlap(stream) and kept._kept.get(number) is stream):
                problems.append(number)

    threads = [threading.Thread(target=launches, args=(1000 * (n + 1),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    given(kept, 0, 3)
    assert len(kept._kept) <= 5


@pytest.mark.parametrize("ptr", [0, 1])
def test_streams_that_nobody_destroys(ptr: int) -> None:
    kept = Streams()
    for stream in (Stream(ptr), ForeignStream(ptr=ptr)):
        assert kept.may_overlap(stream)
    assert not kept._kept


def test_streams_that_others_may_destroy() -> None:
    """That of a thread goes with the thread; in a graph, what is captured runs elsewhere."""
    kept = Streams()
    adopted = Stream(57)
    adopted._foreign_stream_ref = object()
    for stream in (ForeignStream(ptr=56), Stream(streams._PER_THREAD), adopted):
        assert not kept.may_overlap(stream)
        stream.capturing = True
        assert kept.may_overlap(stream)
    assert not kept._kept


def test_a_stream_that_cupy_adopts() -> None:
    """As `Streams` knows it."""

    class Owner:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 58

    runtime = cupy.cuda.runtime
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "getDevice", lambda: 0)
        try:
            adopted = Stream.from_external(Owner())
        except runtime.CUDARuntimeError:
            pytest.skip("CuPy asks for the device")
    assert not streams._is_of_cupy(adopted)


def test_a_stream_with_the_name_of_one_that_has_gone() -> None:
    """It is another one: what is kept is an object."""
    kept, streams_of_one_name = Streams(), [Stream(5), Stream(5)]
    for stream in streams_of_one_name:
        assert kept.may_overlap(stream)
    assert kept._kept[5] is streams_of_one_name[1]
