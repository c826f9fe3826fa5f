"""How the kernels of a kind of calls see their arrays: as 4-D views, some of them copied."""

from __future__ import annotations

from typing import NamedTuple

from cufa.arrays import ALIGNMENT, ArrayInfo, Ints, extent, overlaps_itself, readable, whole_chunks
from cufa.dtypes import DTYPES, kv_bytes
from cufa.launch.params import FourInts
from cufa.problem.extras import Extras
from cufa.problem.problem import CACHES, Problem

Inputs = tuple[tuple[Ints, Ints], ...]
"""Shape and strides of q, k and v, as the caller has them."""

Out = tuple[Ints, Ints, bool] | None
"""Shape and strides of the caller's own array for the result, and whether it is aligned."""

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
        self._sizes = self._itemsize, size, size, self._itemsize
        self._negates_q = problem.scale < 0
        whole = problem.head_dim * size % ALIGNMENT == problem.head_dim_v * size % ALIGNMENT == 0
        self._may_be_plain = whole and not self._negates_q  # else some array is copied

    def views(self, inputs: Inputs) -> Views:
        """Return the arrays as the kernels see them, with a result that is made here.

        Raises
        ------
        ValueError
            They have other numbers of axes.
        """
        (q, of_q), (k, of_k), (v, of_v) = inputs
        if not 2 <= len(q) == len(k) == len(v) <= 4:
            raise ValueError("q, k and v need as many axes: 2, 3 or 4")
        q, of_q = self._bhsd(q, of_q)
        k, of_k = self._bhsd(k, of_k)
        v, of_v = self._bhsd(v, of_v)
        result = *q[:3], v[3]
        return Views((q, k, v, result), (of_q, of_k, of_v, self.made(result)))

    def taken(
        self, inputs: Inputs, out: Out, aligned: tuple[bool, ...], views: Views, tma: bool
    ) -> tuple[FourInts, tuple[str, ...]]:
        """Return the strides of the arrays that a kernel finds, and which of them are copies.

        `aligned` says it of each of the inputs.

        Raises
        ------
        ValueError
            Strides are no multiples of an element, or elements of `out` share memory.
        """
        if out is None and self.is_plain(aligned, views.strides, tma):
            return views.strides, ()
        self._check_strides(inputs, out)
        strides, copies = [], []
        for i, name in enumerate(self.names[:3]):
            shape, step, repeats = views.shapes[i], views.strides[i], name != "q"
            read, size = shape, self._sizes[i]
            if self._padded and repeats:
                read = (*shape[:3], whole_chunks(shape[3], size))
            direct = aligned[i] and readable(read, step, size, tma, repeats)
            if 0 not in shape and not (direct and (repeats or not self._negates_q)):
                copies.append(name)
                step = _packed(shape, size)
            strides.append(step)
        result, step, direct = views.shapes[3], views.strides[3], True
        if out is not None:
            shape, step, direct = out
            _, step = self._bhsd(shape, step)
        if tma:
            direct = direct and readable(result, step, self._itemsize, tma)
        else:
            direct = step[3] == self._itemsize or result[3] == 1
        if not direct:
            copies.append("out")
            step = _packed(result, self._itemsize)
        return (*strides, step), tuple(copies)

    def extents(self, inputs: Inputs, out: Out, extras: Extras) -> tuple[Extent, ...]:
        """Return the extents of out, q, k, v and extras; nothing without an out."""
        if out is None:
            return ()
        arrays = zip((out[:2], *inputs), (self._itemsize, *self._sizes), strict=False)
        others = (
            # A `BlockMask` is no array.
            extent(*info[:2], info.dtype.itemsize) if isinstance(info, ArrayInfo) else (0, 0)
            for info in extras.flat
        )
        return *(extent(*array, size) for array, size in arrays), *others

    def is_plain(self, aligned: tuple[bool, ...], strides: FourInts, tma: bool) -> bool:
        """Whether the kernel takes all arrays as they are, as far as can be seen at a glance."""
        (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3), _ = strides
        return (
            self._may_be_plain
            and all(aligned)
            and q3 == self._itemsize
            and k3 == v3 == self._kv_itemsize
            and (q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2) % ALIGNMENT == 0
            and (not tma or min(q0, q1, q2, k0, k1, k2, v0, v1, v2) > 0)
        )

    def _check_strides(self, inputs: Inputs, out: Out) -> None:
        """Check strides: multiples of an element; those of `out` keep its elements apart."""
        arrays = inputs if out is None else (*inputs, out[:2])
        if out is not None and overlaps_itself(*out[:2], self._itemsize):
            raise ValueError("elements of out share memory")
        for name, size, (shape, strides) in zip(self.names, self._sizes, arrays, strict=False):
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


def _packed(shape: Ints, itemsize: int) -> Ints:
    """Return the strides of a copy, as `copied` and `padded` make it."""
    _, heads, seq, head_dim = shape
    row = whole_chunks(head_dim, itemsize) * itemsize
    return heads * seq * row, seq * row, row, itemsize
