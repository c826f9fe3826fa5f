"""Problem + Device -> how `attention` runs it: by a kernel of its own, or as `decode` would."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable

from cufa.decode_problem import MAX_KEYS, DecodeProblem, of_attention
from cufa.device import Device
from cufa.kernel import ELEMENT_BYTES, KERNELS
from cufa.planner import decode
from cufa.planner import plan as tiled
from cufa.planner.decode import DecodePlan
from cufa.planner.plan import KEY_STEP, Plan
from cufa.planner.tuned_table import Table
from cufa.problem import Problem
from cufa.variant import Variant

# A kernel of attention gives each tile of rows to one multiprocessor, whatever the keys. Few tiles
# leave the others idle, which `decode` does not; but it reads K and V once for each of its small
# tiles of rows. The model counts in bytes that a multiprocessor reads meanwhile, 34 a nanosecond on
# an H200, since the ratio of arithmetic to reading differs little from GPU to GPU. Its constants
# fit an H200's times for 32/8 heads of 128 columns, batch x queries x keys: `decode` takes 14 us
# for 1 x 1 x 8192, 123 for 16 x 1 x 8192, 258 for 16 x 16 x 8192; fa3_wgmma 70, 127 and 128.
_BEGIN_AND_END = 140_000
"""What `decode` takes longer to begin and end, where pieces are merged: 4 us."""
_MANY_ROWS = 1.1
"""What `decode` takes longer with tiles of more than 16 rows, whose pieces are larger."""
_OTHERS_READ = 1.05
"""What the others take longer where all wait for memory."""
_MOST_ROWS = 128
"""That share a K/V head: beyond, nothing was measured."""

_HEAD_DIMS = (*((n, n) for n in (32, 64, 96, 128, 192, 256)), (192, 128))
"""Of the variants that are taken, so that not too many have to be compiled ahead of time."""

_REASON = "few queries: keys are split, as for cufa.decode"


class Planner:
    """Plans calls that differ in sizes only, quickly: what they have in common is found once.

    Parameters
    ----------
    problem : Problem
        One of them.
    device : Device
    kernel : str or Variant, optional
        Forces a kernel of attention's own, or one instantiation of it.
    table : Table, optional
        Of this device, see `cufa.tuned.user_table`.

    Attributes
    ----------
    tiled : callable
        Problem -> the plan of a kernel of attention's own.

    Raises
    ------
    TypeError, ValueError
        As `cufa.planner.plan.plan`.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        kernel: str | Variant | None = None,
        table: Table | None = None,
    ) -> None:
        self.tiled = tiled.Planner(problem, device, kernel, table)
        self._device, self._forced = device, kernel is not None

    def __call__(self, problem: Problem) -> Plan | DecodePlan:
        """Return a problem's plan; errors are those of `plan`."""
        found = self.tiled(problem)
        return found if self._forced else faster(problem, self._device, found)


def plan(
    problem: Problem,
    device: Device,
    kernel: str | Variant | None = None,
    table: Table | None = None,
) -> Plan | DecodePlan:
    """Choose how a call of `attention` runs on a device; arguments and errors as of `Planner`."""
    found = tiled.plan(problem, device, kernel, table)
    return found if kernel is not None else faster(problem, device, found)


def faster(problem: Problem, device: Device, other: Plan) -> Plan | DecodePlan:
    """Return the plan as `decode` would run a problem where that is faster, or else the other one.

    Parameters
    ----------
    problem : Problem
    device : Device
    other : Plan
        Of a kernel of attention's own.
    """
    _, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v, _, _ = problem
    rows = problem.group * seq_q
    tiles = batch * heads_q // other.pack * other.q_tiles
    if tiles == 0 or rows > _MOST_ROWS or not 0 < seq_kv <= MAX_KEYS:
        return other
    variant = other.variant
    kernel = KERNELS[variant.kernel]
    keys = -(-seq_kv // KEY_STEP) * KEY_STEP
    busiest = -(-tiles // device.sm_count) * variant.bm * keys
    flops = 2 * busiest * (variant.head_dim + variant.head_dim_v)
    read = batch * heads_kv * keys * (head_dim + head_dim_v) * ELEMENT_BYTES[problem.dtype]
    others = max(flops / kernel.flops_per_byte, _OTHERS_READ * read / device.sm_count)
    if others < _BEGIN_AND_END:
        return other
    try:
        found = decode.plan(of_attention(problem), device)
    except ValueError:  # too large, or head dims of which this GPU holds no tiles
        return other
    if (found.variant.head_dim, found.variant.head_dim_v) not in _HEAD_DIMS:
        return other
    slower = _MANY_ROWS if found.variant.bm > 16 else 1
    ours = _BEGIN_AND_END + slower * found.row_tiles * read / min(found.grid, device.sm_count)
    return found._replace(reason=_REASON) if ours < others else other


def decode_variants(device: Device, masks: Iterable[bool] = (False, True)) -> list[Variant]:
    """Return every variant of `decode` that `attention` can take on a device.

    Parameters
    ----------
    device : Device
    masks : iterable of bool
        Whether calls are causal.
    """
    found = []
    # Few sequences, about as many as multiprocessors, and twice as many
    batches = 1, device.sm_count, 2 * device.sm_count
    for dtype, (d, dv), batch, rows, seq_q, causal in itertools.product(
        ELEMENT_BYTES, _HEAD_DIMS, batches, (1, 32, _MOST_ROWS), (1, 2), masks
    ):
        group = max(1, rows // seq_q)
        problem = DecodeProblem(dtype, batch, group, 1, seq_q, KEY_STEP, 0, 0, d, dv, causal, 1.0)
        with contextlib.suppress(ValueError):  # no tiles on this GPU
            found.append(decode.plan(problem, device).variant)
    return list(dict.fromkeys(found))
