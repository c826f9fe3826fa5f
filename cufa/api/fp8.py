"""Attention of arrays in 8 bits: what their calls do before they run like others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cufa.api.arguments import Call
from cufa.api.quantize import quantized
from cufa.arrays import Array, module_of, module_of_all
from cufa.checks import check_dtype, shown_dtype
from cufa.dtypes import DTYPES
from cufa.quantized.axes import check_order
from cufa.quantized.quantized import Quantized

PRECISIONS = ("fp8",)

_NONE: Mapping[str, Array] = MappingProxyType({})


class Rows(NamedTuple):
    """Which rows of q, k and v count, by their names.

    Attributes
    ----------
    cu_seqlens : mapping
        Where sequences begin that follow each other.
    used : mapping
        How many rows of each sequence count, the first ones; None for all.
    """

    cu_seqlens: Mapping[str, Array] = _NONE
    used: Mapping[str, Array | None] = _NONE

    @classmethod
    def padded(cls, lengths_k: Array | None = None, lengths_q: Array | None = None) -> Rows:
        """Return those of `attention`."""
        return cls(used={"q": lengths_q, "k": lengths_k, "v": lengths_k})

    @classmethod
    def varlen(cls, cu_seqlens_q: Array, cu_seqlens_k: Array, seqused_k: Array | None) -> Rows:
        """Return those of `attention_varlen`."""
        offsets = {"q": cu_seqlens_q, "k": cu_seqlens_k, "v": cu_seqlens_k}
        return cls(offsets, {"k": seqused_k, "v": seqused_k})


def as_8_bits(arguments: dict[str, Any], layout: str) -> tuple[Fp8 | None, dict[str, Any]]:
    """Return the arrays of a call in 8 bits, if it asks for these, and the arguments to be checked.

    Parameters
    ----------
    arguments : dict
        The arguments of the call, by name.
    layout : str
        Order of the axes, as in `quantize`.
    """
    out_dtype, precision = arguments["out_dtype"], arguments["precision"]
    given = {name: arguments[name] for name in "qkv"}
    is_quantized = any(isinstance(x, Quantized) for x in given.values())
    if out_dtype is precision is None and not is_quantized:
        return None, arguments
    fp8 = Fp8(given, arguments["out"], out_dtype, precision, layout)
    return fp8, {**arguments, **fp8.like}


class Fp8:
    """Queries, keys and values in 8 bits.

    Parameters
    ----------
    given : dict
        q, k and v: three of `Quantized`, or with `precision` three arrays, which are quantised: in
        blocks, and q and k with a transform.
    out : array or None
    out_dtype, precision : object
        As in `attention`.
    layout : str
        Order of the axes, as in `quantize`.

    Attributes
    ----------
    given : dict
    is_quantized : bool
        Whether the arrays are of `Quantized`.
    like : dict
        Arrays with the shapes of q, k and v and the dtype of the result, which take no memory.

    Raises
    ------
    TypeError, ValueError
        Whatever does not fit, but for the shapes.
    """

    def __init__(
        self,
        given: dict[str, Any],
        out: Array | None,
        out_dtype: Any,
        precision: object,
        layout: str,
    ) -> None:
        check_order(layout)
        _check_precision(precision)
        self.given, self._layout = given, layout
        of_8_bits = [name for name, x in given.items() if isinstance(x, Quantized)]
        self.is_quantized = bool(of_8_bits)
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
            xp = _check_arrays(given)
        dtype = given["q"].dtype if out_dtype is None else _checked_dtype(out_dtype)
        if out is not None:
            module_of("out", out)
            if out.dtype != dtype:
                raise TypeError(
                    f"out has dtype {shown_dtype(out.dtype)}, but the result has dtype {dtype.name}"
                )
        nothing = xp.empty((), dtype)
        self.like = {name: xp.broadcast_to(nothing, x.shape) for name, x in given.items()}

    def arrays(self, rows: Rows, transposed: bool = False) -> dict[str, Quantized]:
        """Return q, k and v in 8 bits; v may be `transposed` if it is quantised here.

        Rows that do not count change no scale of arrays that are quantised here.
        """
        if self.is_quantized:
            return self.given
        return {
            name: quantized(
                name,
                x,
                hadamard=name != "v",
                transposed=transposed and name == "v",
                layout=self._layout,
                cu_seqlens=rows.cu_seqlens.get(name),
                used=rows.used.get(name),
            )
            for name, x in self.given.items()
        }

    def applied(self, call: Call, rows: Rows) -> Call:
        """Return a call on NumPy arrays `like` these as that of these.

        Raises
        ------
        ValueError
            Sequences in blocks of their own are not those of the call.

        Notes
        -----
        K's mean is a column of q, its product with q, where K has a 1.
        """
        arrays, problem = self.arrays(rows), call.problem
        for name, x in arrays.items():
            offsets = x.cu_seqlens
            if offsets is not None and not np.array_equal(offsets, rows.cu_seqlens[name]):
                raise ValueError(f"{name} was quantized with other cu_seqlens than the call's")
        q, k, v = (x.stored() for x in arrays.values())
        mean = arrays["k"].mean
        if mean is not None:
            batch, heads_kv, columns = mean.shape
            rows = q.shape[2] * problem.group
            product = q.reshape(batch, heads_kv, rows, columns) @ mean[..., None]
            q = np.concatenate([q, product.reshape(*q.shape[:3], 1)], axis=3)
            k = np.concatenate([k, np.ones((*k.shape[:3], 1), np.float32)], axis=3)
        return call._replace(
            problem=problem._replace(precision="fp8", head_dim=q.shape[3]),
            operands=call.operands._replace(q=q, k=k, v=v[..., : problem.head_dim_v]),
        )


def _check_precision(precision: object) -> None:
    if not (precision is None or isinstance(precision, str)):
        raise TypeError(f"precision must be 'fp8' or None, not {type(precision).__name__}")
    if precision is not None and precision not in PRECISIONS:
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


def _check_arrays(given: dict[str, Array]) -> Any:
    """Refuse arrays that `precision` cannot quantise; return their module."""
    xp, q = module_of_all(given), given["q"]
    for name, x in given.items():
        check_dtype(name, x)
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {shown_dtype(x.dtype)}, but q has dtype {q.dtype.name}"
            )
    return xp
