"""Plan -> launch of `decode`: all of its parameter but the addresses that each call gives."""

from __future__ import annotations

from typing import Any

from cufa.decode_problem import DecodeProblem, of_attention
from cufa.launch.decode import DecodeLayout
from cufa.launch.params import FourInts, free_buffers, taken_buffer
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
        None: the memory that blocks share is not the caller's.
    """

    __slots__ = ("_bytes", "_constants", "loaded", "plan")
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
        layout = loaded.layout
        self._constants = (
            loaded.function,
            (plan.grid, 1, 1),
            (plan.block, 1, 1),
            plan.smem_bytes,
            layout.nbytes,
            layout.places,
            loaded.scratch,
            plan.partial_floats,
        )
        buffer = taken_buffer()
        layout.fill(buffer.bytes, plan, problem, strides, table_stride)
        self._bytes = bytes(buffer.bytes[: layout.nbytes])
        free_buffers.append(buffer)

    def with_keys(self, capacity: int, address: int) -> DecodeLaunch:
        """Return the same launch but for the number of keys."""
        other = DecodeLaunch.__new__(DecodeLaunch)
        other.loaded, other.plan, other._constants = self.loaded, self.plan, self._constants
        changed = bytearray(self._bytes)
        self.loaded.layout.set_keys(memoryview(changed), capacity)
        other._bytes = bytes(changed)
        return other

    def __call__(
        self, q: int, k: int, v: int, out: int, lse: int, lengths: int = 0, block_table: int = 0
    ) -> None:
        """Launch on the current stream with these addresses; 0 where none is needed."""
        function, grid, block, smem_bytes, nbytes, places, scratch, floats = self._constants
        arrived, partial, kept = scratch.take(grid[0], floats) if floats else (0, 0, None)
        q_at, k_at, v_at, out_at, lse_at, arrived_at, partial_at, lengths_at, *table_at = places
        buffer = taken_buffer()
        buffer.bytes[:nbytes] = self._bytes
        words = buffer.words
        words[q_at] = q
        words[k_at] = k
        words[v_at] = v
        words[out_at] = out
        words[lse_at] = lse
        words[arrived_at] = arrived
        words[partial_at] = partial
        words[lengths_at] = lengths
        if block_table:
            words[table_at[0]] = block_table
        # When it returns, the driver has copied the parameter.
        function(grid, block, buffer.args, smem_bytes)
        free_buffers.append(buffer)
        del kept
