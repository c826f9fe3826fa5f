"""Tables of rotary position embedding: the cosines and sines that turn queries and keys."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array, module_of_all
from cufa.checks import check_flag, shown_dtype
from cufa.dtypes import DTYPES


class RotaryTables:
    """The tables of a `cufa.Rotary`, as kernels read them.

    Parameters
    ----------
    cos, sin, interleaved
        As in `cufa.Rotary`.

    Attributes
    ----------
    cos, sin, interleaved
        As in `cufa.Rotary`.

    Raises
    ------
    TypeError, ValueError
        As `cufa.Rotary`.
    """

    def __init__(self, cos: Array, sin: Array, *, interleaved: bool = False) -> None:
        xp = module_of_all({"cos": cos, "sin": sin})
        if cos.ndim != 2 or 0 in cos.shape:
            raise ValueError(f"cos has shape {cos.shape}: (positions, rotary_dim / 2) is needed")
        if sin.shape != cos.shape:
            raise ValueError(f"sin has shape {sin.shape}, but cos has shape {cos.shape}")
        check_real_dtype("cos", cos.dtype)
        check_real_dtype("sin", sin.dtype)
        self.cos: Array = xp.ascontiguousarray(cos, np.float32)
        self.sin: Array = xp.ascontiguousarray(sin, np.float32)
        self.interleaved = check_flag("interleaved", interleaved)

    @property
    def positions(self) -> int:
        """Positions that the tables have, from 0 on."""
        return self.cos.shape[0]

    @property
    def dim(self) -> int:
        """Elements of a head that are rotated."""
        return 2 * self.cos.shape[1]


def check_real_dtype(name: str, dtype: np.dtype) -> None:
    """Refuse a dtype that is not of real numbers."""
    if dtype.kind not in "fiu" and dtype.name not in DTYPES:
        raise TypeError(f"{name} has dtype {shown_dtype(dtype)}: real numbers are needed")
