"""The element types of Q, K, V and O, one row each, and all that depends on nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Dtype(NamedTuple):
    """An element type.

    Attributes
    ----------
    name : str
        As NumPy writes it.
    scalar : type
        The scalar type of NumPy.
    bytes : int
    cpp : str
        The name in C++.
    softcap, softcap_with_lse : str
        The part of a score that caps it, as accurate as the other arithmetic; and where the
        log-sum-exp is returned, which is float32, as accurate as scores.
    tma : int or None
        The CUtensorMapDataType; None if no kernel reads such elements through tensor maps.
    """

    name: str
    scalar: Any
    bytes: int
    cpp: str
    softcap: str
    softcap_with_lse: str
    tma: int | None = None

    @property
    def numpy(self) -> np.dtype:
        """The dtype of arrays, in native byte order."""
        return np.dtype(self.scalar)

    def softcap_part(self, returns_lse: bool) -> str:
        """Return the part of a score that caps it."""
        return self.softcap_with_lse if returns_lse else self.softcap


DTYPES: dict[str, Dtype] = {
    row.name: row
    for row in (
        Dtype("float16", np.float16, 2, "float16", "FineSoftcap", "FineSoftcap", tma=6),
        Dtype("bfloat16", ml_dtypes.bfloat16, 2, "bfloat16", "Softcap", "FineSoftcap", tma=9),
        Dtype("float32", np.float32, 4, "float", "ExactSoftcap", "ExactSoftcap"),
    )
}
"""The element types, by name."""


def kv_bytes(dtype: str, kv_dtype: str | None) -> int:
    """Return the bytes of an element of K or V: `kv_dtype` is theirs, of 8 bits, if not q's."""
    return DTYPES[dtype].bytes if kv_dtype is None else 1
