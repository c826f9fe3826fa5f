"""The arrays of a backward pass: what the forward call gave, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import numpy as np

from cufa.arrays import Array, as_bhsd
from cufa.checks import check_apart, check_devices, check_dtypes, check_out, shown_dtype

TENSORS = ("q", "k", "v")
"""Arrays whose gradients have an argument: ``dq`` and so on."""

WRT = (*TENSORS, "bias", "sinks")
"""Arguments that attention is differentiated by."""

_FLOAT32 = np.dtype(np.float32)


class Gradients(NamedTuple):
    """An array for each gradient that is asked for, by the name of its argument; None for others.

    Attributes
    ----------
    q, k, v : array or None
        (batch, heads, seq, head_dim).
    bias : array or None
        (batch, heads_q, seq_q, seq_kv), and length 1 along axes that the bias lacks.
    sinks : array or None
        (heads_q,).
    read : mapping
        Gradients of arrays that a `score_mod` reads, by name.
    """

    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None
    read: Mapping[str, Array] = MappingProxyType({})

    @property
    def needs_scores(self) -> bool:
        """Whether a gradient of scores is needed: gradients of V and sinks need none."""
        return not (self.q is self.k is self.bias is None) or bool(self.read)

    def viewed(self, view: Callable[[Array], Array], ndim: int) -> Gradients:
        """Return views with these axes of arrays with the caller's.

        Parameters
        ----------
        view : callable
            Applied to the gradients of q, k and v.
        ndim : int
            Axes of q: a bias has the last of (b, hq, sq, sk), (b, sq, sk) or (sq, sk).
        """
        q, k, v = (None if x is None else view(x) for x in (self.q, self.k, self.v))
        bias = self.bias
        if bias is not None:
            bias = as_bhsd(bias.reshape((1,) * (ndim - bias.ndim) + bias.shape), "bhsd")
        return Gradients(q, k, v, bias, self.sinks, self.read)


class Results(NamedTuple):
    """The gradient of a forward call's result, and what the call returned.

    Attributes
    ----------
    dout, out : array, (batch, heads_q, seq_q, head_dim_v)
    lse : array, (batch, heads_q, seq_q) float32
    """

    dout: Array
    out: Array
    lse: Array


def check_wrt(
    wrt: object, given: Mapping[str, Array | None], read: Mapping[str, Array]
) -> tuple[str, ...]:
    """Return what a call is differentiated with respect to.

    Parameters
    ----------
    wrt : tuple of str
        Some of `WRT`, and of `read`.
    given : mapping
        Arguments of the call by name, None for what it lacks: those of `WRT`, and `dq`, `dk`, `dv`.
    read : mapping
        Arrays that its `score_mod` reads, by name.

    Raises
    ------
    TypeError, ValueError
    """
    names = dict.fromkeys((*WRT, *read))
    known = ", ".join(map(repr, names))
    if not isinstance(wrt, (tuple, list)) or not all(isinstance(name, str) for name in wrt):
        shown = repr(wrt) if isinstance(wrt, (str, tuple, list)) else type(wrt).__name__
        hint = f": give ({wrt!r},)" if isinstance(wrt, str) else ""
        raise TypeError(f"wrt must be a tuple of names of {known}, not {shown}{hint}")
    if not wrt:
        raise ValueError(f"wrt is empty: it must name one or more of {known}")
    for i, name in enumerate(wrt):
        if name in read and name in (*WRT, *(f"d{tensor}" for tensor in TENSORS)):
            raise ValueError(
                f"wrt has {name!r}, which is an argument and the name of an array that score_mod "
                "reads: rename the array"
            )
        if name not in names:
            raise ValueError(f"wrt has {name!r}, which is none of {known}")
        if name in wrt[:i]:
            raise ValueError(f"wrt has {name!r} twice")
        if name in WRT and given.get(name) is None:
            raise ValueError(f"wrt has {name!r}, but the call has no {name}")
    for name in TENSORS:
        if given.get(f"d{name}") is not None and name not in wrt:
            raise ValueError(f"d{name} is given, but {name!r} is not in wrt, {tuple(wrt)}")
    return tuple(wrt)


def check_results(
    results: Mapping[str, Array],
    q: Array,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    xp: ModuleType,
) -> tuple[Array, Array, Array]:
    """Check what the forward call gave, and return ``dout``, ``out`` and ``lse``.

    Parameters
    ----------
    results : mapping
        dout, out and lse, by name.
    q : array
    shapes : tuple
        Shapes of the result and its log-sum-exp.
    xp : module
        The module that all arrays belong to.

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes and devices that are not those of the forward call.
    """
    dout, out, lse = (results[name] for name in ("dout", "out", "lse"))
    if xp is np:
        dout, out, lse = map(np.asarray, (dout, out, lse))
    check_dtypes({"q": q, "dout": dout, "out": out})
    if lse.dtype != _FLOAT32:
        raise TypeError(
            f"lse has dtype {shown_dtype(lse.dtype)}: float32 is needed, as return_lse=True gives"
        )
    check_devices(results, xp)
    for name, array in (("dout", dout), ("out", out), ("lse", lse)):
        what, needed = ("log-sum-exp", shapes[1]) if name == "lse" else ("result", shapes[0])
        if array.shape != needed:
            raise ValueError(
                f"{name} has shape {array.shape}, but the forward call's {what} has shape {needed}"
            )
    return dout, out, lse


def check_gradients(
    given: Mapping[str, Array | None], inputs: Mapping[str, Array | None], xp: ModuleType
) -> None:
    """Check the arrays that gradients go to.

    Parameters
    ----------
    given : mapping
        ``dq``, ``dk`` and ``dv``, None for one that is to be made.
    inputs : mapping
        All arrays that the call reads, by name; q, k and v among them.
    xp : module
        The module that all arrays belong to.

    Raises
    ------
    TypeError, ValueError
        For dtypes, shapes and devices that are not those of q, k and v; for an array that cannot be
        written, or shares memory with another.
    """
    there = {name: array for name, array in inputs.items() if array is not None}
    written: dict[str, Array] = {}
    for name, array in given.items():
        if array is None:
            continue
        of = name.removeprefix("d")
        check_dtypes({of: there[of], name: array})
        check_devices({name: array}, xp)
        check_out(array, there[of].shape, there, name)
        check_apart(name, array, written)
        written[name] = array
