"""Problem -> plan of its gradients: which kernels, with which tiles. Integers only, no CuPy."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from cufa.device import Device
from cufa.features.sinks import Sinks
from cufa.planner.array_sums import Planned, Wanted, planned_sums
from cufa.planner.problem_class import gradient_class
from cufa.planner.scheduler import falls_from_first_key, key_sections, tiles_of
from cufa.planner.tuned_table import Table
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_FORMS, bwd_finish, bwd_join, bwd_prepare, bwd_sinks
from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import ROW_UNIT, TURN_ROWS, BackwardSpec
from cufa.specs.instance import Instance
from cufa.specs.variant import BackwardVariant

_FILL = 0.9  # part of the time in which multiprocessors work: more is not worth the parts' memory
_ALIGNMENT = 4  # float32 numbers: 16 bytes
_WORD = 4  # bytes


class Step(NamedTuple):
    """A launch.

    Attributes
    ----------
    instance : Instance or BackwardVariant
    grid, threads : int
        Blocks, and threads of each.
    """

    instance: Instance | BackwardVariant
    grid: int
    threads: int


class BackwardPlan(NamedTuple):
    """How gradients of attention are computed.

    Attributes
    ----------
    variant : BackwardVariant
        The template arguments of the first kernel that computes products; the tiles of others
        are of the same size.
    steps : tuple of Step
        One after the other.
    problem : Problem
        The problem as the kernels see it: sinks are in the log-sum-exp already.
    q_units, key_tiles : int
        Units of rows of a query head, and tiles of keys of a K/V head.
    kv_splits : int
        Blocks that share the query heads of a tile of keys.
    section_heads : int
        K/V heads that have their tiles of keys interleaved, see ``kernels/bwd_place.cuh``.
    row_lse, row_delta, dq_sums, kv_sums, turns, drawn : int
        Where each begins in the workspace, in 32-bit words; -1 for none.
    workspace_words : int
        Its size: two numbers a row, dQ in float32, sums of gradients of arrays that parts of the
        score read, parts of dK and dV in float32, the turns, and the count of what was drawn.
    arrays : Planned
        Sums of gradients of arrays that parts of the score read.
    expected_us : tuple of float
        For `explain_backward`: how many microseconds each step would take on an H200;
        empty where that is not known.
    reason : str
        Where the variant comes from.
    """

    variant: BackwardVariant
    steps: tuple[Step, ...]
    problem: Problem
    q_units: int
    key_tiles: int
    kv_splits: int
    section_heads: int
    row_lse: int
    row_delta: int
    dq_sums: int
    kv_sums: int
    turns: int
    drawn: int
    workspace_words: int
    arrays: Planned
    expected_us: tuple[float, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        """One line."""
        steps = "; ".join(
            f"{step.instance} grid={step.grid} block={step.threads} smem={step.instance.smem_bytes}"
            for step in self.steps
        )
        return f"{steps}; {self.reason}; workspace={_WORD * self.workspace_words}"

    @property
    def key_blocks(self) -> int:
        """Tiles of keys of all K/V heads, each as often as query heads are split."""
        return self.problem.batch * self.problem.heads_kv * self.key_tiles * self.kv_splits

    @property
    def workspace_rows(self) -> int:
        """Rows of the workspace, of a head."""
        return self.q_units * ROW_UNIT


def _variant(
    spec: BackwardSpec, problem: Problem, device: Device, is_large: bool
) -> BackwardVariant:
    dims = spec.padded(device, problem.head_dim, problem.head_dim_v)
    shape = spec.tiles(device, dims)[-1 if is_large or spec.is_large(problem.score) else 0]
    return BackwardVariant(
        *(spec.name, problem.dtype, *dims, *shape), score=problem.score, kv=problem.kv
    )


def _by_table(
    problem: Problem, device: Device, table: Table, usual: BackwardVariant
) -> BackwardVariant | None:
    """Return what a table says in place of a kernel's usual tile, if that kernel can run it."""
    key = gradient_class(problem, device, (usual.head_dim, usual.head_dim_v))
    entry = table.entries.get(key)
    if entry is None or entry.kernel != usual.kernel:
        return None
    variant = usual._replace(**entry.shape._asdict())
    return variant if variant.illegal(device) is None else None


def _splits(spec: BackwardSpec, problem: Problem, device: Device, blocks: int) -> int:
    """Return how many blocks should share the query heads of a tile of keys.

    As many as it takes until the longest block has no more work than each multiprocessor would
    have if all work was spread evenly. A causal mask leaves half of the pairs, but the first keys
    of a head have all of their rows.

    Parameters
    ----------
    spec : BackwardSpec
    problem : Problem
    device : Device
    blocks : int
        Tiles of keys of all heads.
    """
    if not spec.splits_groups or not blocks:
        return 1
    longest = device.sm_count / (blocks / 2 if falls_from_first_key(problem) else blocks)
    splits = max(1, min(problem.group, math.ceil(_FILL * longest)))
    return -(-problem.group // -(-problem.group // splits))  # each has some


def backward_plan(
    problem: Problem,
    device: Device,
    wrt: Collection[str],
    deterministic: bool,
    maps: bool = True,
    forced: BackwardVariant | None = None,
    wanted: Sequence[Wanted] = (),
    table: Table | None = None,
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
    maps : bool
        Whether TMA can describe Q, K, V and the gradient of the result as they are.
    forced : BackwardVariant, optional
        That of a kernel of products, in place of what its spec says.
    wanted : sequence of Wanted
        A bias, and arrays that a `score_mod` reads, to differentiate by.
    table : Table, optional
        The table of this device. Its rows are for gradients by q, k and v at least, in any order.
    """
    problem = problem.without(Sinks)
    dims = problem.head_dim, problem.head_dim_v
    form = next(
        form
        for form in BACKWARD_FORMS
        if (forced is None or forced.kernel in (spec.name for spec in form))
        and all(spec.takes(problem.dtype, dims, problem.score, device, maps) for spec in form)
        and all(spec.sums_arrays or not wanted for spec in form)
    )
    variants = [_variant(spec, problem, device, bool(wanted)) for spec in form]
    if forced is not None:
        variants = [forced if forced.kernel == each.kernel else each for each in variants]
    reason = f"default for {problem.dtype}" if forced is None else "forced variant"
    if table is not None and not (forced or deterministic or wanted) and {"q", "k", "v"} <= {*wrt}:
        tuned = _by_table(problem, device, table, variants[0])
        if tuned is not None:
            variants[0], reason = tuned, table.reason
    variant = variants[0]
    sums_dq = "q" in wrt and not any(spec.by_rows for spec in form)
    q_units = tiles_of(problem, problem.seq_q, ROW_UNIT)
    key_tiles = tiles_of(problem, problem.seq_kv, variant.bn)
    units = problem.batch * problem.heads_q * q_units
    rows = units * ROW_UNIT
    blocks = problem.batch * problem.heads_kv * key_tiles
    splits = _splits(form[0], problem, device, blocks)
    joins = splits > 1 and not {"k", "v"}.isdisjoint(wrt)
    dq_words = rows * variant.head_dim * sums_dq
    start = 2 * rows + dq_words  # a multiple of `_ALIGNMENT`
    arrays = planned_sums(problem, wanted, key_tiles, deterministic, start)
    variants = [each._replace(score=arrays.score) for each in variants]
    variant = variants[0]
    takes_turns = deterministic and (sums_dq or arrays.chains >= 0)
    # By turns, a head's tiles follow each other.
    section_heads = 1
    if blocks and not takes_turns:
        section_heads = key_sections(problem, device, variant.bn, variant.blocks_per_sm)
    words = 0
    places: dict[str, Any] = {}
    for name, size in (
        ("row_lse", rows),
        ("row_delta", rows),
        ("dq_sums", dq_words),
        ("sums", arrays.end - start),
        ("kv_sums", blocks * splits * joins * variant.bn * (variant.head_dim + variant.head_dim_v)),
        ("turns", rows // TURN_ROWS * takes_turns),
        ("drawn", takes_turns or form[0].draws),
    ):
        places[name] = words if size else -1
        words += -(-size // _ALIGNMENT) * _ALIGNMENT
    del places["sums"]
    steps = [_around(bwd_prepare.SPEC, variant, units)]
    if "sinks" in wrt:
        smem = _WORD * bwd_sinks.SPEC.threads // 32
        steps.append(_around(bwd_sinks.SPEC, variant, problem.heads_q, smem_bytes=smem))
    for spec, of_spec in zip(form, variants, strict=True):
        if wanted or not set(spec.gradients).isdisjoint(wrt):
            grid = units if spec.by_rows else blocks * splits
            if spec.draws:
                grid = min(grid, device.sm_count * of_spec.blocks_per_sm)
            steps.append(Step(of_spec, grid, of_spec.threads))
    if joins:
        steps.append(_around(bwd_join.SPEC, variant, blocks, variant.bn))
    if sums_dq:
        steps.append(_around(bwd_finish.SPEC, variant, units, form[0].tma))
    return BackwardPlan(
        *(variant, tuple(steps), problem, q_units, key_tiles, splits, section_heads),
        **places,
        workspace_words=words,
        arrays=arrays,
        reason=reason,
    )


def _around(
    spec: AuxiliarySpec, v: BackwardVariant, grid: int, *more: int, smem_bytes: int = 0
) -> Step:
    """Return the step of a kernel before or after the products; it is the same for all scores.

    Parameters
    ----------
    spec : AuxiliarySpec
    v : BackwardVariant
        The variant of the products.
    grid : int
    *more : int
        The kernel's own numbers behind the head dim.
    smem_bytes : int
    """
    numbers = v.head_dim, *more
    instance = Instance(spec.name, (v.dtype,), numbers, (), v.kv, smem_bytes, is_dependent=False)
    return Step(instance, grid, spec.threads)
