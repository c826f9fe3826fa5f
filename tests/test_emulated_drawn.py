"""decode.cu on the host, where blocks draw pieces of long units one after the other."""

from __future__ import annotations

from typing import Any

import kernel_in_front
import numpy as np
import pytest
from emulated import Emulator, needs_compiler
from test_emulated import emulator  # noqa: F401
from test_emulated_decode import checked, emulated  # noqa: F401

from cufa import device
from cufa.planner import decode_units, decode_variants

pytestmark = needs_compiler

EQUAL, SHORT = [700] * 4, [900, 500, 17, 833]
SOME = [
    *([1200], EQUAL, SHORT),
    *([1, 900, 0, 899, 900], [900, 900, 1, 900], [1] * 9),  # pieces without tiles
    *([1024, 1056, 1024], [768, 800, 770], [512, 520, 300]),  # of more keys, fewer pieces
]


@pytest.fixture(autouse=True)
def drawn(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:  # noqa: F811
    """Draw pieces of few keys, on a GPU of three multiprocessors."""
    on(3, monkeypatch)
    monkeypatch.setattr(decode_variants, "_MUCH", 0)
    monkeypatch.setattr(decode_variants, "_LITTLE", 0)
    monkeypatch.setattr(decode_variants, "_SHORT_UNIT", 0)
    monkeypatch.setattr(decode_units, "_PIECE", 1 << 15)
    monkeypatch.setattr(decode_units, "_LEAST_DRAWN", 0)
    monkeypatch.setattr(decode_units, "_MANY_WAVES", 20)
    monkeypatch.setattr(decode_units, "_MOST_OF_PIECE", 1 << 14)
    monkeypatch.setattr(decode_units, "_DRAWN_DTYPES", ("float16", "bfloat16", "float32"))
    return emulated


def on(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = device.named("h200")._replace(sm_count=multiprocessors)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)


def assert_drew(emulator: Emulator, dtype: str = "bfloat16") -> None:  # noqa: F811
    assert dtype in {variant.dtype for variant in emulator._libraries if variant.draws}


@pytest.mark.parametrize("lengths", SOME, ids=str)
@pytest.mark.parametrize("stale", [0, 1, 2, 3])
def test_lengths(drawn: Emulator, rng: np.random.Generator, lengths: list[int], stale: int) -> None:
    drawn.stale = stale
    checked(rng, lengths, d=128, dv=128)
    assert_drew(drawn)


@pytest.mark.parametrize(
    "options",
    [
        {"d": 128, "dv": 128, "hq": 2, "dtype": "float16"},
        {"d": 256, "dv": 256, "hq": 4},
        {"d": 256, "dv": 256, "sq": 4},
        {"d": 256, "dv": 128, "hk": 1},
        {"d": 128, "dv": 128, "window": (290, 0)},
        {"d": 128, "dv": 128, "sq": 4, "softcap": 9.0},
        {"d": 128, "dv": 128, "unified_max": 0.0},
        {"d": 128, "dv": 128, "unified_max": -200.0},
        {"d": 256, "dv": 256, "unified_max": -200.0},
        {"dtype": "float32", "d": 256, "dv": 256},
    ],
    ids=str,
)
def test_options(drawn: Emulator, rng: np.random.Generator, options: dict[str, Any]) -> None:
    for lengths in (EQUAL, SHORT, [1, 900, 0, 899, 900]):
        checked(rng, lengths, **options)
    assert_drew(drawn, options.get("dtype", "bfloat16"))


def test_more_sequences_than_lanes(drawn: Emulator, rng: np.random.Generator) -> None:
    """Whose lengths are looked up, once they are there; and which share out all keys, or draw."""
    for lengths in ([70] * 40, [*rng.integers(300, 400, 39), 400], [1] * 39 + [400], [9, 400] * 33):
        for drawn.stale in (0, 1):
            checked(rng, lengths, d=128, dv=128, hq=1, hk=1)
    assert_drew(drawn)


@pytest.mark.parametrize("multiprocessors", [5, 12, 20])
@pytest.mark.parametrize("stale", [0, 1])
def test_pieces_are_few(
    drawn: Emulator,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: int,
    stale: int,
) -> None:
    """So that blocks begin with all there are, or some with none, or those are short."""
    on(multiprocessors, monkeypatch)
    drawn.stale = stale
    for lengths in ([20] * 2, [20] * 8, [250, 7, 256, 300], [700], EQUAL, SHORT, [900, 1, 900]):
        checked(rng, lengths, d=128, dv=128)
        checked(rng, lengths, d=128, dv=128, unified_max=-200.0)
    checked(rng, [*[20] * 39, 90], d=128, dv=128)
    assert_drew(drawn)


@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("lengths", [EQUAL, SHORT, [900, 1, 900]], ids=str)
def test_lengths_that_are_still_written(
    drawn: Emulator, rng: np.random.Generator, lengths: list[int], seed: int
) -> None:
    """While blocks and warps take turns at random."""
    drawn.seed = seed
    checked(rng, lengths, d=128, dv=128)
    assert_drew(drawn)


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_the_own_length_is_written_after_the_first(
    drawn: Emulator, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of many sequences, all are guessed to be as long as that; the own one had less pieces."""

    def one_less(rng: np.random.Generator, array: np.ndarray, most: int) -> np.ndarray:
        return np.concatenate([array[:1], array[1:] - 1])

    on(20, monkeypatch)
    monkeypatch.setattr(decode_units, "_PIECE", 1 << 18)
    monkeypatch.setattr(kernel_in_front, "_others", one_less)
    drawn.seed = seed
    checked(np.random.default_rng(1), [257] * 33, d=128, dv=128, hq=1, hk=1)
    assert_drew(drawn)


def test_results_do_not_depend_on_who_draws(drawn: Emulator) -> None:
    """Float32 shows if a piece's keys are added up in another order."""
    found = set()
    for drawn.seed in range(9):
        rng = np.random.default_rng(1)
        out = checked(rng, [833, 900, 17, 500], d=128, dv=128, dtype="float32")
        found.add(out.tobytes())
    assert len(found) == 1
    assert_drew(drawn, "float32")
