"""The explorer's launches on the host: a variant that is timed reads the arrays next to q, k, v."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import score_mods
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, on_gpu
from reference import random_inputs
from score_arrays import FEATURES, options_of
from test_emulated import FA3, MMA, emulated, emulator  # noqa: F401

from cufa import device, explorer
from cufa.explorer import subject
from cufa.explorer.oracle import Oracle, Verdict
from cufa.specs.variant import Variant

pytestmark = needs_compiler

SIZES = 2, 8, 2, 13, 250
DIMS = {"b": 2, "hq": 8, "hk": 2, "sq": 13, "sk": 250, "d": 64}
H200 = device.named("h200")


def named(tensors: Iterable[Any]) -> dict[str, Any]:
    return dict(zip("qkv", tensors, strict=True))


Judged = Callable[[str, dict[str, Any], dict[str, Any]], Verdict]


@pytest.fixture
def judged(gpu: Gpu, emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Judged:  # noqa: F811
    """Return what the oracle says of a launch of the explorer.

    It takes a form and the options of a call, with arrays of the host and with those of the GPU.
    """
    import cupy

    errors: Any = {"CUDARuntimeError": RuntimeError, "CUDADriverError": RuntimeError}
    played: Any = cupy.cuda
    played.runtime = played.driver = SimpleNamespace(**vars(played.runtime), **errors)

    def judged(form: str, host: dict[str, Any], there: dict[str, Any]) -> Verdict:
        variant = Variant.parse(form.format(score=""))
        arrays: Any = random_inputs(np.random.default_rng(3), variant.dtype, **DIMS)
        right, of_host = explorer._of_arrays(named(arrays), host, timed=False)
        oracle = Oracle(np, right, of_host)
        problem, inputs = explorer._of_arrays(named(map(on_gpu, arrays)), there, timed=False)
        on_stage = subject.Subject(problem, H200, inputs).stage()
        variant = variant._replace(score=problem.score)
        monkeypatch.setattr(subject.jit, "load", lambda *_: None)
        monkeypatch.setattr(
            subject.jit, "launchable", lambda _, variant, gpu: emulated.kernel(variant, gpu, 0)
        )
        on_stage.operands.out.fill(np.nan)
        on_stage.ready(variant, b"")()
        return oracle.judge(np.ascontiguousarray(on_stage.operands.out.get()))

    return judged


forms = pytest.mark.parametrize("form", [MMA, FA3], ids=lambda form: form[:9])


@forms
@pytest.mark.parametrize("name", FEATURES)
@exhaustive(but=lambda form, name: form is FA3 or name == "all", one_in=2)
def test_arrays(judged: Judged, rng: np.random.Generator, form: str, name: str) -> None:
    host = options_of(rng, name, SIZES)
    there = {k: on_gpu(x) if hasattr(x, "dtype") else x for k, x in host.items()}
    assert judged(form, host, there).complaint is None


@forms
@pytest.mark.parametrize("name", score_mods.FEATURES)
@exhaustive(but=lambda form, name: form is FA3 or name == "all", one_in=2)
def test_functions(judged: Judged, rng: np.random.Generator, form: str, name: str) -> None:
    host, there = score_mods.made(rng, name, SIZES, on_gpu)
    assert judged(form, host, there).complaint is None


@forms
def test_dropout(judged: Judged, form: str) -> None:
    options = {"dropout_p": 0.3, "causal": True}
    assert judged(form, dict(options), dict(options)).complaint is None
