"""Plan -> launch: the parameter of attention's kernels, filled in but for addresses."""

from __future__ import annotations

from functools import partial
from typing import Any

from cufa.arrays import Ints
from cufa.features.parts import is_uneven
from cufa.launch import counters, scratch
from cufa.launch.decode import DecodeLayout
from cufa.launch.launch import Launch, Launcher, Memory, launcher, prepared_launch
from cufa.launch.params import AttentionLayout, FourInts, ParameterLayout, encoded_map
from cufa.planner.decode import DecodePlan
from cufa.planner.plan import Plan
from cufa.problem.extras import Extras
from cufa.problem.problem import Problem
from cufa.remembered import remember
from cufa.specs import KERNELS
from cufa.specs.kv import LENGTHS
from cufa.specs.tile import panel_columns
from cufa.specs.variant import Variant

_ROWS = 64  # of a box of Q or of O: a warpgroup's

_PLANS = 1024  # of a variant, whose launches are remembered
_MAPS = 1024  # tensor maps of a variant that are remembered

_Planned = tuple[list[float], Launcher, Memory | None, Plan | DecodePlan]
"""The part of a launch that is the same for all lengths of a plan: numbers, and how it runs."""


class LoadedKernel:
    """A variant whose kernel is ready to be launched on a device.

    Parameters
    ----------
    variant : Variant
    function : cupy.cuda.Function or Dependent
    device_id : int
    extras : Extras
        The extras of all its launches: arrays, or their shapes, strides and dtypes.

    Attributes
    ----------
    variant : Variant
    tma : bool
        Whether it reads and writes through tensor maps.
    """

    def __init__(self, variant: Variant, function: Any, device_id: int, extras: Extras) -> None:
        kernel = KERNELS[variant.kernel]
        self.variant, self.tma = variant, kernel.tma
        self._function = function
        self._layout: ParameterLayout
        self._layout = DecodeLayout(variant) if kernel.decodes else AttentionLayout(variant)
        self._places = self._layout.places_of(extras)
        self._scratch = scratch.of_device(device_id)
        self._counters = counters.of_device(device_id)
        self._columns = panel_columns(variant.head_dim), panel_columns(variant.head_dim_v)
        self._maps: dict[tuple[Ints, Ints, Ints], bytes] = {}
        self._planned: dict[Ints, _Planned] = {}
        # Blocks draw the tiles that wait for them, see kernels/scheduler_sm90.cuh.
        uneven = is_uneven(variant.score) or variant.kv in LENGTHS
        self._draws_tiles = kernel.persistent and uneven

    def prepared(
        self,
        plan: Plan | DecodePlan,
        problem: Problem,
        shapes: FourInts,
        strides: FourInts,
        address: int,
        numbers: tuple[Ints, ...],
        extras: Extras,
    ) -> Launch:
        """Return a launch that is given the addresses of q, k, v, the result, its LSE and extras.

        Parameters
        ----------
        plan : Plan or DecodePlan
        problem : Problem
            Not empty, and with a scale that is not negative.
        shapes, strides : tuple of tuple of int
            For q, k, v and the result, 4-D (batch, heads, seq, head_dim) arrays, which the
            kernel takes as they are; strides in bytes.
        address : int
            The address of any of these arrays, as the driver needs one; each launch has its own.
        numbers : tuple of tuple of int
            Strides of the arrays that parts of the score read; see `cufa.problem.extras.placed`.
        extras : Extras
            Shapes, strides and dtypes of these arrays.
        """
        of_plan, launch, memory, _ = self._of_plan(plan, problem)
        content = self._layout.of_call(of_plan, problem, strides, numbers, extras)
        if self.tma:
            content = self._maps_of(plan, shapes, strides, address) + content
        return prepared_launch(launch, content, self._places, memory)

    def _of_plan(self, plan: Plan | DecodePlan, problem: Problem) -> _Planned:
        """Return what all launches of a plan have in common; made once."""
        sizes = problem.batch, problem.heads_q, problem.heads_kv
        key = id(plan), *sizes  # the number is not used again as long as the plan is here
        planned = self._planned.get(key)
        if planned is None:
            launch = launcher(self._function, (plan.grid, 1, 1), plan.block, plan.smem_bytes)
            numbers, memory = self._layout.of_plan(plan, problem), self._memory(plan, problem)
            planned = remember(self._planned, key, (numbers, launch, memory, plan), _PLANS)
        return planned

    def _memory(self, plan: Plan | DecodePlan, problem: Problem) -> Memory | None:
        """Return what gives the blocks of each launch the memory that they share, if they do."""
        word = self._layout.memory_word
        if isinstance(plan, DecodePlan):
            floats = plan.partial_floats
            return (word, partial(self._scratch.take, floats)) if floats else None
        tiles = problem.batch * problem.heads_q // plan.pack * plan.q_tiles
        # With fewer, each block has its own: see next_tile in kernels/scheduler_sm90.cuh.
        draws = self._draws_tiles and tiles > 2 * plan.grid
        return (word, self._counters.take) if draws else None

    def _maps_of(
        self, plan: Plan | DecodePlan, shapes: FourInts, strides: FourInts, address: int
    ) -> bytes:
        """Return the tensor maps of q, k, v and the result; arguments as in `prepared`."""
        assert isinstance(plan, Plan)
        (q, k, v, out), (of_q, of_k, of_v, of_out) = shapes, strides
        pack, bn, (columns, columns_v) = plan.pack, self.variant.bn, self._columns
        map_out = map_q = self._map(address, q, of_q, (pack, _ROWS, columns))
        map_v = map_k = self._map(address, k, of_k, (1, bn, columns))
        # V often lies as K does, and O as Q
        alike = columns == columns_v
        if not alike or k != v or of_k != of_v:
            map_v = self._map(address, v, of_v, (1, bn, columns_v))
        if not alike or q != out or of_q != of_out:
            map_out = self._map(address, out, of_out, (pack, _ROWS, columns_v))
        return b"".join((map_q, map_k, map_v, map_out))

    def _map(self, address: int, shape: Ints, strides: Ints, box: Ints) -> bytes:
        """Return the tensor map of an array, which often lies as one before.

        A box has a number of heads, rows and columns.
        """
        described = shape, strides, box
        return self._maps.get(described) or remember(
            self._maps, described, encoded_map(self.variant.dtype, address, *described), _MAPS
        )
