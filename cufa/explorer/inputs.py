"""Inputs of an exploration: q, k, v, arrays next to them, the caller's functions, a seed.

`head_options` returns those of one head, as oracles need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cufa.api.block_mask import BlockMask
from cufa.arrays import Array
from cufa.features import READINGS
from cufa.features.dropout import Dropout, kept
from cufa.features.expression.tracing import NOTHING, TracedFunctions
from cufa.features.feature import Places
from cufa.features.parts import ARRAYS, part_named
from cufa.features.random_arrays import normal
from cufa.features.user_functions import OWN, Blocks
from cufa.problem.extras import Extras, all_axes
from cufa.problem.problem import Problem


class Inputs(NamedTuple):
    """Inputs of a problem.

    Attributes
    ----------
    tensors : tuple of array
        q, k and v, (batch, heads, seq, head_dim), with any strides.
    ndim : int
        Axes of the caller's q.
    arrays : mapping
        By argument of `cufa.attention`; those that are there.
    traced : TracedFunctions
        `score_mod` and `mask_mod`, traced.
    score_mod, mask_mod : function, str or None
        These themselves.
    block_mask : BlockMask or None
    seed : int
        The seed of a dropout.
    """

    tensors: tuple[Array, ...] = ()
    ndim: int = 4
    arrays: Mapping[str, Array] = MappingProxyType({})
    traced: TracedFunctions = NOTHING
    score_mod: Callable[..., Any] | str | None = None
    mask_mod: Callable[..., Any] | str | None = None
    block_mask: BlockMask | None = None
    seed: int = 0

    def on(self, xp: Any) -> Inputs:
        """Return the same with all arrays but those that functions read as ones of a module.

        TypeError where functions read other arrays, or are C++: their results cannot be checked.
        """
        for name in ("score_mod", "mask_mod"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is C++: only what a function computes can be checked")
        for name, array in zip(self.traced.names, self.traced.arrays, strict=True):
            if not isinstance(array, xp.ndarray):
                raise TypeError(f"{name} must be a {xp.__name__} array, to be read on the GPU")
        arrays = {name: xp.asarray(array) for name, array in self.arrays.items()}
        tiles = self.block_mask
        if isinstance(tiles, BlockMask):
            tiles = BlockMask(
                tiles.mask_mod, xp.asarray(tiles.kinds), tiles.block, tiles.seq_q, tiles.seq_kv
            )
        return self._replace(arrays=arrays, block_mask=tiles)

    def extras(self, problem: Problem) -> Extras:
        """Return them as a launch is given them."""
        arrays: dict[str, Any] = dict(self.arrays)
        if problem.of(Blocks) is not None:
            arrays["block_mask"] = self.block_mask
        return Extras(tuple(map(arrays.get, ARRAYS)), mods=self.traced.arrays, seed=self.seed)


def undrawn(problem: Problem) -> str | None:
    """Return an argument of a problem for which `drawn` has nothing random, or None."""
    kinds = {feature.ARGUMENT for feature in problem.features}
    own = (name for name in (*OWN, Blocks.ARGUMENT) if name in kinds)
    return next(own, None if problem.kv == "Dense" else "lengths")


def drawn(problem: Problem, xp: Any) -> Inputs:
    """Return random arrays for what a problem reads."""
    p, dtype = problem, np.dtype(problem.dtype)
    of_queries, of_keys = (p.batch, p.heads_q, p.seq_q), (p.batch, p.heads_kv, p.seq_kv)
    shapes = (*of_queries, p.head_dim), (*of_keys, p.head_dim), (*of_keys, p.head_dim_v)
    tensors = tuple(normal(xp, shape, dtype, seed) for seed, shape in enumerate(shapes))
    arrays = {
        part.argument: READINGS[part.argument].random(part, problem, xp, seed)
        for seed, part in enumerate(map(part_named, problem.reads), 3)
    }
    return Inputs(tensors, arrays=arrays)


def head_options(
    xp: Any, problem: Problem, inputs: Inputs, place: tuple[int, int], rows: Array
) -> dict[str, Any]:
    """Return the options of `attend` for rows of the (batch, head) `place`.

    `keep`, the factors of the weights under dropout, (rows, keys), is None without.
    """
    p, dropout = problem, problem.of(Dropout)
    b, h = (xp.asarray([n]) for n in place)
    at = Places(b[:, None], h[:, None], rows[:, None], xp.arange(p.seq_kv), p.seq_q, p.seq_kv)
    found = {**p.asked, "at": at, "scale": p.scale, "keep": None}
    found |= {"score_mod": inputs.score_mod, "mask_mod": inputs.mask_mod}
    if dropout is not None:
        keep = kept(dropout.p, inputs.seed, b, h, rows, slice(0, p.seq_kv), xp)
        found["keep"] = keep[0, 0] / dropout.keep
    for name, array in inputs.arrays.items():
        whole = all_axes(name, array, inputs.ndim, p.sizes, xp)
        its = whole[place[1]] if whole.ndim == 1 else whole[place]
        found[name] = indexable(its)[rows] if its.ndim else its
    return found


def indexable(array: Array) -> Array:
    """Return numbers in float32, as CuPy does not take rows of bfloat16; masks as they are."""
    return array if array.dtype in (np.bool_, np.uint8) else array.astype(np.float32)
