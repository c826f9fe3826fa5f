"""Calls of `attention_backward` that are remembered: the launches of calls like them.

`cufa.api.gradients` remembers calls that copy nothing, and have no arrays but those of `_READ` and
`_WRITTEN`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from cufa.arrays import Array, bounds
from cufa.launch import backward
from cufa.launch.known import KnownCalls, is_apart
from cufa.launch.signature import Key
from cufa.quantized.quantized import Quantized

_READ = "dout", "q", "k", "v", "out", "lse"
_WRITTEN = "dq", "dk", "dv"  # or None
OPTIONS = (
    *("wrt", "causal", "window", "attention_chunk", "softcap", "dropout_p", "scale", "layout"),
    *("deterministic", "kernel"),
)
"""The arguments of `attention_backward` that may differ from None in calls that are remembered."""

CALLS: KnownCalls[backward.Prepared] = KnownCalls(_READ, OPTIONS, _WRITTEN)


def key_of(arguments: Mapping[str, Any]) -> Key | None:
    """Return the key of a call, or None if it is not to be remembered."""
    written = _written(arguments)
    if any(isinstance(arguments[name], Quantized) for name in written):
        return None
    key = CALLS.key_of(arguments)
    if key is None or len(written) < 2:
        return key
    places = [bounds(arguments[name]) for name in written]
    if all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(places))):
        return key
    # They are interleaved: their distances decide whether they overlap.
    return (*key, *(low - places[0][0] for low, _ in places))


def run(key: Key, arguments: Mapping[str, Any]) -> tuple[Array, ...] | None:
    """Run a call if one with its key is remembered, and return the gradients; else return None.

    A call that may write what it reads is not run.
    """
    known = CALLS.known.get(key)
    written = (arguments.get(name) for name in _WRITTEN)
    if known is None or not is_apart(written, (arguments[name] for name in _READ)):
        return None
    import cupy

    found = {}
    for name in arguments["wrt"]:
        array, place = arguments[name], arguments.get(f"d{name}")
        found[f"d{name}"] = cupy.empty(array.shape, array.dtype) if place is None else place
    arrays = {name: arguments[name] for name in "qkv"}
    arrays |= {"o": arguments["out"], "d_out": arguments["dout"]} | found
    backward.run(known, arrays, arguments["lse"])
    return tuple(found.values())


def _written(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in _WRITTEN if arguments.get(name) is not None)
