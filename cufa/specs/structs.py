"""Layouts of the structs that kernels take as their parameter, as NumPy dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cufa.features.parts import part_named

Number = tuple[str, int, np.dtype]

TENSOR = [("data", "u8"), ("stride_batch", "i8"), ("stride_head", "i8"), ("stride_seq", "i8")]
"""The fields of ``Tensor`` in ``kernels/params.cuh``."""


def struct(*members: tuple[Any, str]) -> np.dtype:
    """Return the layout of a struct: each type and the names of its members, as C lays them out."""
    return np.dtype([(name, kind) for kind, names in members for name in names.split()], align=True)


def extended(base: np.dtype, *members: tuple[Any, str]) -> np.dtype:
    """Return the layout of a struct that begins with another: its members, then these."""
    fields = [(kind, name) for name, (kind, *_) in (base.fields or {}).items()]
    return struct(*fields, *members)


def structure(fields: Sequence[tuple[str, np.dtype]], alignment: int = 8) -> np.dtype:
    """Return the layout of a struct with these bases, in order."""
    offsets, end = [], 0
    for name, kind in fields:
        offsets.append(-(-end // kind.alignment) * kind.alignment)
        # Padding at the end of a derived base class in C++ is used by the next base.
        last = max(at + number.itemsize for _, at, number in numbers_of(kind))
        end = offsets[-1] + (kind.itemsize if name == "params" else last)
    names, formats = zip(*fields, strict=True)
    size = -(-end // alignment) * alignment
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


def of_parts(score: Sequence[str]) -> Iterator[tuple[str, np.dtype]]:
    """Yield name and layout of those parts of a score that have parameters."""
    for name in score:
        numbers = part_named(name).numbers
        if numbers:
            yield name, np.dtype(list(numbers), align=True)


def numbers_of(dtype: np.dtype, prefix: str = "", at: int = 0) -> Iterator[Number]:
    """Yield name, offset and type of all numbers in a structure, its structures' included."""
    for name, (inner, offset, *_) in (dtype.fields or {}).items():
        if inner.fields:
            yield from numbers_of(inner, f"{prefix}{name}.", at + offset)
        else:
            yield prefix + name, at + offset, inner
