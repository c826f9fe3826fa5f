"""Calls in 8 bits that are remembered: the launches of calls like them.

`cufa.api.fp8_gpu.attention` remembers calls that copy nothing, of `attention` and of
`attention_varlen`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Ints
from cufa.launch import fp8, quantize
from cufa.launch.auxiliary import address
from cufa.launch.capture import is_capturing
from cufa.launch.clear_rows import clear_rows
from cufa.launch.known import KnownCalls, is_apart
from cufa.launch.launch import Launch
from cufa.launch.signature import Key
from cufa.problem.lengths import which_rows

_ARRAYS = "q", "k", "v"
_OTHERS = (
    *("out", "alibi_slopes", "sinks", "lengths_k", "lengths_q"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
)
OPTIONS = (
    *("causal", "window", "attention_chunk", "softcap", "dropout_p", "scale", "layout"),
    *("max_seqlen_q", "max_seqlen_k"),
    *("return_lse", "batch_invariant", "out_dtype", "precision", "kernel"),
)
"""The arguments, besides arrays, that may differ from None in calls that are remembered."""


class Known(NamedTuple):
    """The state that calls with the same key share.

    Attributes
    ----------
    launch : Launch
        Launches the kernel of attention.
    extras : tuple of str
        The arguments whose addresses the launch is given last; empty if all of them are None.
    clears : int or None
        `max_seqlen_q`, if packed arrays may have rows that belong to no sequence.
    quantizers : tuple of Quantizer
        Those of q, k and v; empty if these are in 8 bits.
    shape, lse_shape : tuple of int
        Shapes of the result and of its log-sum-exp.
    dtype : dtype
        Dtype of the result.
    """

    launch: Launch
    extras: tuple[str, ...]
    clears: int | None
    quantizers: tuple[quantize.Quantizer, ...]
    shape: Ints
    lse_shape: Ints
    dtype: np.dtype


CALLS: KnownCalls[Known] = KnownCalls(_ARRAYS, OPTIONS, _OTHERS)


def run(key: Key, arguments: Mapping[str, Any]) -> Any:
    """Run a remembered call, and return its result.

    Return None if no call with this key is remembered, if `out` may overlap an array that is read,
    or if a call in a capture would quantize.
    """
    known, given = CALLS.known.get(key), arguments["out"]
    if known is None:
        return None
    arrays = [arguments[name] for name in _ARRAYS]
    others = [arguments.get(name) for name in known.extras]
    if given is not None:
        read = arrays if known.quantizers else [y for x in arrays for y in (x.values, x.scales)]
        if not is_apart((given,), (*read, *others)):
            return None
    if known.quantizers:
        if is_capturing():
            return None  # quantizing needs memory: the full check raises the error
        rows = (
            zip(*(which_rows(name, arguments) for name in _ARRAYS), strict=True) if others else ()
        )
        arrays = launches = [*map(quantize.launches_for, known.quantizers, arrays, *rows)]
        quantize.run(launches)
    values, scales = ([getattr(x, name) for x in arrays] for name in ("values", "scales"))
    import cupy

    out = cupy.empty(known.shape, known.dtype) if given is None else given
    lse = cupy.empty(known.lse_shape, np.float32) if arguments["return_lse"] else None
    known.launch(*fp8.addresses(values, scales, out, lse), *map(address, others))
    if known.clears is not None:
        made = out if given is None else None
        clear_rows(made, lse, arguments["cu_seqlens_q"], known.clears)
    return out if lse is None else (out, lse)
