"""The parts that scores are made of: what becomes of Q K^T before the softmax.

A part is a struct, see ``kernels/part.cuh``, and an entry of `PARTS`, or one that was made of a
caller's own expression, see `cufa.features.expression`; `Problem.score` says which ones a call has.
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
    source : str
        Of the struct, if it was made of a caller's own expression.
    arrays : tuple of int
        Numbers of axes of the arrays that such a one reads.
    tilts : bool
        Whether what such a one adds grows evenly from key to key, see ``kernels/tilt.cuh``.
    """

    name: str
    argument: str
    parameters: tuple[Parameter, ...] = ()
    left_edge: bool = False
    right_edge: bool = False
    axes: str = ""
    dtype: str = ""
    source: str = ""
    arrays: tuple[int, ...] = ()
    tilts: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The names of those of `numbers` that are addresses of arrays."""
        if self.axes:
            return (f"{self.argument}_data",)
        return tuple(f"{self.argument}_{i}_data" for i in range(len(self.arrays)))

    @property
    def numbers(self) -> tuple[Parameter, ...]:
        """The members of the struct, in order: its parameters; address and strides of its array.

        Or of each of several, with the lengths.
        """
        found = list(self.parameters)
        if self.axes:
            found.append(Parameter(f"{self.argument}_data", "u8"))
            found += (Parameter(f"{self.argument}_stride_{axis}", "i8") for axis in self.axes)
        for address, ndim in zip(self.addresses, self.arrays, strict=False):
            array = address.removesuffix("_data")
            found.append(Parameter(address, "u8"))
            found += (Parameter(f"{array}_stride_{axis}", "i8") for axis in range(ndim))
            found += (Parameter(f"{array}_length_{axis}", "i4") for axis in range(ndim))
        return tuple(found)


_DROPOUT = (
    Parameter("dropout_seed", "u8"),
    Parameter("dropout_threshold", "u4"),
    Parameter("dropout_keep", "f4"),
)
_SOFTCAP = Parameter("softcap_log2", "f4"), Parameter("softcap_inverse", "f4")
_CURVE = tuple(Parameter(f"softcap_{name}", "f4") for name in ("root", "middle", "rest", "end"))

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("Softcap", "softcap", (*_SOFTCAP, *_CURVE)),
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
        Part("Blocks", "block_mask", axes="bh", dtype="int32"),
        Part("Dropout", "dropout_p", _DROPOUT),
    )
}
"""The parts, by name; in a score they have this order, and a caller's own come last."""

_own: dict[str, Part] = {}

OWN = {"score_mod": "ScoreMod", "mask_mod": "MaskMod"}
"""What the names of a caller's own parts begin with, by argument."""


def register(part: Part) -> None:
    """Make a part known that was made of a caller's own expression; its name says all of it."""
    _own[part.name] = part


def part_named(name: str) -> Part:
    """Return a part; KeyError if none has this name."""
    return PARTS.get(name) or _own[name]


def kind_of(name: str) -> str:
    """Return the name of a part, or what that of a caller's own begins with."""
    kind = name.partition("_")[0]
    return kind if kind in OWN.values() else name


ARRAYS = tuple(dict.fromkeys(part.argument for part in PARTS.values() if part.axes))
"""The arguments that are arrays which parts read, in order."""

BLOCKS = "Blocks"
"""The part that reads the lists of `cufa.BlockMask`."""

SEED = "dropout_seed"
"""The parameter that each launch is given, as it is given addresses."""


@functools.cache
def edges(score: tuple[str, ...]) -> int:
    """Return how many edges a score has, left and right; with any, rows see different keys."""
    parts = [part_named(name) for name in score]
    return any(part.left_edge for part in parts) + any(part.right_edge for part in parts)


def is_uneven(score: tuple[str, ...]) -> bool:
    """Whether tiles of rows may visit different numbers of keys."""
    return edges(score) > 0 or BLOCKS in score
