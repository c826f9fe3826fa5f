"""The parts that scores are made of: what becomes of Q K^T before the softmax.

A part is a struct of ``kernels/score.cuh`` and an entry of `PARTS`; `Problem.score` says which ones
a call has.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Parameter(NamedTuple):
    """A run-time parameter of a part.

    Attributes
    ----------
    name : str
        Of the struct's member, and of the attribute of a `Problem` that holds its value.
    dtype : str
        As NumPy writes it, such as "i4".
    """

    name: str
    dtype: str


class Part(NamedTuple):
    """A part of a score.

    Attributes
    ----------
    name : str
        Of the struct.
    argument : str
        Of the call, which asks for it.
    parameters : tuple of Parameter
        What a launch appends to ``Params``, in order.
    left_edge, right_edge : bool
        Whether it leaves out keys before the first, or after the last, that a query sees.
    axes : str
        Of the array, the argument itself, that it reads: some of b, h, q and k, of batch, query
        heads, queries and keys. None if it reads no array.
    dtype : str
        Of that array; "float32" and so on.
    """

    name: str
    argument: str
    parameters: tuple[Parameter, ...] = ()
    left_edge: bool = False
    right_edge: bool = False
    axes: str = ""
    dtype: str = ""

    @property
    def numbers(self) -> tuple[Parameter, ...]:
        """The members of the struct, in order: its parameters; address and strides of its array."""
        if not self.axes:
            return self.parameters
        strides = (Parameter(f"{self.argument}_stride_{axis}", "i8") for axis in self.axes)
        return (*self.parameters, Parameter(f"{self.argument}_data", "u8"), *strides)


_DROPOUT = (
    Parameter("dropout_seed", "u8"),
    Parameter("dropout_threshold", "u4"),
    Parameter("dropout_keep", "f4"),
)
_SOFTCAP = Parameter("softcap_log2", "f4"), Parameter("softcap_inverse", "f4")

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("Softcap", "softcap", _SOFTCAP),
        Part("FineSoftcap", "softcap", _SOFTCAP),
        Part("ExactSoftcap", "softcap", _SOFTCAP),
        Part("Alibi", "alibi_slopes", axes="bh", dtype="float32"),
        Part("BiasFloat16", "bias", axes="bhqk", dtype="float16"),
        Part("BiasBfloat16", "bias", axes="bhqk", dtype="bfloat16"),
        Part("BiasFloat32", "bias", axes="bhqk", dtype="float32"),
        Part("Causal", "causal", right_edge=True),
        Part("TopLeft", "causal", right_edge=True),
        Part("WindowLeft", "window", (Parameter("window_left", "i4"),), left_edge=True),
        Part("WindowRight", "window", (Parameter("window_right", "i4"),), right_edge=True),
        Part("Mask", "mask", axes="bhqk", dtype="bool"),
        Part("MaskBits", "mask", axes="bhqk", dtype="uint8"),
        Part("Sinks", "sinks", axes="h", dtype="float32"),
        Part("Dropout", "dropout_p", _DROPOUT),
    )
}
"""The parts, by name; in a score they have this order."""

ARRAYS = tuple(dict.fromkeys(part.argument for part in PARTS.values() if part.axes))
"""The arguments that are arrays which parts read, in order."""

SEED = "dropout_seed"
"""The parameter that each launch is given, as it is given addresses."""

MAX_WINDOW = 2**30
"""A bound of a window that is no bound, and the longest sequences that a window is for."""

SOFTCAPS = {"bfloat16": "Softcap", "float16": "FineSoftcap", "float32": "ExactSoftcap"}
"""That of each dtype: as accurate as its other arithmetic."""


@functools.cache
def edges(score: tuple[str, ...]) -> int:
    """Return how many edges a score has, left and right; with any, rows see different keys."""
    parts = [PARTS[name] for name in score]
    return any(part.left_edge for part in parts) + any(part.right_edge for part in parts)
