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

Launch = Callable[..., None]
"""Launches a kernel, or several, on the current stream, with the addresses that it is given."""


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


def prepared_launch(
    launch: Launcher,
    parameter: Any,
    places: tuple[AddressSlot, ...] = (),
    memory: Memory | None = None,
) -> Launch:
    """Return a launch whose parameter is complete but for addresses.

    Parameters
    ----------
    launch : callable
        As in `launcher`.
    parameter : bytes-like
        The kernel's one parameter; what is in the places of addresses means nothing.
    places : tuple of AddressSlot
        Where addresses go.
    memory : (int, callable), optional
        See `Memory`.
    """
    content = bytes(parameter)
    nbytes = len(content)

    def launched(*addresses: int) -> None:
        buffer = taken_buffer()
        if buffer.content is not content:  # a call is often like the one before
            buffer.bytes[:nbytes] = content
            buffer.content = content
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

    return launched
