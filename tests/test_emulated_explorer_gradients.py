"""The explorer's calls of gradients on the host: the tile that is asked for, and its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_emulated_backward import emulated, emulator  # noqa: F401

from cufa import device
from cufa.explorer import subject
from cufa.explorer.gradient_oracle import GradientOracle
from cufa.explorer.gradients import GradientsOf, GradientStage
from cufa.problem.problem import Problem

pytestmark = needs_compiler

A100 = device.named("a100")


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"softcap": 3.0}, {"dropout_p": 0.3}, {"sinks": True}], ids=str
)
def test_a_tile_that_is_not_the_planned_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    errors: Any = {"CUDARuntimeError": RuntimeError, "CUDADriverError": RuntimeError}
    played: Any = cupy.cuda
    played.runtime = played.driver = SimpleNamespace(**vars(played.runtime), **errors)
    monkeypatch.setattr(device, "of_id", lambda device_id: A100)
    shapes = (1, 2, 70, 32), (1, 1, 90, 32), (1, 1, 90, 32)
    has_sinks = options.pop("sinks", False)
    problem = Problem.of_shapes(*shapes, dtype="bfloat16", **options)
    problem = problem.reading("Sinks") if has_sinks else problem
    on_stage = GradientStage(GradientsOf(problem, A100))
    inputs = on_stage.inputs
    tensors = tuple(x.get() for x in inputs.tensors)
    arrays = {name: x.get() for name, x in inputs.arrays.items()}
    host = inputs._replace(tensors=tensors, arrays=arrays)
    oracle = GradientOracle(np, problem, on_stage.dout.get(), host)
    space = {"warps": (4,), "blocks_per_sm": (1,)}
    planned, *others = GradientsOf(problem, A100).variants(None, space)
    asked: list[str] = []
    kernel = subject.jit.kernel

    def counted(instance: Any, *rest: Any) -> Any:
        asked.append(str(instance))
        return kernel(instance, *rest)

    monkeypatch.setattr(subject.jit, "kernel", counted)
    monkeypatch.setattr(GradientStage, "wait", lambda self: None)
    chosen = next(each for each in others if (each.bm, each.bn) == (32, 64))
    on_stage.run(on_stage.ready(chosen, b""))
    assert str(chosen) in asked
    assert str(planned) not in asked
    results = tuple(np.ascontiguousarray(x.get()) for x in on_stage.results)
    assert oracle.judge(*results).complaint is None
