"""Calls that are remembered whole, by keys; and whether a call writes what it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from cufa.arrays import ALIGNMENT, bounds
from cufa.dtypes import DTYPES
from cufa.launch.signature import PLAIN, Key, types_in
from cufa.quantized.quantized import Quantized
from cufa.remembered import remember
from cufa.specs.variant import BackwardVariant, Fp8Variant

_T = TypeVar("_T")

_CALLS = 128  # of a kind that are remembered
_IGNORED = "other_names"  # empty here: other names have raised an error

_DTYPES = {type, *(type(row.numpy) for row in DTYPES.values())}
_PLAIN = {*PLAIN, *_DTYPES, BackwardVariant, Fp8Variant}


class KnownCalls(Generic[_T]):
    """Remembers calls by keys: those with the same key differ in addresses only.

    These addresses have the same alignment.

    Parameters
    ----------
    arrays : tuple of str
        Names of arguments that must be CuPy arrays, or `cufa.Quantized` of such.
    options : tuple of str
        Names of arguments that are part of the key. They must be of plain types. An option that
        the function lacks counts as None.
    others : tuple of str
        Names of arguments that may be such arrays, or None.

    Attributes
    ----------
    known : dict
        The state that calls share, by their key.
    """

    def __init__(
        self, arrays: tuple[str, ...], options: tuple[str, ...], others: tuple[str, ...] = ()
    ) -> None:
        self._arrays, self._options, self._others = arrays, options, others
        self._allowed = {*arrays, *others, *options, _IGNORED}
        self.known: dict[Key, _T] = {}

    def remember(self, key: Key, known: _T) -> None:
        """Remember calls with this key."""
        remember(self.known, key, known, _CALLS)

    def key_of(self, arguments: Mapping[str, Any]) -> Key | None:
        """Return the key of a call by its arguments, or None if it is not to be remembered."""
        present = [name for name, x in arguments.items() if x is not None]
        if not self._allowed.issuperset(present):
            return None
        described: list[Any] = [_described(arguments.get(name)) for name in self._arrays]
        for name in self._others:
            if name in present:
                described += name, _described(arguments[name])
        if None in described:
            return None
        import cupy

        # Types as well, as in `calls.number_of`: True == 1.
        given = [arguments.get(name) for name in self._options]
        types = (*map(type, given),)
        members = [types_in(x) or () for x in given if isinstance(x, tuple)]
        key = cupy.cuda.runtime.getDevice(), *described, *given, types, *members
        try:
            hash(key)
            is_plain = _PLAIN.issuperset(types) and all(map(_PLAIN.issuperset, members))
        except Exception:  # something cannot be hashed, whatever it raises
            return None
        return key if is_plain else None  # the full check judges others


def is_apart(written: Iterable[Any], read: Iterable[Any]) -> bool:
    """Whether each CuPy array to write ends before all that are read, or begins after them.

    None stands for an array that there is not.
    """
    spans = [bounds(x) for x in written if x is not None]
    others = [bounds(x) for x in read if x is not None] if spans else []
    return all(end <= low or high <= first for low, high in spans for first, end in others)


def _described(x: Any) -> Key | None:
    """Return an array's part of a key; None for other objects than CuPy arrays."""
    if isinstance(x, Quantized):
        values, scales = _described(x.values), _described(x.scales)
        if values is None or scales is None:
            return None
        fields = x.shape, x.dtype, x.granularity, x.block, x.hadamard, x.seed, x.layout
        sequences = None if x.cu_seqlens is None else x.cu_seqlens.size
        return *fields, x.transposed, x.mean is None, sequences, *values, *scales
    # Calls on NumPy arrays need no CuPy, which another thread may still be importing.
    ndarray: Any = getattr(sys.modules.get("cupy"), "ndarray", ())
    if not isinstance(x, ndarray):
        return None
    data = x.data
    return x.shape, x.strides, x.dtype, data.device_id, data.ptr % ALIGNMENT
