"""Errors against attention computed in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.cells import Cell
from cufa.explorer.formula import attend
from cufa.explorer.oracle import sampled_heads
from cufa.features.feature import Places

ROWS = 16384
"""Rows of the result that are checked, at least."""

CHUNK_ROWS = 4096


def checked_heads(cell: Cell) -> list[tuple[int, int]]:
    """Return the (batch, head) pairs whose rows are checked: `ROWS` or more, of two at least."""
    return sampled_heads(cell.b, cell.hq, max(2, -(-ROWS // cell.sq)))


def reference_rows(
    xp: Any, q: Any, k: Any, v: Any, *, causal: bool, scale: float
) -> Iterator[tuple[int, Any]]:
    """Yield (first row, rows of the result) of one head in float64, a block of rows at a time.

    Operands are (seq, head_dim) of any float dtype, in ``numpy`` or ``cupy``, which is `xp`.
    """
    q64, k64, v64 = (_float64(xp, x) for x in (q, k, v))
    sq, sk = q.shape[0], k.shape[0]
    for first in range(0, sq, CHUNK_ROWS):
        rows = xp.arange(first, min(sq, first + CHUNK_ROWS))[:, None]
        at = Places(0, 0, rows, xp.arange(sk), sq, sk)
        some = q64[first : first + CHUNK_ROWS], k64, v64
        out, _ = attend(xp, *some, at, product=xp.matmul, causal=causal, scale=scale)
        yield first, out


def max_errors(
    xp: Any, cell: Cell, operands: tuple[Any, Any, Any], results: dict[str, Any]
) -> dict[str, float]:
    """Return each contestant's largest absolute error over the same rows; NaN where one is there.

    All arrays are (batch, heads, seq, head_dim) in ``numpy`` or ``cupy``, which is `xp`.
    """
    worst = {name: xp.zeros((), dtype=xp.float64) for name in results}
    for name, errors in _errors(xp, cell, operands, results):
        # maximum() keeps a NaN, which the built-in max would drop.
        worst[name] = xp.maximum(worst[name], xp.abs(errors).max())
    return {name: float(error) for name, error in worst.items()}


def rms_errors(
    xp: Any, cell: Cell, operands: tuple[Any, Any, Any], results: dict[str, Any]
) -> dict[str, float]:
    """Return the root mean square of each contestant's errors over these rows."""
    squares = {name: xp.zeros((), dtype=xp.float64) for name in results}
    for name, errors in _errors(xp, cell, operands, results):
        squares[name] += (errors**2).sum()
    elements = len(checked_heads(cell)) * cell.sq * cell.dv
    return {name: float(xp.sqrt(total / elements)) for name, total in squares.items()}


def _errors(
    xp: Any, cell: Cell, operands: tuple[Any, Any, Any], results: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield names of contestants, and their errors of some rows."""
    q, k, v = operands
    for b, h in checked_heads(cell):
        kv = h * cell.hk // cell.hq
        head = (q[b, h], k[b, kv], v[b, kv])
        for first, rows in reference_rows(xp, *head, causal=cell.causal, scale=cell.scale):
            for name, out in results.items():
                yield name, _float64(xp, out[b, h, first : first + rows.shape[0]]) - rows


def _float64(xp: Any, array: Any) -> Any:
    # Through float32, to which every library converts bfloat16.
    return array.astype(xp.float32).astype(xp.float64)
