"""Attention of sampled rows as one formula, in the precision of the numbers that it is given.

Products are sums of products, so that no matrix library is needed, and none can compute float32 in
TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.beside import all_axes
from cufa.dropout import kept
from cufa.explorer.beside import Beside
from cufa.problem import Problem

CHUNK_BYTES = 1 << 28
"""Of products that are there at once."""


class Formula:
    """Attention of some rows of some heads.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    problem : Problem
    heads : sequence of (int, int)
        Pairs of a sequence and a query head.
    rows : ndarray of int, (pairs, rows)
    beside : Beside
        Its arrays belong to `xp`, and its functions are none of C++.
    """

    def __init__(
        self,
        xp: Any,
        problem: Problem,
        heads: Sequence[tuple[int, int]],
        rows: np.ndarray,
        beside: Beside,
    ) -> None:
        self._xp, self._problem, self._seed = xp, problem, beside.seed
        self._score_mod: Any = beside.score_mod
        self._mask_mod: Any = beside.mask_mod
        self._b, self._h = (xp.asarray(each)[:, None, None] for each in np.transpose(heads))
        self._rows = rows
        self._arrays = {
            name: self._of_rows(all_axes(name, array, beside.ndim, problem.sizes, xp), heads)
            for name, array in beside.arrays.items()
        }

    def _of_rows(self, array: Array, heads: Sequence[tuple[int, int]]) -> Array:
        """Return what an array has for the rows, (pairs, rows or 1, columns or 1)."""
        if array.ndim < 3:
            each = [array[h] if array.ndim == 1 else array[b, h] for b, h in heads]
            return self._xp.stack(each)[:, None, None]
        rows = self._xp.asarray(self._rows)
        # Not in bfloat16, of which CuPy does not take rows
        kind = array.dtype if array.dtype in (np.bool_, np.uint8) else np.float32
        return self._xp.stack([array[b, h].astype(kind)[rows[i]] for i, (b, h) in enumerate(heads)])

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        part: slice,
        rounded: Callable[[Any], Any],
        steps: tuple[int, int],
    ) -> Array:
        """Return the output of some of the rows.

        Parameters
        ----------
        q : array, (pairs, rows of the part, head_dim)
        k, v : array, (pairs, keys, head_dim)
            Each head's own.
        part : slice
            Which of the rows.
        rounded : callable
            Rounds what passes from one step to the next.
        steps : tuple of int
            How many terms are summed at once in Q K^T, and in P V.
        """
        xp = self._xp
        scores = self._scores(rounded(_product(xp, q, k.swapaxes(1, 2), steps[0])), part)
        scores = xp.where(self._seen(part), scores, q.dtype.type(-np.inf))
        top = scores.max(axis=-1, keepdims=True)
        top = xp.where(top == -np.inf, q.dtype.type(0), top)
        scores -= top
        xp.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if "sinks" in self._arrays:
            total += xp.exp(self._arrays["sinks"].astype(q.dtype) - top)
        scores /= xp.where(total == 0, q.dtype.type(1), total)
        if self._problem.dropout_p:
            scores *= self._keeps(part) / q.dtype.type(self._problem.dropout_keep)
        return rounded(_product(xp, rounded(scores), v, steps[1]))

    def _places(self, part: slice) -> tuple[Array, Array]:
        """Return the numbers of queries, (pairs, rows, 1), and of keys, (1, 1, keys)."""
        xp = self._xp
        return xp.asarray(self._rows[:, part])[..., None], xp.arange(self._problem.seq_kv)[
            None, None
        ]

    def _scores(self, products: Array, part: slice) -> Array:
        """Return what becomes of Q K^T before the masks."""
        xp, p, number = self._xp, self._problem, products.dtype.type
        queries, keys = self._places(part)
        scores = products * number(p.scale)
        if p.softcap:
            scores = number(p.softcap) * xp.tanh(scores / number(p.softcap))
        if "alibi_slopes" in self._arrays:
            distance = xp.abs(queries + (p.seq_kv - p.seq_q) - keys)
            scores -= self._arrays["alibi_slopes"].astype(number) * distance.astype(number)
        if "bias" in self._arrays:
            scores += self._arrays["bias"][:, part].astype(number)
        if self._score_mod is not None:
            changed = self._score_mod(scores, self._b, self._h, queries, keys)
            scores = xp.broadcast_to(xp.asarray(changed, number), scores.shape)
        return scores

    def _seen(self, part: slice) -> Array:
        """Return which keys the rows see, (pairs, rows, keys)."""
        xp = self._xp
        queries, keys = self._places(part)
        first, end = (
            xp.asarray(ends[self._rows[:, part]])[..., None]
            for ends in self._problem.sees(slice(0, self._problem.seq_q))
        )
        seen = (keys >= first) & (keys < end)
        if "mask" in self._arrays:
            mask = self._arrays["mask"][:, part]
            if mask.dtype == np.uint8:  # the first key is the highest bit
                places = xp.arange(self._problem.seq_kv)
                mask = (mask[..., places // 8] >> (7 - places % 8).astype(np.uint8)) & 1 != 0
            seen &= mask
        if self._mask_mod is not None:
            seen = seen & self._mask_mod(self._b, self._h, queries, keys)
        return seen

    def _keeps(self, part: slice) -> Array:
        """Return which weights are kept, (pairs, rows, keys)."""
        xp, p = self._xp, self._problem
        rows, keys = xp.asarray(self._rows[:, part]), slice(0, p.seq_kv)
        return xp.concatenate(
            [
                kept(p.dropout_p, self._seed, *places, rows[i], keys, xp)[0]
                for i, places in enumerate(zip(self._b[:, 0], self._h[:, 0], strict=True))
            ]
        )


def _product(xp: Any, a: Array, b: Array, step: int) -> Array:
    """Return the stacked matrix products a @ b, summed over `step` terms, then one by one."""
    pairs, rows, terms = a.shape
    columns = b.shape[2]
    width = max(1, CHUNK_BYTES // (pairs * rows * step * a.itemsize))
    total = xp.zeros((pairs, rows, columns), a.dtype)
    for j in range(0, columns, width):
        part = total[:, :, j : j + width]
        for i in range(0, terms, step):
            products = a[:, :, i : i + step, None] * b[:, None, i : i + step, j : j + width]
            part += products.sum(axis=2)
    return total
