"""Shared memory of kernels on the host: whether something orders all that threads read and write.

An emulator that looks for races finds them in whatever order threads have run: ``races.cpp``.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from emulated import FOLDERS, SHARED, Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import on_gpu
from shared_libraries import Sources
from test_emulated_decode import checked, emulated, shares  # noqa: F401
from test_emulated_decode8 import checked8

import cufa
from cufa import device
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant

pytestmark = needs_compiler

#: A library has a scheduler of its own, which it finds before that of the others.
OPTIONS = (
    *("-DWATCHES=1", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
    *("-fno-strict-aliasing", "-fno-gnu-unique", "-nodefaultlibs", "-Wl,-Bsymbolic"),
)


class Watching(Emulator):
    """An emulator that looks for races, in kernels of which some files may be other ones."""

    _paths: ClassVar[dict[Any, Path]] = {}
    _libraries: ClassVar[dict[Any, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.change({})

    def change(self, files: dict[str, str]) -> None:
        """Compile from now on with these texts in place of files of these names."""
        self._paths.clear()
        self._libraries.clear()
        self._sources = Sources(*FOLDERS, own=files)

    def _compiled(self, variant: Variant | Instance) -> Path:
        text = f'{SHARED}#include "races.cpp"\n{self._text(variant)}'
        return self._sources.library(text, *OPTIONS)

    def races(self) -> dict[str, int]:
        """Return how many races were found in each kernel so far."""
        found: Counter[str] = Counter()
        for variant, library in self._libraries.items():
            found[variant.kernel] += ctypes.c_int.in_dll(library, "emulator_races").value
        return dict(found)


@pytest.fixture
def emulator() -> Emulator:
    return Watching()


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch: pytest.MonkeyPatch, emulated: Emulator) -> None:  # noqa: F811
    """Play a GPU whose blocks have several units each."""
    few = device.named("h200")._replace(sm_count=2)
    monkeypatch.setattr(device, "of_id", lambda device_id: few)


of_any_shares = pytest.mark.parametrize("shares", [True], indirect=True)
MANY_ROWS: dict[str, Any] = {"hq": 4, "hk": 1, "sq": 8}


@of_any_shares
@pytest.mark.parametrize(
    ("kernel", "lengths", "options"),
    [
        ("decode", [150, 2, 400, 33, 1, 70], {"hq": 4, "hk": 1}),
        ("decode", [900, 2, 1300, 33, 1], MANY_ROWS),
        ("decode_wgmma", [700, 2, 1100, 33, 1], {**MANY_ROWS, "sq": 16, "page_size": 64}),
        ("decode_fp8", [150, 2, 400, 33], {**MANY_ROWS, "kind": "uint8"}),
        ("decode_int8", [150, 2, 400, 33], {"hq": 4, "hk": 1, "kind": "int8"}),
    ],
    ids=str,
)
@exhaustive("decode", "decode8", but=lambda kernel: kernel == "decode_wgmma")
def test_decoding(
    emulated: Watching,  # noqa: F811
    shares: None,  # noqa: F811
    rng: np.random.Generator,
    kernel: str,
    lengths: list[int],
    options: dict[str, Any],
) -> None:
    (checked8 if "kind" in options else checked)(rng, lengths, **options)
    assert emulated.races() == {kernel: 0}


@pytest.mark.parametrize(
    ("d", "dtype"), [*((d, "float16") for d in (64, 96, 128, 256)), (256, "float32")]
)
@pytest.mark.parametrize("granularity", ["block", "head"])
@exhaustive("quantize", but=lambda d, dtype, granularity: (d, granularity) == (128, "block"))
def test_quantizing(
    emulated: Watching,  # noqa: F811
    rng: np.random.Generator,
    d: int,
    dtype: str,
    granularity: Any,
) -> None:
    """Blocks find their tiles anew while they take them."""
    x = rng.standard_normal((1, 9 * 256 // d, 500, d), np.float32).astype(dtype)
    each: tuple[dict[str, Any], ...] = {"hadamard": True}, {"transposed": True}
    for how in each:
        found = cufa.quantize(on_gpu(x), granularity=granularity, **how)
        expected = cufa.quantize(x, granularity=granularity, **how)
        np.testing.assert_array_equal(found.values.get(), expected.values.view(np.uint8))
    assert emulated.races() == {"quantize": 0}


#: Barriers of ``decode_block.cuh``, by what they stand in front of.
BARRIERS = {
    "Q": ("__syncthreads()", "if constexpr (C::INTEGERS)"),
    "K": ("team_sync()", "float rS"),
}


@of_any_shares
@pytest.mark.parametrize("name", BARRIERS)
def test_a_barrier_that_is_missing(
    emulated: Watching,  # noqa: F811
    shares: None,  # noqa: F811
    rng: np.random.Generator,
    name: str,
) -> None:
    """Results are right all the same."""
    barrier, next_line = BARRIERS[name]
    file = FOLDERS[0] / "decode_block.cuh"
    text = re.sub(rf"{re.escape(barrier)};(\s+{re.escape(next_line)})", r"\1", file.read_text())
    assert text != file.read_text()
    emulated.change({file.name: text})
    checked(rng, [150, 2, 100, 33], **MANY_ROWS)
    assert emulated.races()["decode"] > 0
