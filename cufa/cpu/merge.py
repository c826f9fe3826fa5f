"""Partial attentions on NumPy arrays, merged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def merge(
    outs: Sequence[np.ndarray], lses: Sequence[np.ndarray], out: np.ndarray, lse: np.ndarray
) -> None:
    """Merge parts, as ``kernels/merge.cu`` does.

    Parameters
    ----------
    outs : sequence of ndarray, (batch, heads, seq, head_dim)
    lses : sequence of ndarray, (batch, heads, seq) float32
    out, lse : ndarray
        Where the result goes.
    """
    with np.errstate(all="ignore"):  # infinities and NaN are the caller's business
        m = np.maximum.reduce(lses)
        acc = np.zeros(out.shape, np.float32)
        total = np.zeros(lse.shape, np.float32)
        for each, of_each in zip(outs, lses, strict=True):
            saw = of_each != -np.inf
            weight = np.where(of_each == m, np.float32(1), np.exp(of_each - m))
            weight[~saw] = 0
            total += weight
            # A part that has seen no key means nothing, NaN included.
            acc += (
                np.where(saw[..., None], each.astype(np.float32, copy=False), 0) * weight[..., None]
            )
        out[...] = acc / np.where(total == 0, np.float32(1), total)[..., None]
        lse[...] = np.where(total == 0, -np.inf, m + np.log(total))
