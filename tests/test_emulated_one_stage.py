"""decode.cu on the host, with rings of one stage: warps wait for each other before they ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from test_emulated import emulator  # noqa: F401
from test_emulated_decode import both_shares, checked, emulated, in_turn, shares  # noqa: F401

from cufa import device
from cufa.planner import decode_variants
from cufa.planner.decode_model import Items

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def one_stage(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:  # noqa: F811
    """Take one stage however little is read, on a GPU of so few multiprocessors that units join."""
    few = device.named("h200")._replace(sm_count=3)
    monkeypatch.setattr(device, "of_id", lambda device_id: few)
    monkeypatch.setattr(decode_variants, "_MUCH", 0)
    return emulated


def assert_waited(emulator: Emulator) -> None:  # noqa: F811
    ours = [v for v in emulator.variants if v.stages == 1 and not v.whole]
    assert {v.warps for v in ours} & {4, 8}


OPTIONS: list[dict[str, Any]] = [
    *({"d": 64}, {"d": 64, "page_size": 64}, {"d": 128, "dv": 128}, {"d": 96, "dv": 96}),
    *({"d": 256, "dv": 256}, {"d": 256, "dv": 256, "page_size": 16}, {"d": 192, "dv": 128}),
    *({"d": 128, "dv": 128, "page_size": 32, "window": (90, 0)}, {"sq": 4, "softcap": 9.0}),
    *({"d": 64, "page_size": 16}, {"d": 128, "dv": 128, "page_size": 16, "window": (90, 0)}),
    {"d": 128, "dv": 128, "page_size": 48},
    *({"dtype": "float32", "d": 128, "dv": 128}, {"dtype": "float32", "d": 256, "dv": 256}),
]


@both_shares
@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@exhaustive("decode", but=in_turn(OPTIONS))
def test_lengths(
    one_stage: Emulator, rng: np.random.Generator, options: dict[str, Any], stale: int
) -> None:
    """No keys, few keys so that some warps have no tile, and many keys."""
    one_stage.stale = stale
    options = {"dv": 64, **options}
    checked(rng, [700], **options)
    checked(rng, [0, 500, 17, 333], **options)
    checked(rng, [1, 3, 97, 0, 299], **options)
    assert_waited(one_stage)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("unified_max", "factor"), [(0.0, 1), (0.0, 30), (-200.0, 1)])
@exhaustive("decode", but=lambda dtype, factor: (dtype == "float16") == (factor == 1))
def test_a_warp_that_takes_keys_again_waits_for_none(
    one_stage: Emulator, rng: np.random.Generator, dtype: str, unified_max: float, factor: float
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "unified_max": unified_max, "scale": factor / 8}
    checked(rng, [0, 500, 77, 3], **options)
    checked(rng, [600], d=128, dv=128, **options)
    assert_waited(one_stage)


def test_a_share_of_many_units(one_stage: Emulator, rng: np.random.Generator) -> None:
    """Blocks whose shares begin and end anywhere."""
    for lengths in ([40] * 7 + [900], [900] + [40] * 7, [64, 65, 63, 300, 1, 130]):
        checked(rng, lengths, d=128, dv=128)
        checked(rng, lengths, d=256, dv=256, page_size=16)
    assert_waited(one_stage)


@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("equal", [True, False])
@exhaustive("decode", one_in=2)
def test_a_block_for_each_of_many_units(
    one_stage: Emulator,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    equal: bool,
) -> None:
    """Which asks for K alone, and then for V, of tiles in one page or in two."""
    few = device.named("h200")._replace(sm_count=10)
    monkeypatch.setattr(device, "of_id", lambda device_id: few)
    monkeypatch.setattr(Items, "are_whole", lambda items, element_bytes: False)
    lengths = [512] * 40 if equal else [512, *map(int, rng.integers(0, 513, 39))]
    checked(rng, lengths, d=128, dv=128, page_size=page_size)
    ours = [v for v in one_stage.variants if v.stages == 1 and not v.whole]
    assert (32, 4, 2) in {(v.bn, v.warps, v.blocks_per_sm) for v in ours}
