"""Calls of `attention` in 8 bits on a GPU that are like an earlier one: they are launched at once.

Calls with other arrays than q, k and v are not remembered.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import ALIGNMENT, Ints
from cufa.launch import quantize
from cufa.launch.calls import types_in
from cufa.launch.capture import is_capturing
from cufa.launch.fp8 import addresses
from cufa.launch.launch import Launch
from cufa.launch.signature import Key
from cufa.quantized.quantized import Quantized
from cufa.remembered import remember as remember_in

_CALLS = 128  # that are remembered
_OPTIONS = (
    *("causal", "window", "attention_chunk", "softcap", "dropout_p", "scale", "layout"),
    *("return_lse", "batch_invariant", "out_dtype", "precision", "kernel"),
)
_OTHERS = frozenset((*_OPTIONS, *"qkv", "other_names"))


class Known(NamedTuple):
    """The state that calls with the same key share.

    Attributes
    ----------
    launch : Launch
    addresses : tuple of int
        What it is given after those of `cufa.launch.fp8.addresses`.
    kinds : tuple of Prepared
        How q, k and v are quantized; empty for calls of arrays in 8 bits.
    shape, lse_shape : tuple of int
        Shapes of the result and of its log-sum-exp.
    dtype : dtype
        Of the result.
    """

    launch: Launch
    addresses: Ints
    kinds: tuple[quantize.Prepared, ...]
    shape: Ints
    lse_shape: Ints
    dtype: np.dtype


_known: dict[Key, Known] = {}


def key_of(arguments: Mapping[str, Any]) -> Key | None:
    """Return what a call depends on but for addresses; None for one that is not remembered."""
    kinds = [_kind_of(arguments.get(name)) for name in "qkv"]
    if None in kinds:
        return None
    if any(x is not None for name, x in arguments.items() if name not in _OTHERS):
        return None
    import cupy

    # Types are in the key, too: True == 1, and a known call must not accept what a new one refuses.
    options = [arguments.get(name) for name in _OPTIONS]
    inner = types_in(arguments["window"]), types_in(arguments["kernel"])
    key = cupy.cuda.runtime.getDevice(), *kinds, *options, *map(type, options), *inner
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _kind_of(x: Any) -> Key | None:
    """Return what an array is like, but for its address; None for what is none of CuPy's."""
    if not isinstance(x, Quantized):
        return _described(x)
    values, scales = _described(x.values), _described(x.scales)
    if values is None or scales is None:
        return None
    fields = x.shape, x.dtype, x.granularity, x.block, x.hadamard, x.seed, x.layout
    return *fields, x.transposed, x.mean is None, x.cu_seqlens is None, *values, *scales


def _described(array: Any) -> Key | None:
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        return None
    data = array.data
    return array.shape, array.strides, array.dtype, data.device_id, data.ptr % ALIGNMENT


def run(key: Key, arguments: Mapping[str, Any]) -> Any:
    """Run a call that is like an earlier one; return None if none is."""
    known = _known.get(key)
    if known is None:
        return None
    q, k, v = arguments["q"], arguments["k"], arguments["v"]
    if known.kinds:
        if is_capturing():
            return None
        q, k, v = launches = [*map(quantize.of_kind, known.kinds, (q, k, v))]
        quantize.run(launches)
    import cupy

    out = cupy.empty(known.shape, known.dtype)
    lse = cupy.empty(known.lse_shape, np.float32) if arguments["return_lse"] else None
    known.launch(*addresses(q, k, v, out, lse), *known.addresses)
    return out if lse is None else (out, lse)


def remember(key: Key, known: Known) -> None:
    """Remember calls with this key."""
    remember_in(_known, key, known, _CALLS)
