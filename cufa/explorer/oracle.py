"""Is a result right? Sampled rows against attention in float64, by the rule of the tests.

A result is accepted when its error is at most twice that of the same formula computed naively in
the input dtype, plus the rounding noise of the output dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Array
from cufa.explorer.formula import attend, rounding_noise
from cufa.explorer.score_inputs import ScoreInputs
from cufa.features.dropout import Dropout, kept
from cufa.features.feature import Places
from cufa.problem.extras import all_axes
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

    `q`, `k` and `v` are (batch, heads, seq, head_dim) arrays of `xp`, ``numpy`` or ``cupy``, of any
    strides, and so are those next to them. ValueError where the former hold values that are not
    finite.
    """

    def __init__(
        self, xp: Any, problem: Problem, q: Any, k: Any, v: Any, inputs: ScoreInputs
    ) -> None:
        self._xp, self._problem, self._inputs = xp, problem, inputs
        self._heads = sampled_heads(problem.batch, problem.heads_q)
        self._rows = sampled_rows(problem.seq_q, len(self._heads))
        self._arrays = {
            name: self._of_rows(all_axes(name, array, inputs.ndim, problem.sizes, xp))
            for name, array in inputs.arrays.items()
        }
        self._reference, self._bound = self._expected(q, k, v)

    def judge(self, out: Any) -> Verdict:
        """Compare a result, (batch, heads, seq, head_dim) and contiguous."""
        xp = self._xp
        got = self._sample(out).astype(np.float64)
        error = float(xp.abs(got - self._reference).max())
        if not is_finite(xp, out):
            return Verdict(error, "the result holds values that are not finite")
        if not error <= self._bound:
            return Verdict(error, f"error {error:.2g} exceeds {self._bound:.2g}")
        return Verdict(error, None)

    def _sample(self, array: Any) -> Any:
        """Return the checked rows of the checked heads, (pairs, rows, columns).

        Numbers in float32: CuPy does not take rows of bfloat16.
        """
        kind = array.dtype if array.dtype in (np.bool_, np.uint8) else np.float32
        rows = self._xp.asarray(self._rows)
        heads = enumerate(self._heads)
        return self._xp.stack([array[b, h].astype(kind)[rows[i]] for i, (b, h) in heads])

    def _of_rows(self, array: Array) -> Array:
        """Return what an array has for the rows, (pairs, rows or 1, columns or 1)."""
        if array.ndim < 3:
            each = [array[h] if array.ndim == 1 else array[b, h] for b, h in self._heads]
            return self._xp.stack(each)[:, None, None]
        return self._sample(array)

    def _expected(self, q: Any, k: Any, v: Any) -> tuple[Any, float]:
        """Return the checked rows in float64, and the largest error that is allowed."""
        xp, dtype, problem = self._xp, q.dtype, self._problem
        rows = self._sample(q)
        keys, values = (
            xp.stack([x[b, h // problem.group].astype(np.float32) for b, h in self._heads])
            for x in (k, v)
        )
        if not all(bool(xp.isfinite(x).all()) for x in (rows, keys, values)):
            raise ValueError("q, k, v: values that are not finite cannot be checked nor timed")

        def rounded(x: Any) -> Any:
            return x.astype(dtype).astype(np.float32)

        wide, wide_keys, wide_values = (x.astype(np.float64) for x in (rows, keys, values))
        # A naive float32 product adds term by term, a library in blocks where they are many; in 16
        # bits it is the rounding that counts.
        steps = (1, max(1, problem.seq_kv // 512)) if problem.dtype == "float32" else _FAST
        chunk = max(1, CHUNK_BYTES // (8 * len(self._heads) * problem.seq_kv))
        parts, worst = [], xp.zeros((), np.float64)
        for i in range(0, rows.shape[1], chunk):
            part = slice(i, i + chunk)
            exact = self._attend(wide[:, part], wide_keys, wide_values, part, lambda x: x, _FAST)
            naive = self._attend(rows[:, part], keys, values, part, rounded, steps)
            # A product that overflows in 16 bits allows no error by itself.
            errors = xp.abs(xp.where(xp.isfinite(naive), naive.astype(np.float64) - exact, 0.0))
            worst = xp.maximum(worst, errors.max())
            parts.append(exact)
        reference = xp.concatenate(parts, axis=1)
        noise = rounding_noise(rounded(reference.astype(np.float32)), rounded)
        return reference, 2 * float(worst) + 2 * noise

    def _attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        part: slice,
        rounded: Callable[[Any], Any],
        steps: tuple[int, int],
    ) -> Array:
        """Return the output of some of the rows, products summed over that many terms at once."""
        xp, p = self._xp, self._problem
        b, h = (xp.asarray(each)[:, None, None] for each in np.transpose(self._heads))
        i, j = xp.asarray(self._rows[:, part])[..., None], xp.arange(p.seq_kv)[None, None]
        score = {**p.asked, **self._arrays}
        sinks = score.pop("sinks", None)
        for name in ("bias", "mask"):
            if name in score:
                score[name] = score[name][:, part]
        sums = iter(steps)
        out, _ = attend(
            *(xp, q, k, v, Places(b, h, i, j, p.seq_q, p.seq_kv)),
            product=lambda x, y: product(xp, x, y, next(sums)),
            rounded=rounded,
            sinks=sinks,
            keep=self._keep(part),
            scale=p.scale,
            score_mod=self._inputs.score_mod,
            mask_mod=self._inputs.mask_mod,
            **score,
        )
        return out

    def _keep(self, part: slice) -> Array | None:
        """Return the factors of the weights under dropout, (pairs, rows, keys); None without."""
        xp, p, seed = self._xp, self._problem, self._inputs.seed
        dropout = p.of(Dropout)
        if dropout is None:
            return None
        keys = slice(0, p.seq_kv)
        b, h = (xp.asarray(each)[:, None] for each in np.transpose(self._heads))
        rows = xp.asarray(self._rows[:, part])
        of_rows = zip(b, h, rows, strict=True)
        factors = [kept(dropout.p, seed, *at, keys, xp)[0] for at in of_rows]
        return xp.concatenate(factors) / dropout.keep


def product(xp: Any, a: Array, b: Array, step: int) -> Array:
    """Return the stacked matrix products a @ b, summed over `step` terms, then one by one.

    Not by a matrix library: CuPy's may be missing, or compute float32 in TF32.
    """
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


def is_finite(xp: Any, array: Any) -> bool:
    """Whether all numbers of a contiguous array are finite."""
    flat = array.reshape(-1)
    step = CHUNK_BYTES // 4
    parts = (flat[i : i + step].astype(np.float32) for i in range(0, flat.size, step))
    return all(bool(xp.isfinite(part).all()) for part in parts)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays are the same to the last bit."""
    return bool((a.view(np.uint8) == b.view(np.uint8)).all())
