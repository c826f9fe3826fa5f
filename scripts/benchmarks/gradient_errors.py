"""Errors of gradients against those computed in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from benchmarks.backward_cases import Case
from benchmarks.cells import Cell
from cufa.explorer.formula import scores_of, softmax
from cufa.explorer.oracle import sampled_heads
from cufa.features.feature import Places

HEADS = 2
"""Heads of K and V, with all query heads that share them, whose gradients are checked."""

CHUNK_ROWS = 2048


class Arrays(Protocol):
    """Operands of a case, (batch, heads, seq, head_dim)."""

    case: Case
    cell: Cell
    q: Any
    k: Any
    v: Any
    dout: Any


def max_errors(xp: Any, data: Arrays, results: dict[str, Any]) -> dict[str, float]:
    """Return the largest error of each contestant's dq, dk and dv; NaN where one is there.

    An error is by the largest number of the gradient. The first and the last head of K and V are
    checked, and the queries that share each; where sequences have lengths, of the first of them.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    data : Arrays
    results : dict
        (dq, dk, dv) as (batch, heads, seq, head_dim) by contestant.
    """
    cell, case = data.cell, data.case
    group = cell.hq // cell.hk
    tokens = slice(0, case.lengths[0]) if case.lengths else slice(None)
    worst = {name: xp.zeros((), xp.float64) for name in results}
    for b, h in sampled_heads(cell.b, cell.hk, HEADS):
        heads = slice(h * group, (h + 1) * group)
        its = heads, slice(h, h + 1), slice(h, h + 1)
        dout, q = (_float64(xp, x[b, heads, tokens]) for x in (data.dout, data.q))
        k, v = (_float64(xp, x[b, h, tokens]) for x in (data.k, data.v))
        exact = gradients(xp, dout, q, k, v, scale=cell.scale, **case.options)
        for name, found in results.items():
            for right, array, part in zip(exact, found, its, strict=True):
                error = xp.abs(_float64(xp, array[b, part, tokens]) - right).max()
                # maximum() keeps a NaN, which the built-in max would drop.
                worst[name] = xp.maximum(worst[name], error / xp.abs(right).max())
    return {name: float(error) for name, error in worst.items()}


def gradients(
    xp: Any, dout: Any, q: Any, k: Any, v: Any, *, scale: float, **options: Any
) -> tuple[Any, Any, Any]:
    """Return dq, dk and dv of one head of K and V, in float64.

    Parameters
    ----------
    xp : module
    dout, q : array, shapes (heads, seq, dv) and (heads, seq, d)
        Arrays of the query heads that share it.
    k, v : array, shapes (seq, d) and (seq, dv)
    scale : float
    **options
        A causal mask and a window, as `cufa.attention` takes them.
    """
    dq, dk, dv = xp.zeros_like(q), xp.zeros_like(k)[None], xp.zeros_like(v)[None]
    for head, rows in _parts(q.shape[0], q.shape[1]):
        at = Places(
            *(0, 0, xp.arange(q.shape[1])[rows, None], xp.arange(k.shape[0])),
            *(q.shape[1], k.shape[0]),
        )
        some, of_result = q[head, rows], dout[head, rows]
        scores = scores_of(xp, xp.matmul(some, k.T), at, scale=scale, **options)
        p, _ = softmax(xp, scores)
        dv[0] += xp.matmul(p.T, of_result)
        d_p = xp.matmul(of_result, v.T)
        d_p -= (p * d_p).sum(axis=-1, keepdims=True)
        d_p *= p
        d_p *= scale
        dq[head, rows] = xp.matmul(d_p, k)
        dk[0] += xp.matmul(d_p.T, some)
    return dq, dk, dv


def _parts(heads: int, seq: int) -> Iterator[tuple[int, slice]]:
    for head in range(heads):
        for first in range(0, seq, CHUNK_ROWS):
            yield head, slice(first, first + CHUNK_ROWS)


def _float64(xp: Any, array: Any) -> Any:
    # Through float32, to which every library converts bfloat16.
    return array.astype(xp.float32).astype(xp.float64)
