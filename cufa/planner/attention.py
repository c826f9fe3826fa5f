"""Problem + Device -> how `attention`, `attention_varlen` and `decode` run it.

`attention` runs a problem by a kernel of its own, or as `decode` would.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.causal import Causal
from cufa.features.parts import is_uneven
from cufa.planner import decode, rules
from cufa.planner.decode import DecodePlan
from cufa.planner.decode_model import BYTES_A_US, Items
from cufa.planner.decode_variants import tile_rows
from cufa.planner.plan import MAX_LENGTH, Plan, plan_tiles, planned
from cufa.planner.rules import PACKED_ROWS
from cufa.planner.scheduler import KEY_STEP
from cufa.planner.tuned_table import Table
from cufa.problem.problem import CACHES, MAX_KEYS, Problem
from cufa.remembered import remember
from cufa.specs import KERNELS, default_decoder
from cufa.specs.decode_block import DECODE_SCORE
from cufa.specs.variant import Variant

# A kernel of attention gives each tile of rows to one multiprocessor, whatever the keys. Few tiles
# leave the others idle, which `decode` does not; but it reads K and V once for each of its small
# tiles of rows, and a work item of many rows takes long to end. `decode_model` prices `decode`, and
# the numbers below the others, in microseconds. For 158 problems of 1 to 64 queries and at least
# 256 keys on an H200, the choice takes 1.005 times as long as the faster one. On other GPUs
# arithmetic and reading are in much the same ratio.
_OTHERS_BEGIN = 3.5
_OTHERS_READ = 1.12
"""The factor by which the others take longer where all wait for memory."""

_MOST_ROWS = 128
"""Rows that share a K/V head: beyond, nothing was measured."""

_LEAST_KEYS = 512
"""Keys of a part with `batch_invariant`: with 128, large batches took three times as long."""

_FEWEST_KEYS = 128
"""Fewer keys than this are all latency, whatever runs: they need no second kernel."""

_KNOWN = 4096  # sizes whose plans are remembered
_MANY_KEYS = 2**30  # with as many keys or rows, limits may lie within a step

_HEAD_DIMS = (*((n, n) for n in (32, 64, 96, 128, 192, 256)), (192, 128))
"""Head dims of the variants that are taken: few, as all are compiled ahead of time."""

_REASON = "few queries: as for cufa.decode"
_AS_ALONE = "batch_invariant: as for a batch of one"


class Planner:
    """Plans calls that differ in sizes only, quickly: what they have in common is found once.

    Parameters
    ----------
    problem : Problem
        One of them.
    device : Device
    kernel : str or Variant, optional
        Forces a kernel, or one instantiation of it.
    table : Table, optional
        The table of this device, see `cufa.tuned.user_table`.
    batch_invariant : bool
        Whether each sequence is computed as it would be alone: by the variant, and in as many
        parts, that a batch of one takes.
    num_splits : int, optional
        Parts of every sequence in a cache.

    Attributes
    ----------
    fallback : callable, optional
        Plans a kernel of attention's own, where that may take the place of another.

    Raises
    ------
    TypeError, ValueError
        As `cufa.planner.plan.plan_tiles`.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        kernel: str | Variant | None = None,
        table: Table | None = None,
        batch_invariant: bool = False,
        num_splits: int | None = None,
    ) -> None:
        self._device, self._kernel, self._table = device, kernel, table
        self._alone, self._num_splits = batch_invariant, num_splits
        self._known: dict[tuple[int, ...], Plan | DecodePlan] = {}
        # Else nothing changes within a step of keys. A window may hide keys of longer caches only.
        self._counts_keys = is_uneven(problem.score) or problem.reach.left is not None
        self._longest = min(MAX_LENGTH, problem.longest[0])
        self._choice: rules.Choice | None = None
        self._rounded: Callable[[int, int], tuple[int, int]] | None = None
        self.fallback: Callable[[Problem], Plan] | None = None
        if problem.kv not in CACHES:
            some_keys = problem._replace(seq_kv=max(1, problem.seq_kv))
            first = plan_tiles(some_keys, device, kernel, table)
            self._reason = first.reason
            if table is None and not isinstance(kernel, Variant):
                self._choice = found = rules.choice_of(problem, device, first.variant.kernel)
                others = tuple(name for name in problem.score if name != "Causal")
                self._rounded = found.rounded if found.rounds and not is_uneven(others) else None
            decodes = problem.kv == "Dense" and set(problem.score) <= set(DECODE_SCORE)
            self._may_decode = kernel is None and decodes
            if self._may_decode and not batch_invariant:
                self.fallback = lambda problem: self._tiled(problem)[0]

    def __call__(self, problem: Problem) -> Plan | DecodePlan:
        """Return a problem's plan; errors are those of `plan_tiles`."""
        p, rows, keys = problem, problem.seq_q, problem.seq_kv
        # Fewer may be for `decode`, or share a tile with other heads.
        fewest = _MOST_ROWS if p.heads_q == p.heads_kv else PACKED_ROWS
        if keys >= _MANY_KEYS or rows >= _MANY_KEYS:
            pass
        elif self._rounded is not None and rows > fewest:
            rows, keys = self._rounded(rows, keys)
        elif not self._counts_keys:
            keys = -(-keys // KEY_STEP) * KEY_STEP
        sizes = p.batch, p.heads_q, p.heads_kv, rows, keys, p.sequences, p.page_size
        found = self._known.get(sizes)
        if found is None:
            found = remember(self._known, sizes, self._planned(problem), _KNOWN)
        return found

    def explained(self, problem: Problem) -> Plan | DecodePlan:
        """Return a plan with the times expected of its variant, and of those it was chosen from.

        Not with `batch_invariant`, which has the variant chosen for another batch.
        """
        found = self(problem)
        if self._alone or 0 in (problem.seq_kv, found.grid):
            return found
        if isinstance(found, DecodePlan):
            own, us = self._tiled(problem)
            items = Items.of(problem, self._device, found.variant.bm)
            times = {own.variant: _tiled_us(problem, self._device, own, us)}
            times[found.variant] = items.expected_us(found.grid)
        else:
            times = rules.times(problem, self._device, found.variant.kernel)
        return found._replace(expected_us=tuple(sorted(times.items(), key=lambda item: item[1])))

    def _planned(self, problem: Problem) -> Plan | DecodePlan:
        if problem.kv in CACHES:
            return decode.plan_splits(problem, self._device, self._num_splits, self._kernel)
        if self._alone and problem.batch > 0:
            return self._as_alone(problem)
        return self._fastest(problem)

    def _tiled(self, problem: Problem) -> tuple[Plan, float]:
        """Return the plan of a kernel of attention's own, and the microseconds expected, or 0.0."""
        usual = 0 < problem.seq_kv <= self._longest >= problem.seq_q
        if self._choice is None or not usual:
            return plan_tiles(problem, self._device, self._kernel, self._table), 0.0
        variant, us = self._choice.of(problem.alike)
        return planned(problem, variant, self._device, self._reason), us

    def _fastest(self, problem: Problem) -> Plan | DecodePlan:
        """Return the plan as `decode` would run a problem where that is faster, or else the other.

        With `batch_invariant`, the problem has a batch of one.
        """
        device = self._device
        own, us = self._tiled(problem)
        rows = problem.group * problem.seq_q
        if not (self._may_decode and 0 < rows <= _MOST_ROWS and own.grid > 0):
            return own
        if not _FEWEST_KEYS <= _keys(problem) <= MAX_KEYS:
            return own
        others = _tiled_us(problem, device, own, us)
        # Most are slower whatever the grid, which takes long to plan
        kernel = default_decoder(rows, problem.dtype, False, device).name
        if Items.of(problem, device, tile_rows(problem, kernel)).expected_us() >= others:
            return own
        try:
            found = decode.plan_splits(problem.in_cache, device)
        except ValueError:  # too large, or head dims of which this GPU holds no tiles
            return own
        is_compiled = (found.variant.head_dim, found.variant.head_dim_v) in _HEAD_DIMS
        us = Items.of(problem, device, found.variant.bm).expected_us(found.grid)
        return found._replace(reason=_REASON) if is_compiled and us < others else own

    def _as_alone(self, problem: Problem) -> Plan | DecodePlan:
        one = self._fastest(problem._replace(batch=1))
        found: Plan | DecodePlan
        if isinstance(one, Plan):
            found = plan_tiles(problem, self._device, one.variant)
        else:
            parts = min(one.parts, -(-problem.visited // _LEAST_KEYS))
            try:
                found = decode.plan_splits(problem.in_cache, self._device, parts, one.variant)
            except ValueError as error:  # of more tiles than there are numbers
                raise ValueError(
                    f"k: {error}; without batch_invariant another kernel runs"
                ) from None
        return found._replace(reason=f"{one.reason}; {_AS_ALONE}")


def _keys(problem: Problem) -> int:
    """Return the keys that are visited, up to the next step."""
    return -(-problem.visited // KEY_STEP) * KEY_STEP


def _tiled_us(problem: Problem, device: Device, plan: Plan, us: float) -> float:
    """Return the time that a kernel of attention's own takes: `us`, or 0.0 if that is unknown.

    It is no less than that in which all multiprocessors read K and V once.
    """
    keys = _keys(problem)
    if us == 0.0:
        variant = plan.variant
        tiles = problem.batch * problem.heads_q // plan.pack * plan.q_tiles
        busiest = -(-tiles // device.sm_count) * variant.bm * keys
        flops = 2 * busiest * (variant.head_dim + variant.head_dim_v)
        flops_a_us = KERNELS[variant.kernel].flops_per_byte * BYTES_A_US
        us = _OTHERS_BEGIN + flops / flops_a_us
    columns = problem.head_dim + problem.head_dim_v
    cache = problem.batch * problem.heads_kv * keys * columns * DTYPES[problem.dtype].bytes
    read_us = cache / (device.sm_count * BYTES_A_US)
    return max(us, _OTHERS_BEGIN + _OTHERS_READ * read_us)


def decode_variants(device: Device, masks: Iterable[bool] = (False, True)) -> list[Variant]:
    """Return every variant of `decode` that `attention` can take on a device.

    Parameters
    ----------
    device : Device
    masks : iterable of bool
        Whether calls are causal.
    """
    found = []
    features = [(Causal(),) if causal else () for causal in masks]
    # Few sequences, two to four for each multiprocessor, and many; and units of all sizes
    batches = 1, *(n * device.sm_count for n in (1, 2, 3, 4, 5, 9, 15))
    lengths = KEY_STEP, 48, 96, 160, 240, 300, 384, 500, 640, 1024, 1536, 3072, 6000, 20_000
    for dtype, (d, dv), batch, rows, seq_q, keys, mask in itertools.product(
        DTYPES, _HEAD_DIMS, batches, (1, 32, _MOST_ROWS), (1, 2), lengths, features
    ):
        group = max(1, rows // seq_q)
        problem = Problem(dtype, batch, group, 1, seq_q, keys, d, dv, 1.0, mask, "Contiguous")
        with contextlib.suppress(ValueError):  # no tiles on this GPU
            found.append(decode.plan_splits(problem, device).variant)
    return list(dict.fromkeys(found))
