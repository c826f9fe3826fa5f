"""Is a result right? Sampled rows against attention in float64, by the rule of the tests.

A result is accepted when its error is at most twice that of the same formula computed naively in
the input dtype, plus the rounding noise of the output dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Array
from cufa.explorer.formula import attend, rounding_noise
from cufa.explorer.inputs import Inputs, head_options, indexable
from cufa.problem.problem import Problem

CHUNK_BYTES = 1 << 28
"""Products that are in memory at once."""

_PAIRS = 4  # of batch and head, at most
_ROWS = 512  # of all pairs together
_PERIOD = 3 * 256  # rows after which tiles of any usual size begin together
_TILE_FACTORS = 2 * 3 * 5 * 7  # primes that the rows of a tile are made of
_FAST = (128, 128)  # terms that are summed at once in Q K^T and in P V


def sampled_heads(batch: int, heads: int, count: int = _PAIRS) -> list[tuple[int, int]]:
    """Return (batch, head) pairs to check, evenly spread: the first, the last, and some between."""
    total = batch * heads
    count = min(total, count)
    picked = {round(i * (total - 1) / max(1, count - 1)) for i in range(count)}
    return [divmod(i, heads) for i in sorted(picked)]


def sampled_rows(seq: int, pairs: int) -> np.ndarray:
    """Return the rows that are checked, (pairs, rows): all rows of a tile come up among the pairs.

    Short sequences are checked whole. In others these are the first row, the last row, and rows in
    steps that have no divisor in common with the rows of a tile. Each pair goes on where the one
    before it would have come to.
    """
    count = _ROWS // pairs
    step = max(1, (seq - _PERIOD) // count)
    while math.gcd(step, _TILE_FACTORS) > 1:
        step -= 1
    if step == 1:
        return np.tile(np.arange(seq), (pairs, 1))
    begin = np.arange(pairs)[:, None] * count * step % _PERIOD
    ends = np.tile(np.array([0, seq - 1]), (pairs, 1))
    return np.hstack([ends, begin + step * np.arange(count)])


class Verdict(NamedTuple):
    """The largest error of a result, and what is wrong with it, or None."""

    max_error: float
    complaint: str | None


class Oracle:
    """Judges results of one problem, which has a query and a key; what is right is computed once.

    Arrays of the inputs are of `xp`, ``numpy`` or ``cupy``. ValueError where q, k and v hold values
    that are not finite.
    """

    def __init__(self, xp: Any, problem: Problem, inputs: Inputs) -> None:
        q, k, v = inputs.tensors
        self._xp, rounded = xp, rounding(q.dtype)
        self._places = sampled_heads(problem.batch, problem.heads_q)
        self._rows = xp.asarray(sampled_rows(problem.seq_q, len(self._places)))
        # A naive float32 product adds term by term, a library in blocks where they are many; in 16
        # bits it is the rounding that counts.
        steps = (1, max(1, problem.seq_kv // 512)) if problem.dtype == "float32" else _FAST
        exact, naive = [], []
        for (b, h), rows, queries in zip(self._places, self._rows, self._sample(q), strict=True):
            kv_head = b, h // problem.group
            operands = queries, indexable(k[kv_head]), indexable(v[kv_head])
            if not all(bool(xp.isfinite(x).all()) for x in operands):
                raise ValueError("q, k, v: values that are not finite cannot be checked nor timed")
            wide = [x.astype(np.float64) for x in operands]
            options = partial(head_options, xp, problem, inputs, (b, h))
            exact.append(_attend(xp, options, rows, wide, lambda x: x, _FAST))
            naive.append(_attend(xp, options, rows, operands, rounded, steps))
        self._right = xp.stack(exact)
        self._bound = allowed(xp, self._right, xp.stack(naive), rounded)

    def judge(self, out: Any) -> Verdict:
        """Compare a result, (batch, heads, seq, head_dim) and contiguous."""
        error = float(self._xp.abs(self._sample(out) - self._right).max())
        return Verdict(error, complaint(self._xp, out, error, self._bound))

    def _sample(self, array: Array) -> Array:
        """Return the checked rows of the checked heads, (heads, rows, columns)."""
        pairs = zip(self._places, self._rows, strict=True)
        return self._xp.stack([indexable(array[place])[rows] for place, rows in pairs])


def _attend(
    xp: Any,
    options: Callable[[Array], dict[str, Any]],
    rows: Array,
    operands: Sequence[Array],
    rounded: Callable[[Any], Any],
    steps: tuple[int, int],
) -> Array:
    """Return the output of rows of a head, products summed over that many terms at once."""
    q, k, v = operands
    sums = itertools.cycle(steps)
    chunk = max(1, CHUNK_BYTES // (8 * len(k)))
    found = []
    for i in range(0, len(rows), chunk):
        out, _ = attend(
            *(xp, q[i : i + chunk], k, v),
            product=lambda x, y: product(xp, x, y, next(sums)),
            rounded=rounded,
            **options(rows[i : i + chunk]),
        )
        found.append(out)
    return xp.concatenate(found)


def allowed(xp: Any, exact: Array, naive: Array, rounded: Callable[[Array], Array]) -> float:
    """Return the largest error that is allowed, by what the naive computation found."""
    # A product that overflows in 16 bits allows no error by itself.
    errors = xp.abs(xp.where(xp.isfinite(naive), naive - exact, 0.0))
    noise = rounding_noise(rounded(exact.astype(np.float32)), rounded)
    return 2 * float(errors.max()) + 2 * noise


def rounding(dtype: Any) -> Callable[[Array], Array]:
    """Return a function that rounds numbers to a dtype, and returns float32."""
    return lambda x: x.astype(dtype).astype(np.float32)


def product(xp: Any, a: Array, b: Array, step: int) -> Array:
    """Return the matrix product a @ b, summed over `step` terms, then one by one.

    Not by a matrix library: CuPy's may be missing, or compute float32 in TF32.
    """
    (rows, terms), columns = a.shape, b.shape[1]
    width = max(1, CHUNK_BYTES // (rows * step * a.itemsize))
    total = xp.zeros((rows, columns), a.dtype)
    for j in range(0, columns, width):
        part = total[:, j : j + width]
        for i in range(0, terms, step):
            products = a[:, i : i + step, None] * b[None, i : i + step, j : j + width]
            part += products.sum(axis=1)
    return total


def complaint(xp: Any, result: Any, error: float, bound: float, name: str = "") -> str | None:
    """Return what is wrong with a contiguous result of such an error, or None."""
    if not _is_finite(xp, result):
        return f"{name or 'the result'} holds values that are not finite"
    if not error <= bound:
        return f"{name}: " * bool(name) + f"error {error:.2g} exceeds {bound:.2g}"
    return None


def _is_finite(xp: Any, array: Any) -> bool:
    flat = array.reshape(-1)
    step = CHUNK_BYTES // 4
    parts = (flat[i : i + step].astype(np.float32) for i in range(0, flat.size, step))
    return all(bool(xp.isfinite(part).all()) for part in parts)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays are the same to the last bit."""
    return bool((a.view(np.uint8) == b.view(np.uint8)).all())
