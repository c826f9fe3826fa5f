"""counters.py: words from which blocks draw their tiles, on a GPU that the host plays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from played_gpu import Gpu, Stream, on_gpu
from reference import assert_accepted
from test_launch import checked, in_threads, legal

import cufa
from cufa import device
from cufa.launch import counters

RING, RESERVE = 8, 4


@pytest.fixture
def small(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Play a GPU with one multiprocessor, so that few tiles are more than blocks; and few words."""
    one = device.named("h200")._replace(sm_count=1)
    monkeypatch.setattr(device, "of_id", lambda device_id: one)
    monkeypatch.setattr(counters, "_RING", RING)
    monkeypatch.setattr(counters, "_RESERVE", RESERVE)
    return gpu


def many(rng: np.random.Generator, dtype: str = "float16", **sizes: Any) -> dict[str, Any]:
    """Return a call of more tiles than blocks begin with, unless `sizes` say else."""
    return legal(rng, dtype, **{"hq": 16, **sizes})


def drawn(gpu: Gpu, call: dict[str, Any], causal: bool = True) -> int:
    """Return the address of the counter in a launch; 0 if it has none."""
    checked(call, causal=causal)
    return gpu.counters[-1]


def words(gpu: Gpu) -> set[int]:
    """Return the addresses of all words that were set to zero."""
    return {
        address
        for memory in gpu.filled_memory
        for address in range(memory.ctypes.data, memory.ctypes.data + memory.nbytes, 4)
    }


def test_only_tiles_that_wait_for_a_block_are_drawn(small: Gpu, rng: np.random.Generator) -> None:
    for _ in range(2):
        assert drawn(small, many(rng), causal=True)
        assert drawn(small, many(rng, sq=300), causal=True)
        assert not drawn(small, many(rng), causal=False)
        for heads in (2, 4):  # a block has two tiles of its own
            assert not drawn(small, many(rng, b=1, hq=heads), causal=True)


def test_ordinary_launches_take_words_in_turn(small: Gpu, rng: np.random.Generator) -> None:
    """Whatever their stream, and whatever they compute: there are more words than launches wait."""
    calls = [many(rng), many(rng, "bfloat16"), many(rng, sq=300)]
    found = []
    for n in range(2 * RING):
        small.stream = Stream()
        found.append(drawn(small, calls[n % 3]))
    assert len(set(found[:RING])) == RING
    assert found[RING:] == found[:RING]
    assert set(found) <= words(small)
    assert len(small.filled_memory) == 1


def test_each_device_has_its_counters(small: Gpu, rng: np.random.Generator) -> None:
    host = many(rng)
    found = []
    for current in (0, 1, 0, 1):
        small.current = current
        found.append(drawn(small, {name: on_gpu(x.host) for name, x in host.items()}))
    assert len(small.filled_memory) == 2
    of_device = [
        [bool(memory.ctypes.data <= x < memory.ctypes.data + memory.nbytes) for x in found]
        for memory in small.filled_memory
    ]
    assert of_device == [[True, False, True, False], [False, True, False, True]]


def test_captured_launches_have_words_for_good(small: Gpu, rng: np.random.Generator) -> None:
    """A graph may be replayed at any time, while anything else runs."""
    call = many(rng)
    usual = {drawn(small, call)}
    captured: list[int] = []
    for _ in range(5):
        small.stream = Stream(capturing=True)
        captured += [drawn(small, call) for _ in range(3)]
        small.stream = Stream()
        usual |= {drawn(small, call) for _ in range(RING)}
    assert len(set(captured)) == 15
    assert not usual & set(captured)
    assert usual | set(captured) <= words(small)


@pytest.mark.parametrize("warm_up", [{"sq": 300}, {"b": 1, "hq": 2}], ids=["drawn", "not drawn"])
@pytest.mark.parametrize("causal", [True, False])
def test_any_call_before_a_capture_reserves_words(
    small: Gpu, rng: np.random.Generator, warm_up: dict[str, Any], causal: bool
) -> None:
    """Also one that draws no tiles itself."""
    cufa.attention(**many(rng, **warm_up), causal=causal)
    filled_memory = len(small.filled_memory)
    small.stream = Stream(capturing=True)
    assert drawn(small, many(rng)) in words(small)
    assert len(small.filled_memory) == filled_memory == 1


def test_no_words_are_left_in_a_capture(small: Gpu, rng: np.random.Generator) -> None:
    call = many(rng)
    small.stream = Stream(capturing=True)
    for number in (0, RESERVE):
        for _ in range(number):
            drawn(small, call)
        launches = len(small.launches)
        with pytest.raises(RuntimeError, match="no counter is left for a captured launch"):
            cufa.attention(**call, causal=True)
        assert len(small.launches) == launches
        assert cufa.attention(**call) is not None  # which needs none
        small.stream = Stream()
        drawn(small, call)
        small.stream = Stream(capturing=True)
    assert len({drawn(small, call) for _ in range(RESERVE)}) == RESERVE


@pytest.mark.parametrize("between", [{}, {"sq": 300}, {"b": 1, "hq": 2}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_any_call_between_captures_reserves_words(
    small: Gpu, rng: np.random.Generator, between: dict[str, Any], causal: bool
) -> None:
    """However many there are: also one that draws no tiles itself."""
    call = many(rng)
    drawn(small, call)
    captured: list[int] = []
    for _ in range(3 * RESERVE):
        small.stream = Stream(capturing=True)
        captured.append(drawn(small, call))
        small.stream = Stream()
        cufa.attention(**many(rng, **between), causal=causal)
    assert len(set(captured)) == 3 * RESERVE
    assert set(captured) <= words(small)


def test_threads_take_different_words(small: Gpu, rng: np.random.Generator) -> None:
    """Also when the first launches come at once, each of another problem."""
    calls = [many(rng, sq=8 + n) for n in range(4)]
    small.slow = True

    def work(number: int) -> None:
        out = cufa.attention(**calls[number], causal=True)
        cufa.attention(**calls[number], causal=True)
        assert_accepted(out, None, *(calls[number][name].get() for name in "qkv"), causal=True)

    in_threads(4, work)
    assert len(small.counters) == len(set(small.counters)) == 8
    assert len(small.filled_memory) == 1
