"""Problem -> plan of its gradients: which kernels, with which tiles. Integers only, no CuPy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from cufa.device import Device
from cufa.features.parts import kind_of
from cufa.features.sinks import Sinks
from cufa.features.user_functions import OWN
from cufa.planner.array_sums import ArraySums, Chains, Wanted, planned_sums
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_KERNELS, bwd_finish, bwd_prepare, bwd_sinks
from cufa.specs.arguments import TemplateArguments
from cufa.specs.backward import ROW_UNIT, THREADS, TURN_ROWS, around, instance_of
from cufa.specs.instance import Instance

_SLOPES = ("Softcap", "FineSoftcap", "ExactSoftcap", OWN["score_mod"])
"""Parts whose derivative is not 1."""

_ALIGNMENT = 4  # float32 numbers: 16 bytes
_WORD = 4  # bytes


class Step(NamedTuple):
    """A launch.

    Attributes
    ----------
    instance : Instance
    grid, threads : int
        Blocks, and threads of each.
    """

    instance: Instance
    grid: int
    threads: int


class BackwardPlan(NamedTuple):
    """How gradients of attention are computed.

    Attributes
    ----------
    variant : TemplateArguments
        The template arguments of the kernel that computes the products.
    steps : tuple of Step
        One after the other.
    problem : Problem
        As the kernels see it: sinks are in the log-sum-exp already.
    q_units, key_tiles : int
        Units of rows of a query head, and tiles of keys of a K/V head.
    row_lse, row_delta, dq_sums, turns : int
        Where these begin in the workspace, in 32-bit words; -1 for none.
    workspace_words : int
        The size of all of it: two numbers a row, dQ in float32, sums of gradients of arrays that
        parts of the score read, and the turns.
    sums : tuple of ArraySums
    chains : Chains or None
        The order of blocks that add to them.
    cleared : tuple of int
        The words of the workspace that are to be 0, first and end: sums, and chains.
    """

    variant: TemplateArguments
    steps: tuple[Step, ...]
    problem: Problem
    q_units: int
    key_tiles: int
    row_lse: int
    row_delta: int
    dq_sums: int
    turns: int
    workspace_words: int
    sums: tuple[ArraySums, ...] = ()
    chains: Chains | None = None
    cleared: tuple[int, int] = (0, 0)

    @property
    def workspace_rows(self) -> int:
        """Rows of the workspace, of a head."""
        return self.q_units * ROW_UNIT


def _has_slope(score: tuple[str, ...]) -> bool:
    return any(kind_of(part) in _SLOPES for part in score)


def backward_plan(
    problem: Problem,
    device: Device,
    wrt: Collection[str],
    deterministic: bool,
    wanted: Sequence[Wanted] = (),
) -> BackwardPlan:
    """Plan the gradients of a problem that is not empty.

    Parameters
    ----------
    problem : Problem
    device : Device
    wrt : collection of str
        Names of the arrays to differentiate by: some of "q", "k", "v" and "sinks".
    deterministic : bool
        Whether its sums have a fixed order.
    wanted : sequence of Wanted
        A bias, and arrays that a `score_mod` reads, to differentiate by.
    """
    problem = problem.without(Sinks)
    wants_dq = "q" in wrt
    spec = next(each for each in BACKWARD_KERNELS.values() if problem.dtype in each.dtypes)
    dims, tiles = next(
        (dims, tiles)
        for dims, tiles in spec.tiles(device.compute_capability).items()
        if dims[0] >= problem.head_dim and dims[1] >= problem.head_dim_v
    )
    keeps_scores = bool(wanted) or _has_slope(problem.score)
    bm, bn, stages, warps, blocks_per_sm, _ = tiles[-1 if keeps_scores else 0]
    variant = TemplateArguments(
        *(spec.name, problem.dtype, *dims, bm, bn, stages, warps, blocks_per_sm),
        score=problem.score,
        kv=problem.kv,
    )
    if problem.kv == "Varlen":  # see kernels/kv.cuh
        q_units = problem.seq_q // ROW_UNIT + problem.sequences
        key_tiles = problem.seq_kv // bn + problem.sequences
    else:
        q_units, key_tiles = -(-problem.seq_q // ROW_UNIT), -(-problem.seq_kv // bn)
    heads = problem.batch * problem.heads_q
    rows = heads * q_units * ROW_UNIT
    words, places = 0, {}
    dq_words = rows * dims[0] * wants_dq
    start = 2 * rows + dq_words  # a multiple of `_ALIGNMENT`
    arrays = planned_sums(problem, wanted, key_tiles, deterministic, start)
    variant = variant._replace(score=arrays.score)
    takes_turns = deterministic and (wants_dq or arrays.chains is not None)
    for name, size in (
        ("row_lse", rows),
        ("row_delta", rows),
        ("dq_sums", dq_words),
        ("sums", arrays.words),
        ("turns", (rows // TURN_ROWS + 1) * takes_turns),
    ):
        places[name] = words if size else -1
        words += -(-size // _ALIGNMENT) * _ALIGNMENT
    del places["sums"]
    units = heads * q_units
    steps = [Step(around(bwd_prepare.SPEC.name, variant), units, THREADS)]
    if "sinks" in wrt:
        sums = around(bwd_sinks.SPEC.name, variant, smem_bytes=_WORD * bwd_sinks.SPEC.threads // 32)
        steps.append(Step(sums, problem.heads_q, bwd_sinks.SPEC.threads))
    if wanted or not {"q", "k", "v"}.isdisjoint(wrt):
        blocks = problem.batch * problem.heads_kv * key_tiles
        steps.append(Step(instance_of(variant), blocks, variant.threads))
    if wants_dq:
        steps.append(Step(around(bwd_finish.SPEC.name, variant), units, THREADS))
    return BackwardPlan(
        variant,
        tuple(steps),
        problem,
        q_units,
        key_tiles,
        **places,
        workspace_words=words,
        sums=arrays.sums,
        chains=arrays.chains,
        cleared=(start, start + arrays.words),
    )
