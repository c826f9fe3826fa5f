"""A kernel's one parameter, and launches of which all but some addresses in it is known."""

from __future__ import annotations

from typing import Any

from cufa.launch.params import free_buffers, taken_buffer


class Prepared:
    """A launch of which everything but addresses is filled in.

    Parameters
    ----------
    function : cupy.cuda.Function
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

    __slots__ = ("_constants",)

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
        block = (threads, 1, 1)
        self._constants = function, grid, block, smem_bytes, content, len(content), places

    def with_parameter(self, parameter: Any) -> Prepared:
        """Return the same launch with other content of the parameter."""
        function, grid, (threads, _, _), smem_bytes, _, _, places = self._constants
        return Prepared(function, grid, threads, parameter, places, smem_bytes)

    @property
    def parameter(self) -> bytes:
        """The kernel's one parameter; what is in the places of addresses means nothing."""
        return self._constants[4]

    def __call__(self, *addresses: int) -> None:
        """Launch on the current stream, with these addresses in their places."""
        function, grid, block, smem_bytes, content, nbytes, places = self._constants
        buffer = taken_buffer()
        buffer.bytes[:nbytes] = content
        words = buffer.words
        for place, address in zip(places, addresses, strict=True):
            words[place] = address
        # When it returns, the driver has copied the parameter.
        function(grid, block, buffer.args, smem_bytes)
        free_buffers.append(buffer)
