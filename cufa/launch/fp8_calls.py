"""Calls of `attention` in 8 bits that are remembered: the launches of calls like them.

`cufa.api.fp8_gpu.attention` remembers calls that copy nothing, and have no arrays but q, k and v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Ints
from cufa.launch import fp8, quantize
from cufa.launch.capture import is_capturing
from cufa.launch.known import key_of as key_of_call
from cufa.launch.launch import Launch
from cufa.launch.signature import Key
from cufa.remembered import remember as remember_in

_CALLS = 128  # that are remembered
_ARRAYS = "q", "k", "v"
OPTIONS = (
    *("causal", "window", "attention_chunk", "softcap", "dropout_p", "scale", "layout"),
    *("return_lse", "batch_invariant", "out_dtype", "precision", "kernel"),
)
"""The arguments of `attention` that may differ from None in calls that are remembered."""


class Known(NamedTuple):
    """The state that calls with the same key share.

    Attributes
    ----------
    launch : Launch
        Launches the kernel of attention.
    quantizers : tuple of Quantizer
        Those of q, k and v; empty if these are in 8 bits.
    shape, lse_shape : tuple of int
        Shapes of the result and of its log-sum-exp.
    dtype : dtype
        Dtype of the result.
    """

    launch: Launch
    quantizers: tuple[quantize.Quantizer, ...]
    shape: Ints
    lse_shape: Ints
    dtype: np.dtype


_known: dict[Key, Known] = {}


def key_of(arguments: Mapping[str, Any]) -> Key | None:
    """Return the key of a call, or None if it is not to be remembered."""
    return key_of_call(arguments, _ARRAYS, OPTIONS)


def remember(key: Key, known: Known) -> None:
    """Remember calls with this key."""
    remember_in(_known, key, known, _CALLS)


def run(key: Key, arguments: Mapping[str, Any]) -> Any:
    """Run a call if one with its key is remembered; else return None."""
    known = _known.get(key)
    if known is None:
        return None
    arrays = [arguments[name] for name in _ARRAYS]
    if known.quantizers:
        if is_capturing():
            return None  # quantizing needs memory: the full check raises the error
        launches = [*map(quantize.launches_for, known.quantizers, arrays)]
        quantize.run(launches)
        arrays = launches
    import cupy

    out = cupy.empty(known.shape, known.dtype)
    lse = cupy.empty(known.lse_shape, np.float32) if arguments["return_lse"] else None
    values, scales = ([getattr(x, name) for x in arrays] for name in ("values", "scales"))
    known.launch(*fp8.addresses(values, scales, out, lse))
    return out if lse is None else (out, lse)
