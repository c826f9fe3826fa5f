"""Keys of the calls of a kind: shapes, strides and alignment, but no addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

from cufa.arrays import Ints

Key = tuple[Any, ...]
AddressSlot = tuple[int, int]
"""A word of a kernel's parameter, and which of a launch's addresses goes there."""

TENSORS = 5
"""Addresses that a launch is given first: of q, k, v, the result and its log-sum-exp."""


class Signature(NamedTuple):
    """All that a launch of the kind depends on, but for addresses.

    The hot path looks up a plain tuple of the same order, which is made in less time.

    Attributes
    ----------
    q_shape, q_strides, k_shape, k_strides, v_shape, v_strides : tuple of int
        As the caller has them.
    aligned : tuple of bool
        Whether q, k and v are each aligned.
    out : tuple or None
        Shape and strides of the caller's own array for the result, and whether it is aligned.
    extras : tuple
        Shape, strides and dtype of each of `Extras.flat`, or None; for a `cufa.BlockMask` its key.
    """

    q_shape: Ints
    q_strides: Ints
    k_shape: Ints
    k_strides: Ints
    v_shape: Ints
    v_strides: Ints
    aligned: tuple[bool, ...]
    out: tuple[Ints, Ints, bool] | None
    extras: Key
