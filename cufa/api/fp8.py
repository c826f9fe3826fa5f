"""Attention of arrays in 8 bits: the checks of their arguments, and quantization by the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cufa.api.quantize_qkv import prepare_qkv
from cufa.arrays import Array, Operands, module_of, module_of_all
from cufa.checks import check_dtypes, shown_dtype
from cufa.dtypes import DTYPES
from cufa.launch.quantize import Launches
from cufa.problem.lengths import OFFSETS, which_rows
from cufa.problem.problem import Problem
from cufa.quantized.axes import check_order
from cufa.quantized.quantized import Quantized


def as_8_bits(arguments: Mapping[str, Any], layout: str) -> tuple[Fp8 | None, Mapping[str, Any]]:
    """Return the arrays of a call in 8 bits, if it asks for these, and the arguments to be checked.

    Parameters
    ----------
    arguments : mapping
        The arguments of the call, by name.
    layout : str
        Order of the axes, as in `quantize`.

    Returns
    -------
    Fp8 or None
    mapping
        The arguments with arrays that take no memory in place of q, k and v: of their shapes, and
        the dtype of the result.

    Raises
    ------
    TypeError, ValueError
        Whatever does not fit, but for the shapes.
    """
    out_dtype, precision = arguments.get("out_dtype"), arguments.get("precision")
    given, out = {name: arguments[name] for name in "qkv"}, arguments["out"]
    of_8_bits = [name for name, x in given.items() if isinstance(x, Quantized)]
    if out_dtype is precision is None and not of_8_bits:
        return None, arguments
    check_order(layout)
    _check_precision(precision)
    if of_8_bits:
        xp = _check_quantized(given, of_8_bits[0], layout)
        if out_dtype is None:
            raise ValueError(
                "out_dtype is needed with arrays of 8 bits: the dtype of the result, "
                f"{', '.join(DTYPES)}"
            )
    elif precision is None:
        raise ValueError(
            "out_dtype must be None, unless q, k and v are Quantized or precision is 'fp8': "
            f"the result has q's dtype, not {out_dtype!r}"
        )
    else:
        xp = module_of_all(given)
        check_dtypes(given)
    dtype = given["q"].dtype if out_dtype is None else _checked_dtype(out_dtype)
    if out is not None:
        module_of("out", out)
        if out.dtype != dtype:
            raise TypeError(
                f"out has dtype {shown_dtype(out.dtype)}, but the result has dtype {dtype.name}"
            )
    nothing = xp.empty((), dtype)
    like = {name: xp.broadcast_to(nothing, x.shape) for name, x in given.items()}
    return Fp8(given, bool(of_8_bits), layout), {**arguments, **like}


class Fp8(NamedTuple):
    """Queries, keys and values in 8 bits.

    Attributes
    ----------
    given : dict
        q, k and v: three of `Quantized`, or three arrays, which are quantized: in blocks, and q and
        k with a transform.
    is_quantized : bool
        Whether the arrays are of `Quantized`.
    layout : str
        Order of the axes, as in `quantize`.
    """

    given: dict[str, Any]
    is_quantized: bool
    layout: str

    def arrays(
        self, lengths: Mapping[str, Array | None], transposed: bool = False
    ) -> tuple[dict[str, Quantized], list[Launches]]:
        """Return q, k and v in 8 bits, and on a GPU the launches that write them.

        With `transposed`, v is stored transposed if it is quantized here.
        Rows that do not count by the `lengths` of the call, given by argument, change no scale of
        arrays that are quantized here.
        """
        if self.is_quantized:
            return self.given, []
        rows = {name: which_rows(name, lengths) for name in self.given}
        offsets, used = ({name: its[i] for name, its in rows.items()} for i in (0, 1))
        how: dict[str, Any] = {"transposed": transposed, "layout": self.layout}
        return prepare_qkv(self.given, offsets, used, hadamard=True, **how)

    def applied(self, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
        """Return problem and operands with the float32 numbers of q, k and v, on NumPy arrays.

        Raises
        ------
        ValueError
            Sequences in blocks of their own are not those of the call.

        Notes
        -----
        K's mean is a column of q, its product with q, where K has a 1.
        """
        (arrays, _), lengths = self.arrays(operands.lengths), operands.lengths
        for name, x in arrays.items():
            offsets = x.cu_seqlens
            needed: Array = lengths.get(OFFSETS[name])
            if offsets is not None and not np.array_equal(offsets, needed):
                raise ValueError(f"{name} was quantized with other cu_seqlens than the call's")
        q, k, v = (x.stored() for x in arrays.values())
        mean = arrays["k"].mean
        if mean is not None:
            batch, heads_kv, columns = mean.shape
            rows = q.shape[2] * problem.group
            product = q.reshape(batch, heads_kv, rows, columns) @ mean[..., None]
            q = np.concatenate([q, product.reshape(*q.shape[:3], 1)], axis=3)
            k = np.concatenate([k, np.ones((*k.shape[:3], 1), np.float32)], axis=3)
        return (
            problem._replace(precision="fp8", head_dim=q.shape[3]),
            operands._replace(q=q, k=k, v=v[..., : problem.head_dim_v]),
        )


def _check_precision(precision: object) -> None:
    if not (precision is None or isinstance(precision, str)):
        raise TypeError(f"precision must be 'fp8' or None, not {type(precision).__name__}")
    if precision not in (None, "fp8"):
        raise ValueError(f"precision must be 'fp8' or None, not {precision!r}")


def _checked_dtype(out_dtype: Any) -> np.dtype:
    try:
        dtype = np.dtype(out_dtype)
    except (TypeError, ValueError):
        dtype = None
    if dtype not in [row.numpy for row in DTYPES.values()]:
        raise TypeError(f"out_dtype must be {', '.join(DTYPES)}, not {out_dtype!r}")
    return dtype


def _check_quantized(given: dict[str, Any], first: str, layout: str) -> Any:
    """Refuse arrays of 8 bits that do not fit each other; return their module."""
    for name, x in given.items():
        if not isinstance(x, Quantized):
            raise TypeError(
                f"{name} is of type {type(x).__name__}, but {first} is Quantized: q, k and v must "
                f"be so; cufa.quantize({name}) makes it"
            )
        if x.layout != layout and (len(x.shape) == 4 or "thd" in (x.layout, layout)):
            raise ValueError(
                f"{name} was quantized with layout={x.layout!r}, not {layout!r}: arrays of "
                "attention_varlen have layout='thd', and those of attention its own"
            )
    xp = module_of_all({name: x.values for name, x in given.items()})
    q, k, v = given.values()
    if k.transform != q.transform:
        raise ValueError(
            f"k was quantized with {k.transform}, but q with {q.transform}: both need the same "
            "transform"
        )
    if v.hadamard:
        raise ValueError(
            f"v was quantized with {v.transform}: the result would have to be transformed back, "
            "so v takes hadamard=False"
        )
    for name in ("q", "k"):
        if given[name].transposed:
            raise ValueError(f"{name} was quantized with transposed=True: that is for v alone")
    for name in ("q", "v"):
        if given[name].mean is not None:
            raise ValueError(f"{name} was quantized with smooth=True: that is for k alone")
    return xp
