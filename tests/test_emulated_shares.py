"""decode.cu on the host, where blocks share out the keys of sequences of unequal lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import on_gpu
from reference import random_inputs
from test_decode import assert_each_accepted
from test_emulated import emulator  # noqa: F401
from test_emulated_decode import checked, emulated  # noqa: F401

import cufa
from cufa import device
from cufa.planner import decode
from cufa.planner.decode import DecodePlan, plan_splits
from cufa.planner.decode_model import Items

pytestmark = needs_compiler

LENGTHS = [
    *([900, 500, 17, 833], [1, 900, 0, 899, 900], [900, 900, 1, 900], [1] * 9 + [700], [700] * 5),
    *([1] * 40 + [300], [*range(0, 400, 10)]),
]


@pytest.fixture(autouse=True)
def shares(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:  # noqa: F811
    """Cut units anywhere, if lengths differ at all."""
    for name in ("are_whole", "is_apart", "slack"):
        monkeypatch.setattr(Items, name, lambda *_: 0)
    return emulated


def on(multiprocessors: int, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a GPU of few multiprocessors, and the end of a unit count as a number of tiles."""
    gpu = device.named("h200")._replace(sm_count=multiprocessors)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)

    def plan(*given: Any) -> DecodePlan:
        return plan_splits(*given)._replace(ends=tiles)

    monkeypatch.setattr(decode, "plan_splits", plan)


@pytest.mark.parametrize("tiles", [0, 1, 5, 40])
@pytest.mark.parametrize("multiprocessors", [2, 7, 20, 60])
@pytest.mark.parametrize("stale", [0, 1])
@exhaustive(
    "decode", but=lambda multiprocessors, tiles: (multiprocessors + tiles) % 3 == 1, one_in=2
)
def test_the_end_of_a_unit_counts_as_some_tiles(
    shares: Emulator,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: int,
    tiles: int,
    stale: int,
) -> None:
    """Shares begin and end anywhere among them, or have no more than a part of them."""
    on(multiprocessors, tiles, monkeypatch)
    shares.stale = stale
    for lengths in LENGTHS:
        checked(rng, lengths, hq=2, hk=2)


@pytest.mark.parametrize("tiles", [0, 3, 30])
def test_without_lengths(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tiles: int
) -> None:
    for b, multiprocessors, hk in ((3, 7, 1), (5, 3, 2), (40, 7, 1), (33, 60, 2), (2, 50, 1)):
        on(multiprocessors, tiles, monkeypatch)
        q, k, v = random_inputs(rng, "bfloat16", b=b, hq=2 * hk, hk=hk, sq=1, sk=333, d=64, dv=64)
        out, lse = cufa.decode(*map(on_gpu, (q, k, v)), return_lse=True)
        assert_each_accepted(out.get(), lse.get(), q, k, v, [333] * b, causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 16},
        {"page_size": 1, "hk": 1},
        {"window": (290, 0)},
        {"d": 256, "dv": 256},
        {"d": 128, "dv": 64, "dtype": "float32"},
        {"unified_max": -200.0},
        {"sq": 8, "hq": 8, "hk": 2},
        {"sq": 16, "hq": 8, "hk": 2, "page_size": 16, "d": 128, "dv": 128},
        {"sq": 20, "hq": 8, "hk": 2},  # two tiles of rows
    ],
    ids=str,
)
@pytest.mark.parametrize("multiprocessors", [3, 17])
@pytest.mark.parametrize("lengths", LENGTHS[:-2], ids=str)
@exhaustive(
    "decode",
    but=lambda multiprocessors, options: (multiprocessors == 3) == ("sq" in options),
    one_in=2,
)
def test_options(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    multiprocessors: int,
    options: dict[str, Any],
    lengths: list[int],
) -> None:
    on(multiprocessors, 3, monkeypatch)
    checked(rng, lengths, **options)


@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("lengths", [[900, 1, 900], [400, 1, 1], [200, 9] * 17], ids=str)
@exhaustive("decode", but=lambda seed: seed <= 2)
def test_lengths_that_are_still_written(
    shares: Emulator,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    seed: int,
) -> None:
    """While blocks and warps take turns at random."""
    shares.seed = seed
    for tiles in (2, 30):
        on(7, tiles, monkeypatch)
        checked(rng, lengths, hq=1, hk=1)


def test_results_do_not_depend_on_turns(shares: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 shows if a piece's keys are added up in another order."""
    on(7, 3, monkeypatch)
    found = set()
    for shares.seed in range(7):
        out = checked(np.random.default_rng(1), [833, 900, 17, 500], dtype="float32")
        found.add(out.tobytes())
    assert len(found) == 1
