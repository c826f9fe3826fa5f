"""Gradients of arrays that a `score_mod` reads: what those on a GPU are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from reference_backward import gradients_of

import cufa

STEEPEST = {"alibi": 150.0, "even steps": 150 / 32, "relative positions": 1.0, "all": 13.0}
"""The largest derivative of a score by an element, for 150 keys; by names of `score_mods`."""

Arrays = tuple[np.ndarray, ...]


def bound(arrays: Arrays, name: str, options: Mapping[str, Any]) -> float:
    """Return the error that is accepted of an element: a part of the sum of all that is added.

    A weight is the exponential of a score minus the log-sum-exp. Both are rounded to float32, so
    that its error grows with their magnitude.

    Parameters
    ----------
    arrays : tuple of ndarray
        dout, q, k, v, and the results of the forward pass.
    name : str
        One of `STEEPEST`.
    options : mapping
    """
    offsets = np.zeros((*arrays[1].shape[:3], arrays[2].shape[2]), np.float32)
    function = options["score_mod"]

    def with_offsets(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(score, b, h, q_idx, kv_idx) + offsets[b, h, q_idx, kv_idx]

    given: Any = {**options, "score_mod": with_offsets, "wrt": ("offsets",)}
    (of_scores,) = cufa.attention_backward(*arrays, **given)
    lse = arrays[5]
    largest = float(np.abs(lse[np.isfinite(lse)]).max(initial=0))
    of_weight = 2.0**-20 + 2 * 2.0**-24 * largest
    return float(np.abs(of_scores).sum()) * STEEPEST[name] * of_weight


def assert_accepts(
    found: Mapping[str, np.ndarray], arrays: Arrays, name: str, options: Mapping[str, Any]
) -> None:
    """Assert that gradients are those of NumPy arrays, whose sums are float64; as `bound`."""
    given: Any = {**options, "wrt": tuple(found)}
    expected = gradients_of(tuple(found), cufa.attention_backward(*arrays, **given))
    allowed = bound(arrays, name, options)
    for each, gradient in found.items():
        exact = expected[each]
        assert gradient.dtype == exact.dtype
        assert gradient.shape == exact.shape
        rounding = float(np.spacing(np.abs(exact).max()))
        error = np.abs(gradient.astype(np.float64) - exact.astype(np.float64)).max()
        assert error <= allowed + rounding, f"{each}: {error:.3g} exceeds {allowed:.3g}"
