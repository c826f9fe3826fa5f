"""Calls of `attention_backward` that are remembered: the launches of calls like them.

`cufa.api.gradients` remembers calls that copy nothing, have no arrays but those of `_ARRAYS`, and
make their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cufa.arrays import Array
from cufa.launch import backward
from cufa.launch.known import key_of as key_of_call
from cufa.launch.signature import Key
from cufa.remembered import remember as remember_in

_CALLS = 128  # that are remembered
_ARRAYS = "dout", "q", "k", "v", "out", "lse"
OPTIONS = (
    *("wrt", "causal", "window", "attention_chunk", "softcap", "dropout_p", "scale", "layout"),
    *("deterministic", "kernel"),
)
"""The arguments of `attention_backward` that may differ from None in calls that are remembered."""

_known: dict[Key, backward.Prepared] = {}


def key_of(arguments: Mapping[str, Any]) -> Key | None:
    """Return the key of a call, or None if it is not to be remembered."""
    return key_of_call(arguments, _ARRAYS, OPTIONS)


def remember(key: Key, known: backward.Prepared) -> None:
    """Remember calls with this key."""
    remember_in(_known, key, known, _CALLS)


def run(key: Key, arguments: Mapping[str, Any]) -> tuple[Array, ...] | None:
    """Run a call if one with its key is remembered, and return the gradients; else return None."""
    known = _known.get(key)
    if known is None:
        return None
    import cupy

    given = [arguments[name] for name in arguments["wrt"]]
    found = tuple(cupy.empty(x.shape, x.dtype) for x in given)
    arrays = {name: arguments[name] for name in "qkv"}
    arrays |= {"o": arguments["out"], "d_out": arguments["dout"]}
    arrays |= {f"d{name}": x for name, x in zip(arguments["wrt"], found, strict=True)}
    backward.run(known, arrays, arguments["lse"])
    return found
