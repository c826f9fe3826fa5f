"""Keys and values of 8 bits in a NumPy cache -> arrays of another dtype, in one piece."""

from __future__ import annotations

import numpy as np

from cufa.problem.tokens import Held
from cufa.quantized.rows import numbers_of


def expand(held: Held, out: np.ndarray) -> None:
    """Write what the first tokens of sequences stand for, as ``kernels/expand8.cu`` does.

    Parameters
    ----------
    held : Held
    out : ndarray, (batch, heads_kv, length, head_dim)
    """
    length, table = out.shape[2], held.block_table
    values, scales = held.values, held.scales
    if table is not None:
        pages = table[:, : -(-length // values.shape[2])]
        values, scales = (_joined(x[pages]) for x in (values, scales))
    with np.errstate(all="ignore"):  # what is behind a sequence's last token may be anything
        rows = numbers_of(values[:, :, :length], scales[:, :, :length], np)
        out[...] = rows if held.mean is None else rows + held.mean[:, :, None]


def _joined(pages: np.ndarray) -> np.ndarray:
    """Return (batch, pages, heads, page_size, ...) as (batch, heads, pages * page_size, ...)."""
    batch, n, heads, page_size, *rest = pages.shape
    return pages.swapaxes(1, 2).reshape(batch, heads, n * page_size, *rest)


def add_mean(lse: np.ndarray, q: np.ndarray, mean: np.ndarray, scale: float) -> None:
    """Add scale * q . mean to log-sum-exps, as ``kernels/lse_mean.cu`` does; -inf stays.

    Parameters
    ----------
    lse : ndarray of float32, (batch, heads_q, seq)
    q : ndarray, (batch, heads_q, seq, head_dim)
    mean : ndarray of float32, (batch, heads_kv, head_dim)
    scale : float
    """
    of_heads = mean.repeat(q.shape[1] // mean.shape[1], axis=1)[..., None]
    with np.errstate(all="ignore"):
        added = np.float32(scale) * (q.astype(np.float32) @ of_heads)[..., 0]
        np.add(lse, added, out=lse, where=lse != -np.inf)
