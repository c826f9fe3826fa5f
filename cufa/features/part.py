"""A part of a score: what is compiled into a kernel for one feature, as a row of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Parameter(NamedTuple):
    """A run-time parameter of a part.

    Attributes
    ----------
    name : str
        Name of the struct's member, and of its value in `Feature.numbers`.
    dtype : str
        As NumPy writes it, such as "i4".
    """

    name: str
    dtype: str


class Part(NamedTuple):
    """A part of a score: a struct, see ``kernels/part.cuh``.

    Attributes
    ----------
    name : str
        Name of the struct.
    argument : str
        Argument of the call that asks for it.
    parameters : tuple of Parameter
        Parameters that a launch appends to ``Params``, in order.
    left_edge, right_edge : bool
        Whether it leaves out keys before the first, or after the last, that a query sees.
    jumps : bool
        Whether these keys may rise by more than one from query to query, see ``kernels/part.cuh``.
    decodes : bool
        Whether `cufa.decode` takes it.
    axes : str
        Axes of the array, the argument itself, that it reads: some of b, h, q and k, for batch,
        query heads, queries and keys. None if it reads no array.
    dtype : str
        Dtype of that array: "float32" and so on.
    source : str
        Source of the struct, if it was made of a caller's own expression.
    arrays : tuple of int
        Numbers of axes of the arrays that this expression reads.
    tilts : bool
        Whether what the expression adds grows evenly from key to key, see ``kernels/tilt.cuh``.
    """

    name: str
    argument: str
    parameters: tuple[Parameter, ...] = ()
    left_edge: bool = False
    right_edge: bool = False
    jumps: bool = False
    decodes: bool = False
    axes: str = ""
    dtype: str = ""
    source: str = ""
    arrays: tuple[int, ...] = ()
    tilts: bool = False

    @property
    def reads(self) -> bool:
        """Whether it reads arrays, or may: what a caller's own expression needs."""
        return bool(self.axes or self.source)

    @property
    def _read(self) -> list[tuple[str, Iterable[object]]]:
        """The names of the arrays that it reads, and their axes."""
        if self.axes:
            return [(self.argument, self.axes)]
        return [(f"{self.argument}_{i}", range(ndim)) for i, ndim in enumerate(self.arrays)]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The names of those of `numbers` that are addresses of arrays."""
        return tuple(f"{name}_data" for name, _ in self._read)

    @property
    def numbers(self) -> tuple[Parameter, ...]:
        """The members of the struct, in order: its parameters; address and strides of its arrays.

        An expression's arrays have their lengths, too.
        """
        found = list(self.parameters)
        for name, axes in self._read:
            found.append(Parameter(f"{name}_data", "u8"))
            found += (Parameter(f"{name}_stride_{axis}", "i8") for axis in axes)
            if self.source:
                found += (Parameter(f"{name}_length_{axis}", "i4") for axis in axes)
        return tuple(found)
