"""The time that a plan of gradients would take on an H200, by operations and bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.parts import edges
from cufa.planner.array_sums import Wanted
from cufa.planner.backward import BackwardPlan, Step, backward_plan
from cufa.planner.tuned_table import Table
from cufa.problem.problem import Problem
from cufa.specs import AUXILIARY_KERNELS, BACKWARD_KERNELS
from cufa.specs.variant import BackwardVariant

_LAUNCH_US = 2.0
"""For a launch, whatever it computes."""

_BYTES_A_US = 3.5e6
"""Bytes that the kernels before and after the products read and write in a microsecond."""

_MULTIPROCESSORS = 132
"""Multiprocessors of an H200, among which blocks are shared out."""

_OPERANDS = ("q", "k", "v", "d_out", "row_lse", "row_delta", "dq_sums", "dk", "dv")
"""Arrays that the products read or write at least once."""


def explained(
    problem: Problem,
    device: Device,
    wrt: Collection[str],
    deterministic: bool,
    forced: BackwardVariant | None = None,
    wanted: Sequence[Wanted] = (),
    table: Table | None = None,
) -> BackwardPlan:
    """Return a plan with the times that are expected of its steps; arguments as `backward_plan`.

    A problem may be empty: its plan has no launch.
    """
    problem = problem._replace(scale=abs(problem.scale), returns_lse=True)
    asked = problem, device, wrt, deterministic
    plan = backward_plan(*asked, forced=forced, wanted=wanted, table=table)
    if 0 in (problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_kv):
        return plan._replace(steps=(), workspace_words=0)
    products = sum(step.instance.kernel in BACKWARD_KERNELS for step in plan.steps)
    times = [_of_step(step, plan, products) for step in plan.steps]
    return plan._replace(expected_us=tuple(times))


def _of_step(step: Step, plan: BackwardPlan, products: int) -> float:
    sizes = _bytes(plan)
    spec = AUXILIARY_KERNELS.get(step.instance.kernel)
    if spec is not None:
        moved = sum(sizes[name] for name in spec.moved)
        return _LAUNCH_US + moved / _BYTES_A_US
    rate = BACKWARD_KERNELS[step.instance.kernel].rate(plan.variant.head_dim)
    v = plan.variant
    places = v.blocks_per_sm * _MULTIPROCESSORS
    blocks = plan.key_blocks if BACKWARD_KERNELS[step.instance.kernel].draws else step.grid
    waves = -(-blocks // places)
    busy = blocks / (waves * places)  # the part of the places that have a block
    moved = sum(sizes[name] for name in _OPERANDS)
    each = flops(plan.problem, v.bm, v.bn) / products
    return _LAUNCH_US + each / (1e6 * rate) / busy + moved / _BYTES_A_US


def flops(problem: Problem, bm: int = 0, bn: int = 0) -> float:
    """Return the operations of the five products, of the pairs that are seen.

    Parameters
    ----------
    problem : Problem
    bm, bn : int
        Rows and keys of a tile. Tiles along an edge of what is seen are computed whole, so that
        half a tile counts in addition for each row there.
    """
    one = problem.alike
    count = edges(problem.score)
    pairs = float(one.seq_q * one.seq_kv)
    if count:
        first, end = one.sees(slice(0, one.seq_q))
        along = count * one.seq_q * (bm + bn) / 2
        pairs = min(pairs, float((end - first).sum()) + along)
    heads = one.batch * one.heads_q
    return 2.0 * heads * pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)


def _bytes(plan: BackwardPlan) -> dict[str, int]:
    """Return the sizes of arrays, by name."""
    p, element = plan.problem, DTYPES[plan.problem.dtype].bytes
    queries, keys = (p.batch * n for n in (p.heads_q * p.seq_q, p.heads_kv * p.seq_kv))
    found = {
        **dict.fromkeys(("q", "dq"), element * queries * p.head_dim),
        **dict.fromkeys(("k", "dk"), element * keys * p.head_dim),
        **dict.fromkeys(("o", "d_out"), element * queries * p.head_dim_v),
        **dict.fromkeys(("v", "dv"), element * keys * p.head_dim_v),
        **dict.fromkeys(("lse", "row_lse", "row_delta"), 4 * queries),
    }
    v, blocks = plan.variant, plan.key_blocks
    sums = 4 * queries * v.head_dim if plan.dq_sums >= 0 else 0
    parts = 4 * blocks * v.bn * (v.head_dim + v.head_dim_v) if plan.kv_sums >= 0 else 0
    return {**found, "dq_sums": sums, "kv_sums": parts}
