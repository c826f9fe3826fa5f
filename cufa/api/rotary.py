"""Rotary position embedding, of what is written to a cache or of any queries and keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cufa.api.options import Layout
from cufa.arrays import AnyArray, Array, ArrayT, as_bhsd, check_unmasked, module_of, module_of_all
from cufa.checks import (
    check_devices,
    check_dtype,
    check_layout,
    check_module,
    check_real,
    check_size,
)
from cufa.cpu import append as cpu
from cufa.launch import rotary as launch
from cufa.problem.lengths import check_integers
from cufa.problem.rotary import RotaryTables, check_real_dtype


class Rotary(RotaryTables):
    """Cosines and sines of a rotary position embedding.

    A cache rotates the keys and queries that are written to it. `apply` does so without a cache.
    The pair (x, y) of elements of a head becomes (x cos - y sin, y cos + x sin), where the angle
    grows with the token's position.

    Parameters
    ----------
    cos, sin : array, shape (positions, rotary_dim / 2)
        Cosines and sines of the angle of each position and pair; they become float32. NumPy or
        CuPy, like the arrays that are rotated. The first `rotary_dim` elements of a head are
        rotated, the others stay.
    interleaved : bool
        Pairs are elements 2 i and 2 i + 1, as in GPT-J and in Llama's own checkpoints; else i and
        i + rotary_dim / 2, as in GPT-NeoX and in Hugging Face's checkpoints.

    Attributes
    ----------
    cos, sin : array, shape (positions, rotary_dim / 2)
        float32.
    interleaved : bool

    Raises
    ------
    TypeError
        Tables that are no arrays, of mixed kinds or not of real numbers, and an `interleaved` that
        is no bool.
    ValueError
        Shapes that do not fit.

    Notes
    -----
    Su et al. 2021, RoFormer. Scalings of the frequencies or the magnitude (linear, NTK, YaRN, Llama
    3, LongRoPE) are in the tables: no table is rounded more than once however far the position.

    Examples
    --------
    >>> import cufa
    >>> rotary = cufa.Rotary.of_theta(10000.0, 64, 4096)  # base, elements, positions
    >>> rotary.cos.shape
    (4096, 32)
    """

    @classmethod
    def of_frequencies(
        cls,
        frequencies: np.ndarray,
        positions: int,
        *,
        magnitude: float = 1.0,
        interleaved: bool = False,
        xp: Any = np,
    ) -> Rotary:
        """Make the tables of angles position * frequency.

        Parameters
        ----------
        frequencies : ndarray, shape (rotary_dim / 2,)
            Radians a position, scaled as a model asks for; on the host.
        positions : int
            Rows of the tables, from position 0 on: at least the tokens of the longest sequence.
        magnitude : float
            Factor of cosines and sines, such as YaRN's.
        interleaved : bool
        xp : module
            `numpy` or `cupy`: the kind of the tables.

        Returns
        -------
        Rotary

        Raises
        ------
        TypeError, ValueError
            As in `Rotary`; frequencies or a magnitude that are no finite numbers, or too large for
            finite tables; positions that are no integer of 1 or more, an `xp` that is no such
            module.
        """
        check_module(xp)
        positions = check_size("positions", positions)
        frequencies = _numbers("frequencies", frequencies)
        if frequencies.ndim != 1 or frequencies.size == 0:
            raise ValueError(
                f"frequencies has shape {frequencies.shape}: (rotary_dim / 2,) is needed"
            )
        magnitude = _number("magnitude", magnitude)
        with np.errstate(over="ignore", invalid="ignore"):  # found below
            angles = np.arange(positions)[:, None] * frequencies
            tables = [(magnitude * of(angles)).astype(np.float32) for of in (np.cos, np.sin)]
        if not all(np.isfinite(table).all() for table in tables):
            raise ValueError(
                f"frequencies up to {abs(frequencies).max()} and magnitude {magnitude} give "
                "cosines and sines that are no finite float32 numbers"
            )
        cos, sin = map(xp.asarray, tables)
        return cls(cos, sin, interleaved=interleaved)

    @classmethod
    def of_theta(
        cls,
        theta: float,
        rotary_dim: int,
        positions: int,
        *,
        factors: np.ndarray | float = 1.0,
        magnitude: float = 1.0,
        interleaved: bool = False,
        xp: Any = np,
    ) -> Rotary:
        """Make the tables of the usual frequencies, theta^(-2 i / rotary_dim).

        Parameters
        ----------
        theta : float
            The base, such as 10000; more than 0.
        rotary_dim : int
            Elements of a head that are rotated: an even number.
        positions : int
        factors : ndarray of shape (rotary_dim / 2,) or float
            Divisors of the frequencies, as for linear scaling or LongRoPE.
        magnitude, interleaved, xp
            As in `of_frequencies`.

        Returns
        -------
        Rotary

        Raises
        ------
        TypeError, ValueError
            As in `of_frequencies`; a `theta`, a `rotary_dim` or `factors` that do not fit.

        Notes
        -----
        The frequencies are those of Su et al. 2021, RoFormer, section 3.2.2.
        """
        theta = _number("theta", theta)
        if theta <= 0:
            raise ValueError(f"theta must be more than 0, not {theta}")
        rotary_dim = check_size("rotary_dim", rotary_dim)
        if rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, not {rotary_dim}")
        divisors = _numbers("factors", factors)
        if divisors.shape not in ((), (rotary_dim // 2,)):
            raise ValueError(
                f"factors has shape {divisors.shape}: a number or ({rotary_dim // 2},) is needed"
            )
        if not divisors.all():
            raise ValueError("factors must not be 0")
        with np.errstate(over="ignore"):  # what is infinite is refused
            frequencies = theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim) / divisors
        return cls.of_frequencies(
            frequencies, positions, magnitude=magnitude, interleaved=interleaved, xp=xp
        )

    def __repr__(self) -> str:
        """Say what is turned, and where the tables are."""
        pairs = "interleaved" if self.interleaved else "in halves"
        xp = module_of("cos", self.cos).__name__
        return f"Rotary of {self.positions} positions, {self.dim} elements {pairs}, {xp}"

    def apply(
        self, x: ArrayT, positions: int | np.integer | AnyArray, *, layout: Layout = "bhsd"
    ) -> ArrayT:
        """Rotate queries or keys by their positions.

        Parameters
        ----------
        x : array, shape (b, h, s, d) or (b, s, h, d)
            As `layout` says. In (b, s, d) and (s, d) the missing axes have length 1, as in
            `cufa.attention`. float16, bfloat16 or float32, of any strides; d is `dim` or more.
            NumPy or CuPy, like the tables.
        positions : int, or array of int of shape (s,) or (b, s)
            The position of each token; one number is the position of the first token of each
            sequence. A NumPy or CuPy array.
        layout : {"bhsd", "bshd"}
            Order of x's axes.

        Returns
        -------
        array
            Contiguous, with x's shape and dtype.

        Raises
        ------
        TypeError
            An x or positions of another kind or dtype.
        ValueError
            Shapes, a layout or a device that do not fit; positions on the host that the tables do
            not have.
        RuntimeError
            The current stream is being captured into a CUDA graph.
        CompileError
            NVRTC refused a kernel.

        Notes
        -----
        Computed in float32 and rounded once, by the kernel that writes to caches: the bits are
        those of `KVCache.append`. Tokens whose positions in a CuPy array are beyond the tables are
        not rotated. The gradient is a rotation by the negative angle: `apply` of
        ``Rotary(cos, -sin)``.

        For packed sequences, (total, h, d) as in `cufa.attention_varlen`, call
        ``rotary.apply(x[None], positions[None], layout="bshd")[0]``.

        Examples
        --------
        >>> import numpy as np, cufa
        >>> rotary = cufa.Rotary.of_theta(10000.0, 64, 1000)
        >>> q = np.ones((2, 8, 7, 64), np.float32)
        >>> rotary.apply(q, 0).shape
        (2, 8, 7, 64)
        >>> rotary.apply(q, np.array([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3]])).dtype
        dtype('float32')
        """
        check_layout(layout)
        xp = module_of_all({"the rotary": self.cos, "x": x})
        given: Array = np.asarray(x) if xp is np else x
        check_dtype("x", given)
        if not 2 <= given.ndim <= 4:
            raise ValueError(f"x has shape {given.shape}: 2 to 4 axes are needed")
        view = as_bhsd(given, layout)
        batch, _, seq, head_dim = view.shape
        if self.dim > head_dim:
            raise ValueError(
                f"x has shape {given.shape}: the rotary turns {self.dim} elements, but head_dim is "
                f"{head_dim}"
            )
        places = self._places(positions, batch, seq, xp)
        check_devices({"x": given, "the rotary": self.cos}, xp)
        if xp is not np:
            launch.refuse_capture()
        out: Array = xp.empty(given.shape, given.dtype)
        turned = as_bhsd(out, layout)
        if xp is np:
            turned[...] = cpu.turned(view, places, self)
        elif out.size:
            launch.turn(view, turned, places, self)
        return out

    def _places(self, positions: int | np.integer | Array, batch: int, seq: int, xp: Any) -> Array:
        """Return the position of each token, (batch, seq), on the host or the device."""
        if isinstance(positions, (int, np.integer)) and not isinstance(positions, bool):
            if not 0 <= positions <= self.positions - seq:
                raise ValueError(
                    f"positions is {positions}: the last of {seq} tokens would be at position "
                    f"{int(positions) + seq - 1}, but the rotary has positions 0 to "
                    f"{self.positions - 1}"
                )
            row = int(positions) + np.arange(seq)
            return np.broadcast_to(row, (batch, seq))
        module = module_of("positions", positions)
        if module is not np and xp is np:
            raise TypeError(
                "positions is a cupy array, but x is a numpy array: give it on the host"
            )
        shape = (seq,) if positions.ndim == 1 else (batch, seq)
        check_integers("positions", positions, shape, xp)
        if module is np:
            bad = np.argwhere((positions < 0) | (positions >= self.positions))
            if bad.size:
                at = tuple(int(i) for i in bad[0])
                raise ValueError(
                    f"positions{list(at)} is {positions[at]}: the rotary has positions 0 to "
                    f"{self.positions - 1}"
                )
        return module.broadcast_to(positions, (batch, seq))


def _number(name: str, value: object) -> float:
    """Return a finite real number as a float."""
    number = check_real(name, value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    return number


def _numbers(name: str, values: Any) -> np.ndarray:
    """Return finite real numbers on the host as float64."""
    check_unmasked(name, values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # a CuPy array, or lists of unequal lengths
        raise TypeError(
            f"{name} must be a NumPy array or a number, not {type(values).__name__}"
        ) from None
    check_real_dtype(name, array.dtype)
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite")
    return array
