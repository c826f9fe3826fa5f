"""``explain --backward``: the plan that the gradients of a call would use."""

from __future__ import annotations

from collections.abc import Iterator

from cufa.cli import table
from cufa.device import Device
from cufa.explorer.occupancy import register_bound
from cufa.explorer.table import counted, problem_text
from cufa.features.sinks import Sinks
from cufa.planner.backward import BackwardPlan, Step
from cufa.planner.backward_model import explained
from cufa.problem.parse_backward import TENSORS
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_KERNELS
from cufa.tuned import user_table

_MEANING = {
    "head_dim": "columns of Q, K, dQ and dK",
    "head_dim_v": "columns of V, dO and dV",
    "bm": "queries of a tile",
    "bn": "keys of a tile",
    "stages": "depth of the ring of Q and dO in shared memory",
    "warps": "warps of a block",
    "blocks_per_sm": "blocks that must fit on a multiprocessor",
}


def wrt_of(problem: Problem) -> tuple[str, ...]:
    """Return the arrays of a problem that have gradients: q, k, v, and sinks if there are any."""
    return TENSORS if problem.of(Sinks) is None else (*TENSORS, "sinks")


def planned(problem: Problem, device: Device, deterministic: bool) -> BackwardPlan:
    """Return the plan of all gradients of a problem."""
    return explained(problem, device, wrt_of(problem), deterministic, table=user_table(device))


def show(problem: Problem, device: Device, deterministic: bool) -> None:
    """Print the plan."""
    found = planned(problem, device, deterministic)
    names = ", ".join(wrt_of(problem))
    rows: list[tuple[object, ...]] = [
        ("problem", f"gradients of {names}; {problem_text(problem)}"),
        ("GPU", f"{device.name}, {device.arch}, {device.sm_count} multiprocessors"),
    ]
    for number, step in enumerate(found.steps, 1):
        rows += [(f"launch {number}", step.instance), *_step(step, found, device)]
        rows += [("  expected", _us(us)) for us in found.expected_us[number - 1 : number]]
    order = "tiles of keys add to dq in a fixed order" if deterministic else "as blocks come"
    table.pairs(
        [
            *rows,
            ("sums of dq", order),
            ("workspace", f"{4 * found.workspace_words} bytes of global memory"),
            ("reason", found.reason),
            *((("expected", _us(sum(found.expected_us))),) if found.expected_us else ()),
        ]
    )


def _us(us: float) -> str:
    return f"{us:.1f} us on an H200"


def _step(step: Step, found: BackwardPlan, device: Device) -> Iterator[tuple[object, ...]]:
    """Yield what a launch is like."""
    of_products = step.instance.kernel in BACKWARD_KERNELS
    if of_products:
        for name, meaning in _MEANING.items():
            yield f"  {name}", getattr(found.variant, name), meaning
        most = register_bound(device, step.threads, found.variant.blocks_per_sm)
        yield "  registers", f"at most {most} a thread"
    yield "  grid", f"{counted(step.grid, 'block')} of {step.threads} threads"
    yield "  shared memory", f"{step.instance.smem_bytes} bytes a block"
