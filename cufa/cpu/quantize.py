"""Quantization of NumPy arrays, head by head."""

from __future__ import annotations

import numpy as np

from cufa.quantized.e4m3 import E4M3, LARGEST, rounded
from cufa.quantized.rows import MOST_MEAN, scale_of
from cufa.quantized.scales import shape_of_scales
from cufa.quantized.transform import columns_of, norm, sums, transformed


def quantize(
    x: np.ndarray,
    granularity: str,
    block: int | None,
    hadamard: bool,
    seed: int,
    smooth: bool,
    used: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return bytes, scales and what was taken off rows, as `cufa.Quantized` holds them.

    Parameters
    ----------
    x : ndarray, (batch, heads, seq, head_dim)
        float16, bfloat16 or float32; of any strides.
    granularity, block, hadamard, seed, smooth
        As in `cufa.quantize`, checked.
    used : ndarray, (batch,), optional
        How many rows of each sequence count; the others are zeros.
    """
    batch, heads, seq, head_dim = x.shape
    columns = columns_of(head_dim)
    values = np.empty((batch, heads, seq, columns), E4M3)
    scales = np.ones(shape_of_scales(granularity, block, x.shape), np.float32)
    mean = np.zeros((batch, heads, columns), np.float32) if smooth else None
    each_head = list(np.ndindex(batch, heads)) if seq else []
    rows_of_scale = block or seq
    factor = norm(columns) if hadamard else np.float32(1)

    def prepared(i: tuple[int, ...]) -> np.ndarray:
        """Return the rows of a head, to be multiplied by `factor`."""
        rows = np.zeros((seq, columns), np.float32)
        n = seq if used is None else int(used[i[0]])
        rows[:n, :head_dim] = x[i][:n]
        if mean is not None:
            its = _mean(rows)
            rows -= its
            mean[i] = transformed(its, seed, np) if hadamard else its
        return sums(rows, seed, np) if hadamard else rows

    with np.errstate(all="ignore"):  # infinities and NaN become NaN
        if granularity == "tensor":
            largest = [_largest(prepared(i), seq).max() for i in each_head]
            scales[...] = scale_of(np.max(largest, initial=0), LARGEST, factor)
        for i in each_head:
            rows = prepared(i)
            if granularity != "tensor":
                scales[i] = scale_of(_largest(rows, rows_of_scale), LARGEST, factor)
            inverse = 1 / (scales[0, 0] if granularity == "tensor" else scales[i]) * factor
            values[i] = rounded(rows * np.repeat(inverse, rows_of_scale)[:seq, None])
    return values, scales, mean


def _mean(rows: np.ndarray) -> np.ndarray:
    """Return the mean of a column's finite numbers; 0 if there is none, or it is too large."""
    found = rows.mean(axis=0, where=np.isfinite(rows))
    return np.where(np.abs(found) < MOST_MEAN, found, np.float32(0))


def _largest(rows: np.ndarray, block: int) -> np.ndarray:
    """Return the largest magnitude of the finite numbers of each block of rows."""
    of_rows = np.where(np.isfinite(rows), np.abs(rows), np.float32(0)).max(axis=1)
    found: np.ndarray = np.maximum.reduceat(of_rows, np.arange(0, len(rows), block))
    return found
