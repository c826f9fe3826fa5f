"""`score_mod` and `mask_mod` on the CPU: a caller's functions, called with NumPy arrays.

They are traced first, as for a GPU, so that both refuse the same functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cufa.checks import check_apart
from cufa.cpu.spans import part_of
from cufa.features.expression.closures import closure
from cufa.features.expression.tracing import Partial, check, derivative_of, partials_of, trace
from cufa.features.feature import Tile

Function = Callable[..., Any]

_ARGUMENTS = {
    "score_mod": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask_mod": ("b", "h", "q_idx", "kv_idx"),
}

Tiles = tuple[np.ndarray, tuple[int, int]]
"""The kinds of a mask's tiles, and their queries and keys; see `cufa.BlockMask`."""


def checked(argument: str, given: object) -> Any:
    """Return a function of a call that runs on the CPU, or None.

    Raises
    ------
    TypeError
        It is neither, takes other arguments than it is called with, or cannot be traced.
    ValueError
        It is a string of C++.
    """
    if isinstance(given, str):
        raise ValueError(
            f"{argument} must be a function for NumPy arrays, which run on the CPU, not C++"
        )
    if given is None:
        return None
    function = check(argument, given)
    called_with = _ARGUMENTS[argument]
    try:
        inspect.signature(function).bind(*called_with)
    except TypeError as error:
        wanted = ", ".join(called_with)
        raise TypeError(f"{argument}: {error}; it is called with ({wanted})") from None
    trace(**{"score_mod": None, "mask_mod": None, argument: function})
    return function


class Functions(NamedTuple):
    """The functions of a call.

    Attributes
    ----------
    score_mod, mask_mod : function or None
    tiles : Tiles, optional
        Which tiles `mask_mod` hides.
    derivative : function, optional
        The derivative of `score_mod` by the score, with the same arguments.
    partials : mapping
        The derivatives of `score_mod` by arrays that it reads, by their names.
    """

    score_mod: Function | None = None
    mask_mod: Function | None = None
    tiles: Tiles | None = None
    derivative: Function | None = None
    partials: Mapping[str, list[Partial]] = MappingProxyType({})

    @property
    def is_called(self) -> bool:
        """Whether there is a function, which may raise what it likes."""
        return not (self.score_mod is self.mask_mod is None)

    def check_apart(self, name: str, written: np.ndarray) -> None:
        """Refuse an array to write that shares memory with one that a function or a mask reads."""
        functions = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        read = {
            f"{argument}: {label}": array
            for argument, function in functions.items()
            if function is not None
            for array, label in closure(function).arrays.values()
        }
        if self.tiles is not None:
            read["block_mask"] = self.tiles[0]
        check_apart(name, written, read)

    def see(self, tile: Tile) -> bool:
        """Whether queries may see keys of a tile: not if it is known that none sees any."""
        return self.tiles is None or bool(_kinds(self.tiles, tile).any())

    def apply(self, scores: np.ndarray, tile: Tile) -> None:
        """Let `score_mod` change scores, (batch, heads, rows, keys), in place."""
        if self.score_mod is None:
            return
        changed = self.score_mod(scores, *tile.numbers)
        try:
            np.copyto(scores, changed, casting="same_kind")
        except (TypeError, ValueError) as error:
            raise type(error)(f"score_mod: {error}") from error

    def slope(self, scores: np.ndarray, tile: Tile) -> np.ndarray | None:
        """Return the derivative of `apply` by the scores; None for 1."""
        return None if self.derivative is None else self.derivative(scores, *tile.numbers)

    def gather(
        self, dS: np.ndarray, before: np.ndarray, tile: Tile, into: Mapping[str, np.ndarray]
    ) -> None:
        """Add the gradients of arrays that `score_mod` reads.

        Parameters
        ----------
        dS : ndarray, (batch, heads, rows, keys)
            The gradient of scores; 0 where nothing is seen.
        before : ndarray
            The scores that the function was called with.
        tile : Tile
        into : mapping
            The sums to add to, by the names of the arrays.
        """
        inputs = before, *tile.numbers
        for name, partials in self.partials.items():
            for each in partials:
                gradient = np.where(dS == 0, np.float32(0), dS * each.of(*inputs))
                at = [index(*inputs) for index in each.at]
                shape = np.broadcast_shapes((1,) * gradient.ndim, *(i.shape for i in at))
                same = tuple(axis for axis, n in enumerate(shape) if n == 1)
                gradient = gradient.sum(axis=same, keepdims=True)
                if at:
                    np.add.at(into[name], tuple(np.broadcast_to(i, shape) for i in at), gradient)
                else:
                    into[name][...] += gradient.item()

    def hidden(self, tile: Tile) -> np.ndarray | None:
        """Return where `mask_mod` hides keys of a tile; None if nowhere."""
        if self.tiles is not None and (_kinds(self.tiles, tile) == 2).all():
            return None
        return None if self.mask_mod is None else ~seen(self.mask_mod, tile)


def seen(mask_mod: Function, tile: Tile) -> np.ndarray:
    """Return where a `mask_mod` lets queries see keys, (batch, heads, rows, keys)."""
    found = np.asarray(mask_mod(*tile.numbers))
    if found.dtype != np.bool_:
        raise TypeError(f"mask_mod returns what is {found.dtype}: a bool is needed")
    try:
        return np.broadcast_to(found, np.broadcast_shapes(*(x.shape for x in tile.numbers)))
    except ValueError as error:
        raise ValueError(f"mask_mod: {error}") from error


def _kinds(tiles: Tiles, tile: Tile) -> np.ndarray:
    """Return the kinds of the tiles in which some pairs of queries and keys are."""
    kinds, block = tiles
    blocks = (
        slice(span.start // n, -(-span.stop // n))
        for span, n in zip((tile.rows, tile.keys), block, strict=True)
    )
    return part_of(kinds, tile.batch, tile.heads, *blocks)


NO_FUNCTIONS = Functions()
"""The functions of a caller who gave none."""


def differentiable(
    score_mod: object, mask_mod: object, wrt: Iterable[str], tiles: Tiles | None = None
) -> Functions:
    """Return the functions of a call whose gradients are computed on the CPU; as `checked`.

    `wrt` names arrays that `score_mod` reads.
    """
    functions = checked("score_mod", score_mod), checked("mask_mod", mask_mod)
    derivative = None if score_mod is None else derivative_of(functions[0])
    partials = {name: partials_of(functions[0], name) for name in wrt}
    return Functions(*functions, tiles=tiles, derivative=derivative, partials=partials)
