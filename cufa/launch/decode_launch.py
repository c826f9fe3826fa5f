"""Plan -> launch of `decode`: all of its parameter but the addresses that each call gives."""

from __future__ import annotations

from copy import copy
from typing import Any

from cufa.decode_problem import DecodeProblem, of_attention
from cufa.launch.argument import Prepared
from cufa.launch.decode import DecodeLayout
from cufa.launch.params import FourInts, Ints
from cufa.launch.scratch import of_device
from cufa.planner.decode import DecodePlan
from cufa.problem import Problem
from cufa.variant import Variant


class LoadedDecode:
    """A variant of `decode` that is ready to be launched on a device.

    Parameters
    ----------
    variant : Variant
    function : cupy.cuda.Function
    device_id : int

    Attributes
    ----------
    layout : DecodeLayout
        Of its parameter.
    scratch : Scratch
    tma : bool
        False: it reads and writes without tensor maps.
    """

    tma = False

    def __init__(self, variant: Variant, function: Any, device_id: int) -> None:
        self.function = function
        self.layout = DecodeLayout(variant)
        self.scratch = of_device(device_id)

    def reserve(self) -> None:
        """Do nothing: ordinary launches set aside what captured ones need."""

    def ready(
        self,
        plan: DecodePlan,
        problem: DecodeProblem | Problem,
        shapes: FourInts,
        strides: FourInts,
        address: int,
        beside: tuple[Any, ...],
    ) -> DecodeLaunch:
        """Return a launch, see `DecodeLaunch`; shapes are in the problem."""
        if isinstance(problem, Problem):
            problem = of_attention(problem)
        table = beside[1] if beside else None
        return DecodeLaunch(self, plan, problem, strides, table[1][0] if table else 0)


class DecodeLaunch:
    """A launch of which everything but the addresses is filled in.

    Parameters
    ----------
    loaded : LoadedDecode
    plan : DecodePlan
    problem : DecodeProblem
        Not empty, and with a scale that is not negative.
    strides : tuple of tuple of int
        Of q, the caches and the result, as 4-D (batch, heads, seq, head_dim) arrays that the kernel
        takes as they are, in bytes.
    table_stride : int
        Of the rows of the block table, in bytes.

    Attributes
    ----------
    loaded : LoadedDecode
    plan : DecodePlan
    workspace_floats : int
        0: the memory that blocks share is not the caller's.
    """

    __slots__ = ("_floats", "_prepared", "_scratch", "loaded", "plan")
    workspace_floats = 0

    def __init__(
        self,
        loaded: LoadedDecode,
        plan: DecodePlan,
        problem: DecodeProblem,
        strides: FourInts,
        table_stride: int,
    ) -> None:
        self.loaded, self.plan = loaded, plan
        self._scratch, self._floats = loaded.scratch, plan.partial_floats
        layout = loaded.layout
        parameter = bytearray(layout.nbytes)
        layout.fill(memoryview(parameter), plan, problem, strides, table_stride)
        grid = (plan.grid, 1, 1)
        self._prepared = Prepared(
            loaded.function, grid, plan.block, parameter, layout.places, plan.smem_bytes
        )

    def with_keys(self, capacity: int, address: int) -> DecodeLaunch:
        """Return the same launch but for the number of keys."""
        other = copy(self)
        parameter = bytearray(self._prepared.parameter)
        self.loaded.layout.set_keys(memoryview(parameter), capacity)
        other._prepared = self._prepared.with_parameter(parameter)
        return other

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, beside: Ints = ()) -> None:
        """Launch on the current stream.

        Parameters
        ----------
        q, k, v, out, lse : int
            Addresses; 0 where none is needed.
        beside : tuple of int
            Those of the lengths and of the block table; 0 where there is none.
        """
        lengths, block_table = beside or (0, 0)
        partial = self._scratch.take(self._floats) if self._floats else None
        table = (block_table,) if block_table else ()
        self._prepared(q, k, v, out, lse, partial.address if partial else 0, lengths, *table)
