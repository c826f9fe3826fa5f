"""Launches a kernel whose parameter is complete but for addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cufa.compiler.dependent import Dependent
from cufa.launch.counters import low, refill
from cufa.launch.params import Buffer, free_buffers, taken_buffer
from cufa.launch.signature import AddressSlot

Memory = tuple[int, Callable[[], Any]]
"""A word of the parameter, and what returns the address of memory for one launch, or its owner."""


Launcher = Callable[[Buffer], None]
"""Launches a kernel whose parameter is in a buffer."""


def launcher(function: Any, grid: tuple[int, int, int], threads: int, smem_bytes: int) -> Launcher:
    """Return what launches a kernel.

    Parameters
    ----------
    function : cupy.cuda.Function or Dependent
    grid : tuple of int
    threads : int
        Threads of a block.
    smem_bytes : int
        Dynamic shared memory of a block.
    """
    block = threads, 1, 1
    if isinstance(function, Dependent):
        return function.launcher(grid, block, smem_bytes)
    return lambda buffer: function(grid, block, buffer.args, smem_bytes)


class PreparedLaunch:
    """A launch whose parameter is complete but for addresses.

    Parameters
    ----------
    launch : callable
        As in `launcher`.
    parameter : bytes-like
        The kernel's one parameter.
    places : tuple of AddressSlot
        Where addresses go.
    memory : (int, callable), optional
        See `Memory`.
    """

    __slots__ = ("_constants",)

    def __init__(
        self,
        launch: Launcher,
        parameter: Any,
        places: tuple[AddressSlot, ...] = (),
        memory: Memory | None = None,
    ) -> None:
        content = bytes(parameter)
        self._constants = launch, content, len(content), places, memory

    @property
    def parameter(self) -> bytes:
        """The kernel's one parameter; what is in the places of addresses means nothing."""
        _, content, *_ = self._constants
        return content

    def __call__(self, *addresses: int) -> None:
        """Launch on the current stream, with these addresses in their places."""
        launch, content, nbytes, places, memory = self._constants
        buffer = taken_buffer()
        buffer.bytes[:nbytes] = content
        words = buffer.words
        for place, which in places:
            words[place] = addresses[which]
        if memory is not None:
            place, take = memory
            of_launch = take()  # kept until the launch is queued
            words[place] = of_launch
        # When it returns, the driver has copied the parameter.
        launch(buffer)
        free_buffers.append(buffer)
        if low:
            refill()
