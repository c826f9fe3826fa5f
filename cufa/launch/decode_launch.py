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
        layout = self.layout
        if isinstance(problem, Problem):  # which has neither lengths nor a table
            given = (-1, *layout.arrays)
            return DecodeLaunch(self, plan, of_attention(problem), strides, 0, beside, given)
        table_stride, steps = beside
        given = (0, *(1,) * layout.paged, *(2 + which for which in layout.arrays))
        return DecodeLaunch(self, plan, problem, strides, table_stride, steps, given)


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
    steps : tuple of tuple of int
        Strides of the arrays that parts of the score read, in elements.
    given : tuple of int
        Which of the addresses beside those of q, k, v and the result are those of the lengths, of
        the block table, if there is one, and of these arrays; -1 for none.

    Attributes
    ----------
    loaded : LoadedDecode
    plan : DecodePlan
    workspace_floats : int
        0: the memory that blocks share is not the caller's.
    """

    __slots__ = ("_floats", "_given", "_prepared", "_scratch", "loaded", "plan")
    workspace_floats = 0

    def __init__(
        self,
        loaded: LoadedDecode,
        plan: DecodePlan,
        problem: DecodeProblem,
        strides: FourInts,
        table_stride: int,
        steps: tuple[Ints, ...],
        given: Ints,
    ) -> None:
        self.loaded, self.plan, self._given = loaded, plan, given
        self._scratch, self._floats = loaded.scratch, plan.partial_floats
        layout = loaded.layout
        parameter = bytearray(layout.nbytes)
        layout.fill(memoryview(parameter), plan, problem, strides, table_stride, steps)
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
            Of a call of `decode`, those of the lengths and of the block table; 0 where there is
            none. Then those of `cufa.score.ARRAYS`, if parts of the score read any.
        """
        partial = self._scratch.take(self._floats) if self._floats else None
        addresses = (*beside, 0)
        chosen = [addresses[i] for i in self._given]
        self._prepared(q, k, v, out, lse, partial.address if partial else 0, *chosen)
