"""decode.cu on the host: many short sequences, of which a block each has all keys of a head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import LANES, Emulator, needs_compiler
from exhaustive import exhaustive
from test_emulated import emulator  # noqa: F401
from test_emulated_decode import checked, emulated  # noqa: F401

from cufa import device
from cufa.planner import decode, decode_model
from cufa.planner.decode import DecodePlan

pytestmark = needs_compiler


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[DecodePlan]:
    """Return what is planned from now on, of a GPU with two multiprocessors."""
    few = device.named("h200")._replace(sm_count=2)
    monkeypatch.setattr(device, "of_id", lambda device_id: few)
    plan, found = decode.plan_splits, list[DecodePlan]()

    def planned(*arguments: Any, **options: Any) -> DecodePlan:
        found.append(plan(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(decode, "plan_splits", planned)
    return found


def lengths_of(rng: np.random.Generator, sequences: int, longest: int) -> list[int]:
    some = [longest, 0, 1, 0, longest - 1, 16, 17, 15]
    return [*some, *map(int, rng.integers(0, longest + 1, sequences - len(some)))]


def assert_never_cut(plans: list[DecodePlan], units: int) -> None:
    assert {(found.splits, found.grid) for found in plans} == {(1, units)}


@pytest.mark.parametrize(
    "options",
    [
        *({"d": 128, "dv": 128}, {"d": 256, "dv": 256}, {"d": 192, "dv": 128}, {"d": 32, "dv": 32}),
        *({"d": 100, "dv": 100, "dtype": "float16"}, {"d": 121, "dv": 37, "dtype": "float32"}),
        *({"d": 128, "dv": 128, "page_size": 16}, {"d": 256, "dv": 64, "page_size": 48}),
        *({"d": 128, "dv": 128, "page_size": 7}, {"unified_max": 0.0}),
        *({"window": (20, None), "page_size": 1}, {"d": 128, "dv": 128, "window": (20, None)}),
        *({"sq": 8, "d": 128, "dv": 128}, {"sq": 8, "page_size": 16}),  # two warps share rows
        *({"sq": 8, "d": n, "dv": m, "page_size": 7} for n, m in ((96, 96), (32, 32), (128, 96))),
        *({"sq": 12, "d": 128, "dv": 128}, {"sq": 12, "page_size": 64, "window": (30, 0)}),
    ],
    ids=str,
)
@exhaustive("decode", one_in=2)
def test_mixed_lengths(
    emulated: Emulator,  # noqa: F811
    plans: list[DecodePlan],
    rng: np.random.Generator,
    options: dict[str, Any],
) -> None:
    """Also while the kernel in front still writes them, and warps or lanes take turns."""
    lengths = lengths_of(rng, 17, 90)
    looks = (0, 0), (1, 0), (3, 0), (4, 0), (0, 1), (0, 2), (0, LANES + 2), (0, LANES + 8)
    for emulated.stale, emulated.seed in looks:
        checked(rng, lengths, **{"hq": 4, "hk": 1, **options})
    assert_never_cut(plans, 17)


@pytest.mark.parametrize(("d", "page_size"), [(128, 0), (64, 16)])
def test_without_memory_for_pieces(
    emulated: Emulator,  # noqa: F811
    plans: list[DecodePlan],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    d: int,
    page_size: int,
) -> None:
    monkeypatch.setattr(decode_model, "_MOST_PARTIAL", 0)
    for emulated.stale in (0, 1):
        checked(rng, lengths_of(rng, 24, 200), d=d, dv=d, page_size=page_size)
    assert_never_cut(plans, 48)
