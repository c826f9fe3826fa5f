"""Words of the command line -> values; what cannot be one is an `argparse.ArgumentTypeError`."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from cufa import device as devices
from cufa import optional
from cufa.features.part import Part
from cufa.features.parts import PARTS
from cufa.features.user_functions import BLOCKS
from cufa.specs import ATTENTION_KERNELS, KERNELS
from cufa.specs.template_arguments import NUMBERS
from cufa.specs.variant import Variant

Shape = tuple[int, ...]
Shapes = tuple[Shape, Shape, Shape]
"""Shapes of q, k and v."""

_ARGUMENTS = (*NUMBERS, "ping_pong")


def shapes_of(q: Shape, k: Shape | None = None, v: Shape | None = None) -> Shapes:
    """Return three shapes; K is like Q, and V like K, where left out."""
    return q, k or q, v or k or q


def _positive(text: str) -> Shape:
    """Return positive integers that have commas between them; nothing if one is none."""
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        return ()
    return numbers if min(numbers) > 0 else ()


def shape(text: str) -> Shape:
    """Return four positive sizes: ``4,32,4096,128``."""
    sizes = _positive(text)
    if len(sizes) != 4:
        raise ArgumentTypeError(
            f"{text!r} is no shape: four positive sizes batch,heads,seq,head_dim are needed, "
            "such as 4,32,4096,128"
        )
    return sizes


def value(read: Callable[[str], object]) -> Callable[[str], object]:
    """Return a function that reads a value as `read` does, and whose errors argparse shows."""

    def checked(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    return checked


def known_arrays() -> dict[str, Part]:
    """Return the parts that read an array of the caller's, by what `array_dtype` takes."""
    parts = (part for part in PARTS.values() if part.axes and part.name != BLOCKS)
    return {f"{part.argument}:{part.dtype}": part for part in parts}


def array_dtype(text: str) -> Part:
    """Return the part that reads an array next to q, k and v: ``sinks``, ``bias:bfloat16``."""
    known = known_arrays()
    parts = [part for name, part in known.items() if text in (name, part.argument)]
    if len(parts) != 1:
        raise ArgumentTypeError(
            f"{text!r} is none of {', '.join(known)}; a lone dtype may be left out"
        )
    return parts[0]


def shapes(text: str) -> Shapes:
    """Return shapes of q, k and v from ``Q``, ``Q:K`` or ``Q:K:V``, those left out as before."""
    words = text.split(":")
    if len(words) > 3:
        raise ArgumentTypeError(f"{text!r} has more than the three shapes Q:K:V")
    return shapes_of(*map(shape, words))


def count(text: str) -> int:
    """Return a positive integer."""
    numbers = _positive(text)
    if len(numbers) != 1:
        raise ArgumentTypeError(f"{text!r} is no positive integer")
    return numbers[0]


def _gpu(name: str) -> devices.Device:
    try:
        return devices.named(name)
    except ValueError as error:
        raise ValueError(f"{error}; for others, --arch names the architecture: sm_86") from None


gpu, architecture, variant = map(value, (_gpu, devices.of_arch, Variant.parse))
"""Return a GPU by its name, a typical GPU of an architecture, a variant from its printed form."""


def kernel(text: str) -> str:
    """Return the name of a kernel of `attention`."""
    if text not in ATTENTION_KERNELS:
        hint = ": it is for cufa.decode" if text in KERNELS else ""
        known = ", ".join(ATTENTION_KERNELS)
        raise ArgumentTypeError(f"{text!r} is none of the kernels {known}{hint}")
    return text


def truth(text: str) -> bool:
    """Return what ``true`` or ``false`` says."""
    if text not in ("true", "false"):
        raise ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def axis(text: str) -> tuple[str, list[int]]:
    """Return a template argument and its values: ``bm=64,128``."""
    name, equals, values = text.partition("=")
    if name not in _ARGUMENTS:
        raise ArgumentTypeError(
            f"{text!r} names none of the template arguments {', '.join(_ARGUMENTS)}"
        )
    if not equals:
        raise ArgumentTypeError(f"{text!r} has no values: {name}=64,128 would have two")
    read = count if name in NUMBERS else truth
    return name, [read(word) for word in values.split(",")]


def output(text: str) -> Path:
    """Return a path to write to, checked now so that no work is lost for it later."""
    path = Path(text)
    exists = os.path.exists(path)  # which raises nothing, as `Path.exists` does
    if exists and not os.path.isfile(path):
        raise ArgumentTypeError(f"{text!r} is no regular file")
    if not os.path.isdir(path.parent):
        raise ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    if not os.access(path if exists else path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text!r} cannot be written")
    return path


def picture(text: str) -> Path:
    """Return a path to write a figure to; matplotlib must be there and know its kind."""
    path = output(text)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        how = optional.install("explore")
        raise ArgumentTypeError(f"matplotlib is needed: {how}") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ArgumentTypeError(f"{text!r} must end in one of {', '.join(sorted(kinds))}")
    return path
