"""Signature -> how the kernels of a kind see its arrays: as 4-D views, some of them copied."""

from __future__ import annotations

from typing import NamedTuple

from cufa.arrays import ALIGNMENT, ArrayInfo, Ints, extent, overlaps_itself, readable, whole_chunks
from cufa.dtypes import DTYPES, kv_bytes
from cufa.launch.params import FourInts
from cufa.launch.signature import Signature
from cufa.problem.extras import Extras
from cufa.problem.problem import CACHES, Problem

Extent = tuple[int, int]
"""Where an array begins and ends, counted from its address."""


class Views(NamedTuple):
    """Shapes and strides of q, k, v and the result as (batch, heads, seq, head_dim) arrays."""

    shapes: FourInts
    strides: FourInts


class Viewer:
    """Views the arrays of a kind of calls.

    Parameters
    ----------
    problem : Problem
        The problem of one of them.
    layout : str
    padded : bool
        Whether zeros follow the rows of K and V, up to whole chunks of `ALIGNMENT` bytes.

    Attributes
    ----------
    names : tuple of str
        Names of the user's arrays that are q, k, v and out.
    """

    def __init__(self, problem: Problem, layout: str, padded: bool) -> None:
        cached = problem.kv in CACHES
        self.names = ("q", "k_cache", "v_cache", "out") if cached else ("q", "k", "v", "out")
        self._layout, self._padded = layout, padded
        self._itemsize = DTYPES[problem.dtype].bytes
        self._kv_itemsize = size = kv_bytes(problem.dtype, problem.kv_dtype)
        self._negates_q = problem.scale < 0
        whole = problem.head_dim * size % ALIGNMENT == problem.head_dim_v * size % ALIGNMENT == 0
        self._may_be_plain = whole and not self._negates_q  # else some array is copied

    def views(self, signature: Signature) -> Views:
        """Return the arrays as the kernels see them, with a result that is made here.

        Raises
        ------
        ValueError
            They have other numbers of axes.
        """
        s = signature
        if not 2 <= len(s.q_shape) == len(s.k_shape) == len(s.v_shape) <= 4:
            raise ValueError("q, k and v need as many axes: 2, 3 or 4")
        q, q_strides = self._bhsd(s.q_shape, s.q_strides)
        k, k_strides = self._bhsd(s.k_shape, s.k_strides)
        v, v_strides = self._bhsd(s.v_shape, s.v_strides)
        batch, heads, seq, _ = q
        result = batch, heads, seq, v[3]
        return Views((q, k, v, result), (q_strides, k_strides, v_strides, self.made(result)))

    def taken(
        self, signature: Signature, views: Views, tma: bool
    ) -> tuple[FourInts, tuple[str, ...]]:
        """Return the strides of the arrays that a kernel finds, and which of them are copies.

        Raises
        ------
        ValueError
            Strides are no multiples of an element, or elements of `out` share memory.
        """
        if signature.out is None and self.is_plain(signature.aligned, views.strides, tma):
            return views.strides, ()
        self._check_strides(signature)
        strides, copies = [], []
        for i, name in enumerate(self.names[:3]):
            shape, step, repeats = views.shapes[i], views.strides[i], name != "q"
            read, size = shape, self._kv_itemsize if repeats else self._itemsize
            if self._padded and repeats:
                read = (*shape[:3], whole_chunks(shape[3], size))
            direct = signature.aligned[i] and readable(read, step, size, tma, repeats)
            if 0 not in shape and not (direct and (repeats or not self._negates_q)):
                copies.append(name)
                step = _packed(shape, size)
            strides.append(step)
        result, step, direct = views.shapes[3], views.strides[3], True
        if signature.out is not None:
            _, step = self._bhsd(signature.out.shape, signature.out.strides)
            direct = signature.out.is_aligned
        if tma:
            direct = direct and readable(result, step, self._itemsize, tma)
        else:
            direct = step[3] == self._itemsize or result[3] == 1
        if not direct:
            copies.append("out")
            step = _packed(result, self._itemsize)
        return (*strides, step), tuple(copies)

    def extents(self, signature: Signature, extras: Extras) -> tuple[Extent, ...]:
        """Return the extents of out, q, k, v and extras; nothing without an out."""
        if signature.out is None:
            return ()
        arrays = zip((signature.out[:2], *_inputs(signature)), self._sizes, strict=True)
        extents = [extent(shape, strides, size) for (shape, strides), size in arrays]
        for info in extras.flat:
            array = isinstance(info, ArrayInfo)  # a `BlockMask` is none
            extents.append(
                extent(info.shape, info.strides, info.dtype.itemsize) if array else (0, 0)
            )
        return tuple(extents)

    def is_plain(self, aligned: tuple[bool, ...], strides: FourInts, tma: bool) -> bool:
        """Whether the kernel takes all arrays as they are, as far as can be seen at a glance."""
        (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3), _ = strides
        return (
            self._may_be_plain
            and aligned[0]
            and aligned[1]
            and aligned[2]
            and q3 == self._itemsize
            and k3 == v3 == self._kv_itemsize
            and (q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2) % ALIGNMENT == 0
            and (not tma or min(q0, q1, q2, k0, k1, k2, v0, v1, v2) > 0)
        )

    def _check_strides(self, signature: Signature) -> None:
        """Check strides: multiples of an element; those of `out` keep its elements apart."""
        arrays = list(_inputs(signature))
        if signature.out is not None:
            shape, strides, _ = signature.out
            arrays.append((shape, strides))
            if overlaps_itself(shape, strides, self._itemsize):
                raise ValueError("elements of out share memory")
        sizes = *self._sizes[1:], self._itemsize
        for name, size, (shape, strides) in zip(self.names, sizes, arrays, strict=False):
            steps = (step for n, step in zip(shape, strides, strict=True) if n > 1)
            if 0 not in shape and any(step % size for step in steps):
                raise ValueError(f"{name} has strides {strides}: multiples of {size} are needed")

    def _bhsd(self, shape: Ints, strides: Ints) -> tuple[Ints, Ints]:
        """Return shape and strides with the axes (batch, heads, seq, head_dim)."""
        if self._layout == "thd":
            (t, h, d), (of_t, of_h, of_d) = shape, strides
            return (1, h, t, d), (ALIGNMENT, of_h, of_t, of_d)
        if len(shape) == 4:
            if self._layout == "bhsd":
                return shape, strides
            (b, s, h, d), (of_b, of_s, of_h, of_d) = shape, strides
            return (b, h, s, d), (of_b, of_h, of_s, of_d)
        # Missing axes have length 1, and any stride.
        missing = 4 - len(shape)
        if missing == 1:
            return (shape[0], 1, *shape[1:]), (strides[0], ALIGNMENT, *strides[1:])
        return (1, 1, *shape), (ALIGNMENT, ALIGNMENT, *strides)

    def made(self, shape: Ints) -> Ints:
        """Return the strides of a result that is made here."""
        _, heads, seq, head_dim = shape
        row = head_dim * self._itemsize
        if self._layout == "bhsd":
            return heads * seq * row, seq * row, row, self._itemsize
        return heads * seq * row, row, heads * row, self._itemsize

    @property
    def _sizes(self) -> Ints:
        """Bytes of an element of out, q, k and v."""
        return self._itemsize, self._itemsize, self._kv_itemsize, self._kv_itemsize


def _packed(shape: Ints, itemsize: int) -> Ints:
    """Return the strides of a copy, as `copied` and `padded` make it."""
    _, heads, seq, head_dim = shape
    row = whole_chunks(head_dim, itemsize) * itemsize
    return heads * seq * row, seq * row, row, itemsize


def _inputs(s: Signature) -> tuple[tuple[Ints, Ints], ...]:
    """Return shapes and strides of q, k and v."""
    return (s.q_shape, s.q_strides), (s.k_shape, s.k_strides), (s.v_shape, s.v_strides)
