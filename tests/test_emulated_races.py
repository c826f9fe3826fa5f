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
from quantized_alike import assert_alike
from shared_libraries import Sources
from test_emulated_backward import (
    WGMMA_COLUMNS,
    WGMMA_ROWS,
    WGMMA_TWO,
    Case,
    checked_sequences,
    drawn,
    gradients,
    name_of,
)
from test_emulated_backward import checked as checked_gradients
from test_emulated_decode import checked, emulated, shares  # noqa: F401
from test_emulated_decode8 import checked8

import cufa
from cufa import device
from cufa.launch import backward, workspace
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
    """Blocks find the places of later tiles while they take others."""
    x = rng.standard_normal((1, 9 * 256 // d, 500, d), np.float32).astype(dtype)
    each: tuple[dict[str, Any], ...] = {"hadamard": True}, {"transposed": True}
    for how in each:
        found = cufa.quantize(on_gpu(x), granularity=granularity, **how)
        expected = cufa.quantize(x, granularity=granularity, **how)
        assert_alike(found, expected)
    assert emulated.races() == {"quantize": 0}


@pytest.mark.parametrize("options", [{}, {"window": (17, 128)}, {"causal": True}], ids=str)
@pytest.mark.parametrize("d", [64, 256])
@exhaustive("fp8", but=lambda d, options: (d, options) == (64, {"causal": True}))
def test_scores_of_8_bits_computed_again(
    emulated: Watching,  # noqa: F811
    rng: np.random.Generator,
    d: int,
    options: dict[str, Any],
) -> None:
    """Scores that differ so much that sums grow past their limit; some consumers have no rows."""
    q, k, v = (rng.standard_normal((1, 2, n, d), np.float32) for n in (385, 449, 449))
    arrays = [on_gpu(x.astype(np.float16)) for x in (q * 12, k * 10, v)]
    cufa.attention(*arrays, precision="fp8", **options)
    assert emulated.races() == {"quantize": 0, "fp8_wgmma": 0}


#: The sums of a block's first product with dS are not used. It reads what others may be writing.
OF_NO_USE = r"(queue_dq\(rdQ\);  // of the step in front)", r"if (round_dq != NO_ROUND) \1"


@pytest.fixture
def of_gradients(monkeypatch: pytest.MonkeyPatch, emulated: Watching) -> Watching:  # noqa: F811
    """Leave out the product of no use, and forget calls of other tests."""
    monkeypatch.setattr(backward, "_prepared", {})
    monkeypatch.setattr(workspace, "_of_device", {})
    emulated.change(changed("bwd_wgmma.cu", OF_NO_USE))
    return emulated


def changed(name: str, *changes: tuple[str, str]) -> dict[str, str]:
    """Return the text of a file of the kernels in which some places are others."""
    text = (FOLDERS[0] / name).read_text()
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text)
        assert count == 1
    return {name: text}


#: Several tiles of keys a block; some that no row sees; sequences of any lengths.
CALLS: dict[str, Any] = {
    "causal": ((1, 4, 2, 150, 450), {"causal": True}),
    "window": ((1, 2, 2, 40, 600), {"window": (20, 5)}),
    "varlen": (None, {"causal": True}),
}


@pytest.mark.parametrize("form", [WGMMA_ROWS, WGMMA_COLUMNS, WGMMA_TWO], ids=name_of)
@pytest.mark.parametrize("call", CALLS)
@exhaustive("backward", but=lambda form, call: (form, call) == (WGMMA_COLUMNS, "varlen"))
def test_gradients(of_gradients: Watching, rng: np.random.Generator, form: Case, call: str) -> None:
    """Sums in any order, and in one."""
    sizes, options = CALLS[call]
    for deterministic, of_gradients.seed in ((False, 0), (False, 3), (True, 5)):
        if sizes is None:
            checked_sequences(rng, form, options, deterministic)
        else:
            given = {**options, "deterministic": deterministic}
            checked_gradients(rng, form, sizes, given, **options)
    kernels = {"bwd_dq_wgmma", "bwd_dkv_wgmma"} if form is WGMMA_TWO else {"bwd_wgmma"}
    found = of_gradients.races()
    assert kernels <= set(found)
    assert not any(found.values()), found


#: Barriers of the backward pass that are left out; or the product of no use is not.
OF_GRADIENTS: dict[str, tuple[Case, str, tuple[tuple[str, str], ...]]] = {
    "dS": (
        *(WGMMA_COLUMNS, "bwd_wgmma.cu"),
        (OF_NO_USE, (r"__syncwarp\(\);(\s+if .*ring_ds\.full)", r"\1")),
    ),
    "P": (
        *(WGMMA_TWO, "bwd_dkv_wgmma.cu"),
        ((r"__syncwarp\(\);(\s+if .*\s.*ring_p\.full)", r"\1"),),
    ),
    "the product of no use": (WGMMA_COLUMNS, "bwd_wgmma.cu", ()),
}


@pytest.mark.parametrize("name", OF_GRADIENTS)
@exhaustive("backward", but=lambda name: name == "dS")
def test_a_barrier_of_gradients_that_is_missing(
    of_gradients: Watching, rng: np.random.Generator, name: str
) -> None:
    form, file, changes = OF_GRADIENTS[name]
    of_gradients.change(changed(file, *changes))
    sizes, options = CALLS["causal"]
    gradients(drawn(rng, form, sizes, **options), **options)
    assert of_gradients.races()[file.removesuffix(".cu")] > 0


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
