"""Is a result right? Sampled rows against attention in float64, by the rule of the tests.

A result is accepted when its error is at most twice that of the same formula computed naively in
the input dtype, plus the rounding noise of the output dtype.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cufa.explorer import formula
from cufa.explorer.beside import NOTHING_BESIDE, Beside
from cufa.explorer.formula import Formula
from cufa.problem import Problem

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

    Short sequences are checked whole. Of others the first row, the last row, and rows in steps that
    have no divisor in common with the rows of a tile, each pair going on where the one before it
    would have come to.
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

    `q`, `k` and `v` are (batch, heads, seq, head_dim) arrays of `xp`, ``numpy`` or ``cupy``, of any
    strides, and so are those beside them. ValueError where the former hold values that are not
    finite.
    """

    def __init__(
        self, xp: Any, problem: Problem, q: Any, k: Any, v: Any, beside: Beside = NOTHING_BESIDE
    ) -> None:
        self._xp = xp
        self._heads = sampled_heads(problem.batch, problem.heads_q)
        self._rows = sampled_rows(problem.seq_q, len(self._heads))
        self._formula = Formula(xp, problem, self._heads, self._rows, beside)
        self._reference, self._bound = self._expected(problem, q, k, v)

    def judge(self, out: Any) -> Verdict:
        """Compare a result, (batch, heads, seq, head_dim) and contiguous."""
        xp = self._xp
        got = self._sample(out).astype(np.float64)
        error = float(xp.abs(got - self._reference).max())
        if not _finite(xp, out):
            return Verdict(error, "the result holds values that are not finite")
        if not error <= self._bound:
            return Verdict(error, f"error {error:.2g} exceeds {self._bound:.2g}")
        return Verdict(error, None)

    def _sample(self, array: Any) -> Any:
        """Return the checked rows of the checked heads, (pairs, rows, head_dim), in float32."""
        xp = self._xp
        # Through float32, which is made of a bfloat16 array by either library.
        heads = (array[b, h].astype(np.float32) for b, h in self._heads)
        rows = xp.asarray(self._rows)
        return xp.stack([head[rows[i]] for i, head in enumerate(heads)])

    def _expected(self, problem: Problem, q: Any, k: Any, v: Any) -> tuple[Any, float]:
        """Return the checked rows in float64, and the largest error that is allowed."""
        xp, dtype = self._xp, q.dtype
        group = problem.group
        rows = self._sample(q)
        keys, values = (
            xp.stack([x[b, h // group].astype(np.float32) for b, h in self._heads]) for x in (k, v)
        )
        if not all(bool(xp.isfinite(x).all()) for x in (rows, keys, values)):
            raise ValueError("q, k, v: values that are not finite cannot be checked nor timed")

        def rounded(x: Any) -> Any:
            return x.astype(dtype).astype(np.float32)

        # A naive float32 product adds term by term, a library in blocks where they are many; in 16
        # bits it is the rounding that counts.
        steps = _FAST
        if problem.dtype == "float32":
            steps = 1, max(1, problem.seq_kv // 512)
        wide_keys, wide_values = keys.astype(np.float64), values.astype(np.float64)
        chunk = max(1, formula.CHUNK_BYTES // (8 * len(self._heads) * problem.seq_kv))
        parts, worst = [], xp.zeros((), np.float64)
        for i in range(0, rows.shape[1], chunk):
            part = slice(i, i + chunk)
            narrow = rows[:, part]
            wide = narrow.astype(np.float64)
            exact = self._formula(wide, wide_keys, wide_values, part, lambda x: x, _FAST)
            naive = self._formula(narrow, keys, values, part, rounded, steps)
            # A product that overflows in 16 bits allows no error by itself.
            errors = xp.abs(xp.where(xp.isfinite(naive), naive.astype(np.float64) - exact, 0.0))
            worst = xp.maximum(worst, errors.max())
            parts.append(exact)
        reference = xp.concatenate(parts, axis=1)
        third = float(np.array(0.3, dtype))
        near = rounded(reference.astype(np.float32))
        noise = xp.abs(
            (rounded(rounded(near + np.float32(third)) - np.float32(third))) - near
        ).max()
        return reference, 2 * float(worst) + 2 * float(noise)


def _finite(xp: Any, array: Any) -> bool:
    flat = array.reshape(-1)
    step = formula.CHUNK_BYTES // 4
    parts = (flat[i : i + step].astype(np.float32) for i in range(0, flat.size, step))
    return all(bool(xp.isfinite(part).all()) for part in parts)


def same_bits(xp: Any, a: Any, b: Any) -> bool:
    """Whether two contiguous arrays are the same to the last bit."""
    return bool((a.view(np.uint8) == b.view(np.uint8)).all())
