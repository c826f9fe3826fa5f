"""A kernel's one parameter, and launches of which all but some addresses in it is known."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from cufa.compiler.dependent import Dependent
from cufa.launch.params import Buffer, free_buffers, taken_buffer


class Prepared:
    """A launch of which everything but addresses is filled in.

    Parameters
    ----------
    function : cupy.cuda.Function or Dependent
    grid : tuple of int
    threads : int
        Of a block.
    parameter : bytes-like
        The kernel's one parameter.
    places : tuple of int
        Where addresses are in it, in 64-bit words.
    smem_bytes : int
        Dynamic shared memory of a block.
    """

    __slots__ = ("_constants", "_launch")

    def __init__(
        self,
        function: Any,
        grid: tuple[int, int, int],
        threads: int,
        parameter: Any,
        places: tuple[int, ...] = (),
        smem_bytes: int = 0,
    ) -> None:
        content = bytes(parameter)
        self._launch = launcher(function, grid, (threads, 1, 1), smem_bytes)
        self._constants = self._launch, content, len(content), places

    def with_parameter(self, parameter: Any) -> Prepared:
        """Return the same launch with other content of the parameter."""
        other = copy(self)
        content = bytes(parameter)
        other._constants = self._launch, content, len(content), self._constants[3]
        return other

    @property
    def parameter(self) -> bytes:
        """The kernel's one parameter; what is in the places of addresses means nothing."""
        return self._constants[1]

    def __call__(self, *addresses: int) -> None:
        """Launch on the current stream, with these addresses in their places."""
        launch, content, nbytes, places = self._constants
        buffer = taken_buffer()
        buffer.bytes[:nbytes] = content
        words = buffer.words
        for place, address in zip(places, addresses, strict=True):
            words[place] = address
        # When it returns, the driver has copied the parameter.
        launch(buffer)
        free_buffers.append(buffer)


def launcher(
    function: Any, grid: tuple[int, int, int], block: tuple[int, int, int], smem_bytes: int
) -> Callable[[Buffer], None]:
    """Return what launches a kernel whose parameter is in a buffer."""
    if isinstance(function, Dependent):
        return function.launcher(grid, block, smem_bytes)
    return lambda buffer: function(grid, block, buffer.args, smem_bytes)
