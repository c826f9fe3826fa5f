"""`Quantized`: an array in 8 bits, with its scales and how it came to be."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import numpy as np

from cufa.arrays import Array, Ints, as_bhsd, module_of_all
from cufa.checks import check_flag, check_seed, shown_dtype
from cufa.dtypes import DTYPES
from cufa.quantized.axes import check_axes, sizes_of
from cufa.quantized.e4m3 import E4M3, expanded
from cufa.quantized.scales import check_granularity, check_sequences, of_rows, shape_of_scales
from cufa.quantized.sequences import ROWS, blocks_of, in_order
from cufa.quantized.transform import columns_of, restored
from cufa.quantized.transposed import KEYS, rows_of


@dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """An array in 8-bit floating point (e4m3), which `cufa.quantize` makes.

    Parameters
    ----------
    values : array, shape (b, h, s, columns)
        The bytes: `ml_dtypes.float8_e4m3fn` on NumPy, uint8 on CuPy. A row has 64, 96, 128, 192 or
        256 columns, the least of these that is enough for a row of the source. Without a transform,
        the additional columns are 0. The shape is (b, h, blocks, columns, 128) if
        `transposed`. With `cu_seqlens`, s is 128 * (tokens // 128 + sequences): sequence i begins
        at row 128 * (cu_seqlens[i] // 128 + i), and rows between sequences do not count.
    scales : array of float32
        Factors of the numbers, positive and finite: (b, h, blocks) for `granularity` "block",
        (b, h, 1) for "head", (1, 1, 1) for "tensor". Values of CuPy arrays are not checked: wrong
        values give meaningless results.
    shape : tuple of int
        Shape of the source.
    dtype : dtype
        Dtype of the source: float16, bfloat16 or float32.
    granularity : {"block", "head", "tensor"}
        The rows that share a scale.
    block : int, optional
        Rows of a block, a power of two from 16 to 1024, by default 128; None for other
        granularities.
    hadamard : bool
        Whether signs and a Hadamard transform were applied to rows.
    seed : int
        The seed of the signs.
    layout : {"bhsd", "bshd", "thd"}
        Order of the source's axes, as in `cufa.quantize`.
    mean : array of float32, shape (b, h, columns), optional
        The mean that `smooth` subtracted from each row, after the same transform.
    transposed : bool
        Whether `values` are transposed in blocks of 128 rows. Zeros follow the last row. Each 16
        rows are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, and each 16 pairs of columns in
        the order 0 4 8 12 1 5 9 13 2 6 10 14 3 7 11 15.
    cu_seqlens : array of int32, shape (sequences + 1,), optional
        Where sequences begin in a source of layout "thd", if each begins a new block.

    Raises
    ------
    TypeError, ValueError
        Shapes, dtypes and arguments that do not fit each other.

    See Also
    --------
    cufa.quantize : An example.
    """

    values: Array
    scales: Array
    shape: Ints
    dtype: np.dtype
    granularity: str = "block"
    block: int | None = None
    hadamard: bool = False
    seed: int = 0
    layout: str = "bhsd"
    mean: Array | None = None
    transposed: bool = False
    cu_seqlens: Array | None = None

    def __post_init__(self) -> None:
        """Check that all fit each other."""
        xp = self.module
        known = {row.numpy for row in DTYPES.values()}
        if not isinstance(self.dtype, np.dtype) or self.dtype not in known:
            raise TypeError(f"dtype must be that of {', '.join(DTYPES)}, not {self.dtype!r}")
        check_axes("shape", self.shape, self.layout)
        # Whatever their types are: calls are told apart by these.
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        object.__setattr__(self, "layout", str(self.layout))
        block = check_granularity(self.granularity, self.block)
        check_flag("hadamard", self.hadamard)
        check_flag("transposed", self.transposed)
        object.__setattr__(self, "seed", check_seed(self.seed))
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "granularity", str(self.granularity))
        batch, heads, seq, head_dim = sizes_of(self.shape, self.layout)
        columns = columns_of(head_dim)
        if self.cu_seqlens is not None:
            seq = self._check_sequences(block)
        stored: Ints = (batch, heads, seq, columns)
        scales = shape_of_scales(self.granularity, block, stored)
        if self.transposed:
            stored = batch, heads, -(-seq // KEYS), columns, KEYS
        float32, of_values = np.dtype(np.float32), E4M3 if xp is np else np.dtype(np.uint8)
        needed = {
            "values": (self.values, stored, of_values),
            "scales": (self.scales, scales, float32),
        }
        if self.mean is not None:
            needed["mean"] = self.mean, (batch, heads, columns), float32
        for name, (array, shape, dtype) in needed.items():
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}, but {shape} is needed")
            if array.dtype != dtype:
                given = shown_dtype(array.dtype)
                raise TypeError(f"{name} has dtype {given}, but {dtype.name} is needed")
        if xp is np and not ((self.scales > 0) & (self.scales < np.inf)).all():
            raise ValueError("scales must be positive and finite")

    def _check_sequences(self, block: int | None) -> int:
        """Refuse what sequences in blocks of their own do not have; return how many rows there are.

        They take no mean, since it would be that of all.
        """
        check_sequences("cu_seqlens", self.layout, block, self.mean is not None)
        offsets = self.cu_seqlens
        assert offsets is not None
        if offsets.ndim != 1 or offsets.size < 1 or offsets.dtype != np.int32:
            given = f"{shown_dtype(offsets.dtype)} {offsets.shape}"
            raise ValueError(f"cu_seqlens must be int32 (sequences + 1,), not {given}")
        return ROWS * blocks_of(self.shape[0], offsets.size - 1)

    def __repr__(self) -> str:
        """Say all but the numbers."""
        rows = "" if self.block is None else f", block={self.block}"
        signs = f", seed={self.seed}" if self.hadamard else ""
        smooth = "" if self.mean is None else ", smooth=True"
        smooth += ", transposed=True" if self.transposed else ""
        if self.cu_seqlens is not None:
            smooth += f", {self.cu_seqlens.size - 1} sequences"
        return (
            f"Quantized(shape={self.shape}, dtype={self.dtype.name}, layout={self.layout!r}, "
            f"granularity={self.granularity!r}{rows}, hadamard={self.hadamard}{signs}{smooth}, "
            f"{self.module.__name__})"
        )

    @property
    def module(self) -> ModuleType:
        """The module that the arrays belong to, numpy or cupy."""
        arrays = {"values": self.values, "scales": self.scales}
        others = {"mean": self.mean, "cu_seqlens": self.cu_seqlens}
        return module_of_all(arrays | {name: x for name, x in others.items() if x is not None})

    @property
    def transform(self) -> str:
        """The words for what was applied to rows."""
        return f"hadamard=True, seed={self.seed}" if self.hadamard else "hadamard=False"

    def stored(self) -> Array:
        """Return the numbers as they are stored, with their scales, but without `mean`.

        Returns
        -------
        array of float32, (b, h, s, columns)
            Rows after the transform, if there is one.
        """
        *_, seq, _ = sizes_of(self.shape, self.layout)
        rows, offsets, xp = seq, self.cu_seqlens, self.module
        if offsets is not None:
            rows = ROWS * blocks_of(seq, offsets.size - 1)
        values = rows_of(self.values, rows) if self.transposed else self.values
        found = expanded(values, xp) * of_rows(self.scales, self.block, rows)
        return found if offsets is None else in_order(found, offsets, seq, xp)

    def dequantize(self) -> Array:
        """Return an array of usual numbers.

        Returns
        -------
        array
            With the source's shape and dtype. It differs from the source by the rounding to 8
            bits.
        """
        rows = self.stored()
        if self.mean is not None:
            rows = rows + self.mean[:, :, None]
        if self.hadamard:
            rows = restored(rows, self.seed, self.module)
        found = self.module.empty(self.shape, self.dtype)
        as_bhsd(found, self.layout)[...] = rows[..., : self.shape[-1]]
        return found


_FIELDS = {field.name for field in fields(Quantized)}


def unchecked(**values: Any) -> Quantized:
    """Make a `Quantized` of all its fields without the checks, which cost the host time."""
    made = object.__new__(Quantized)
    assert values.keys() == _FIELDS
    vars(made).update(values)
    return made
