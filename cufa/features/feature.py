"""A feature of the scores: each file of this folder says all of one, but for its CUDA part.

A `Problem` holds the features that a call asks for, as small values. A feature knows its argument
and the checks of it, which parts are compiled into a kernel and the numbers that these are given,
the same on NumPy arrays, the plain formula of the oracles, and its option of the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from cufa.arrays import Array
from cufa.features.part import Part


class Call(Protocol):
    """A `Problem`, as far as a feature asks."""

    @property
    def dtype(self) -> str:
        """The dtype of q."""

    @property
    def heads_q(self) -> int:
        """Query heads."""

    @property
    def batch(self) -> int:
        """Sequences."""

    @property
    def seq_q(self) -> int:
        """Queries."""

    @property
    def seq_kv(self) -> int:
        """Keys."""

    @property
    def precision(self) -> str | None:
        """Whether in 8 bits: "fp8", or None."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""

    @property
    def returns_lse(self) -> bool:
        """Whether the log-sum-exp is asked for."""

    @property
    def is_cached(self) -> bool:
        """Whether keys are in a cache, whose sequences may have fewer of them."""


class Reach(NamedTuple):
    """How far queries see.

    Attributes
    ----------
    left, right : int or None
        Keys before and after the one that a query stands at, at most; None for any number.
    most : int or None
        Keys that a query sees, at most.
    """

    left: int | None = None
    right: int | None = None
    most: int | None = None


class Option(NamedTuple):
    """An option of the command line.

    Attributes
    ----------
    flag, metavar, help : str
    read : callable
        Text -> value of the argument; ValueError says what is wrong with the text.
    """

    flag: str
    metavar: str
    help: str
    read: Callable[[str], object]


class Tile(NamedTuple):
    """A tile of scores on NumPy arrays, (batch, heads_q, rows, keys).

    Attributes
    ----------
    batch, heads, rows, keys : slice
        The numbers of its sequences, query heads, queries and keys.
    diagonal : int
        Query i stands at key i + diagonal.
    arrays : mapping
        Arrays of these sequences and query heads, by argument, with all axes of their parts.
    seed : int
        The seed of a dropout.
    """

    batch: slice
    heads: slice
    rows: slice
    keys: slice
    diagonal: int = 0
    arrays: Mapping[str, np.ndarray] = MappingProxyType({})
    seed: int = 0

    @property
    def numbers(self) -> tuple[np.ndarray, ...]:
        """The numbers as arrays of shapes that broadcast to the scores."""
        return np.ix_(*(np.arange(span.start, span.stop) for span in self[:4]))


class Places(NamedTuple):
    """The numbers of sequences b, heads h, queries i and keys j, which broadcast to the scores."""

    b: Array
    h: Array
    i: Array
    j: Array
    seq_q: int
    seq_kv: int

    @property
    def ahead(self) -> Array:
        """How many keys j is ahead of the key that query i stands at."""
        return self.j - (self.i + self.seq_kv - self.seq_q)


Bound = Any
"""The first key that queries see, or the end of them: an int or an array; None for no bound."""


@dataclass(frozen=True)
class Feature:
    """A wish of a call for its scores; the methods here do nothing.

    Attributes
    ----------
    ARGUMENT : str
        Its name in the public functions.
    PARTS : tuple of Part
        All that it may compile into a kernel.
    LONGEST : int or None
        The most queries, and keys, that its numbers are for.
    CHANGES : bool
        Whether it changes scores, by `apply`.
    """

    ARGUMENT: ClassVar[str]
    PARTS: ClassVar[tuple[Part, ...]] = ()
    LONGEST: ClassVar[int | None] = None
    CHANGES: ClassVar[bool] = False

    def parts(self, call: Call) -> tuple[str, ...]:
        """Return the names of those of `PARTS` that a call needs."""
        return tuple(part.name for part in self.PARTS)

    def numbers(self, call: Call) -> dict[str, float]:
        """Return the run-time parameters of its parts, by name."""
        return {}

    def sees(self, i: Any, stands: Any) -> tuple[Bound, Bound]:
        """Return the first key that queries i see, and the end, of those at key `stands`."""
        left, right, _ = self.reach
        return (
            None if left is None else stands - left,
            None if right is None else stands + 1 + right,
        )

    @property
    def reach(self) -> Reach:
        """How far queries see from the keys at which they stand."""
        return Reach()

    @property
    def words(self) -> str:
        """The words for it in a line about a problem."""
        return self.ARGUMENT

    @property
    def given(self) -> object:
        """The argument as plain values, or the name of the part of one that is none."""
        given = tuple(getattr(self, field.name) for field in fields(self))
        return given[0] if len(given) == 1 else given

    # On NumPy arrays

    def apply(self, rS: np.ndarray, factor: np.floating, tile: Tile) -> np.floating:
        """Change scores in place, which are `rS` times `factor`; return the factor that is left."""
        return factor

    def slope(self, scores: np.ndarray) -> np.ndarray | None:
        """Return the derivative of scores that `apply` has made by those before; None for 1."""
        return None

    def hidden(self, tile: Tile) -> np.ndarray | None:
        """Return where queries do not see keys, other than by `sees`, or None."""
        return None

    # The formula of the oracles: apart from all that is above, and of the argument itself. Arrays
    # are of the module `xp` and broadcast to the scores.

    @staticmethod
    def changed(given: Any, scores: Array, at: Places, xp: Any) -> Array:
        """Return the changed scores."""
        return scores

    @staticmethod
    def hides(given: Any, at: Places, xp: Any) -> Array | None:
        """Return where queries do not see keys, or None."""
        return None


@dataclass(frozen=True)
class Value(Feature):
    """A feature whose argument is a plain value.

    Attributes
    ----------
    OPTION : Option or None
        Its option of the command line.
    DEFAULT : object
        Default of the argument.
    """

    OPTION: ClassVar[Option | None] = None
    DEFAULT: ClassVar[object] = None

    @classmethod
    def parse(cls, given: object) -> Value | None:
        """Check the argument; return None if it asks for nothing.

        The argument is None only where None is not the default.

        Raises
        ------
        TypeError, ValueError
            They name the argument, and say what is needed.
        """
        raise NotImplementedError

    def settle(self, found: dict[str, Value]) -> None:
        """Bring features of a call, by argument, to one form if several forms say the same."""


@dataclass(frozen=True)
class Reading(Feature):
    """A feature that reads an array, or whatever a caller's own function reads.

    Attributes
    ----------
    part : str
        The name of the part that does.
    """

    part: str

    def parts(self, call: Call) -> tuple[str, ...]:
        """Return its one part."""
        return (self.part,)

    @classmethod
    def random(cls, part: Part, call: Call, xp: Any, seed: int) -> Array:
        """Return a random array for a part to read, for explorations.

        `xp` is ``numpy`` or ``cupy``.
        """
        raise NotImplementedError
