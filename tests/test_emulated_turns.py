"""decode.cu on the host, while the kernel in front of it still writes what it reads.

Blocks and warps take turns at random: they find other lengths and pages than each other, and than
there are in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from emulated import LANES, Emulator, needs_compiler
from exhaustive import exhaustive
from score_arrays import DECODE_FEATURES, options_of
from test_emulated import emulator  # noqa: F401
from test_emulated_decode import both_shares, checked, emulated, shares  # noqa: F401

from cufa import device

pytestmark = needs_compiler


@both_shares
@pytest.mark.parametrize(
    ("sm_count", "lengths", "options", "seeds"),
    [
        (2, [400, 1], {}, range(1, 9)),
        (2, [400, 1, 1], {}, range(1, 9)),  # blocks have several units, or have them no more
        (2, [400, 1], {"page_size": 16}, range(1, 9)),
        (2, [400, 1], {"page_size": 1}, range(1, 5)),
        (13, [90] * 3, {}, range(1, 9)),  # all are cut into equally many pieces
        (13, [50] * 5, {"num_splits": 2}, range(1, 5)),
        (60, [300] * 33, {}, [8]),  # whether they are, warps of a block guess one way or the other
        (13, [300] * 33, {"page_size": 64}, [LANES + 7]),  # lanes of a warp find other lengths
        (13, [100] * 33, {"page_size": 7, "num_splits": 2}, [LANES + 30]),
        (13, [150, 2, 400, 33], {"sq": 8}, [1, 2]),
        (13, [150, 2, 400, 33], {"sq": 16, "page_size": 64}, [1, 2]),
    ],
    ids=str,
)
@exhaustive("decode", but=lambda shares, sm_count: shares or sm_count == 13)  # noqa: F811
def test_lengths_and_pages_that_are_still_written(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    sm_count: int,
    lengths: list[int],
    options: dict[str, Any],
    seeds: Iterable[int],
) -> None:
    gpu = device.named("h200")._replace(sm_count=sm_count)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)
    for emulated.seed in seeds:
        checked(rng, lengths, **{"hq": 4, "hk": 1, **options})


@both_shares
@pytest.mark.parametrize(
    ("sm_count", "lengths", "options", "seeds"),
    [
        (2, [400, 1], {}, range(1, 5)),
        (2, [400, 1], {"page_size": 16}, range(1, 5)),
        (13, [90] * 3, {"page_size": 1}, range(1, 5)),
        (13, [150, 2, 400, 33], {"sq": 8}, [1, 2]),
        (13, [150, 2, 400, 33], {"sq": 16, "page_size": 64}, [1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["window", "all"])
@exhaustive("decode", but=lambda shares, name: shares == (name == "all"))  # noqa: F811
def test_scores_of_what_is_still_written(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sm_count: int,
    lengths: list[int],
    options: dict[str, Any],
    seeds: Iterable[int],
) -> None:
    """Windows move with lengths; slopes and sinks are among it."""
    gpu = device.named("h200")._replace(sm_count=sm_count)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)
    of_arrays = len(lengths), 4, 1, options.get("sq", 1), max(lengths)
    score = options_of(rng, name, of_arrays, DECODE_FEATURES)
    for emulated.seed in seeds:
        checked(rng, lengths, hq=4, hk=1, **options, **score)
