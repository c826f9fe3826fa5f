"""Variant: one template instantiation of one kernel, of attention, its gradients or in 8 bits."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.parts import PARTS, kind_of, part_named
from cufa.specs import BACKWARD_KERNELS, FP8_KERNELS, KERNELS
from cufa.specs.kernel_spec import KernelSpec
from cufa.specs.template_arguments import NUMBERS, TemplateArguments

_DTYPE = {row.cpp: row.name for row in DTYPES.values()}
_SPACES = re.compile(r"\s*([<>,])\s*")
_PRINTED = re.compile(
    r"(\w+)<(\w+)((?:,(?:[0-9]+|true|false))+)(?:,([A-Z]\w*))?,Score<((?:\w+,)*\w+)?>,"
    r"(\w+(?:<\w+>)?)>"
)
_EXAMPLE = "fa2_mma<bfloat16, 128, 128, 128, 64, 2, 4, 2, Score<Causal>, Dense>"


def _check_known(text: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{text!r}: {what} must be one of {', '.join(known)}, not {name!r}")


def _check_part(text: str, part: str) -> None:
    if kind_of(part) == part:
        _check_known(text, "a part of the score", part, PARTS)
        return
    try:
        part_named(part)
    except KeyError:
        raise ValueError(
            f"{text!r}: {part} is unknown in this process: a call with its expression makes it"
        ) from None


def _value(text: str) -> int:
    return text == "true" if text in ("true", "false") else int(text)


class Variant(TemplateArguments):
    """One template instantiation, its arguments by name.

    The arguments between the type and the score are the kernel's `cufa.specs.spec.Spec.arguments`.

    Attributes
    ----------
    kernel : str
        A key of `cufa.specs.KERNELS`.
    dtype : str
        Element type of Q, K, V and O.
    head_dim, head_dim_v : int
        Columns of the Q/K and of the V/O tiles, at least the problem's head dims.
    bm, bn : int
        Rows (queries) and columns (keys) of a tile of scores.
    stages : int
        Depth of the K/V ring in shared memory.
    warps : int
        Warps of a block, which share its rows evenly.
    blocks_per_sm : int
        Blocks that must fit on a multiprocessor together; it bounds the registers of a thread.
    ping_pong : bool
        Whether the warpgroups take turns with the tensor cores; for kernels that can.
    unified : bool
        Whether the softmax has a preset maximum; for kernels that can.
    whole : bool
        Whether a block reads all keys of a sequence and K/V head, which are never split; for
        kernels that can.
    schedule : str
        One of the kernel's schedules, if it has more than one; "" for the one that the kernel's
        spec names.
    score : tuple of str
        The parts of the score that are compiled in, such as "Causal", see
        `cufa.features.parts.PARTS`. A part that was made from a caller's function is known only in
        the process that made it.
    kv : str
        How K and V are stored, such as "Dense" or "Paged".
    """

    __slots__ = ()
    _KERNELS: ClassVar[Mapping[str, KernelSpec]] = KERNELS

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read the printed form.

        Parameters
        ----------
        text : str
            Such as "fa2_mma<bfloat16, 128, 128, 128, 64, 2, 4, 2, Score<>, Dense>". Spaces do not
            matter. The schedule of a kernel that has several can be left out. The variant need not
            be legal on any device.

        Returns
        -------
        Variant
            A `BackwardVariant` or `Fp8Variant` for a kernel of gradients or of 8 bits.

        Raises
        ------
        TypeError
            `text` is no string.
        ValueError
            It is of another form, or names an unknown kernel, type or part of a score, such as one
            that another process has made of an expression.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, not {type(text).__name__}")
        match = _PRINTED.fullmatch(_SPACES.sub(r"\1", text.strip()))
        if match is None:
            raise ValueError(f"a variant looks like {_EXAMPLE}, not {text!r}")
        name, cpp_type, arguments, schedule, score, cpp_kv = match.groups()
        parts = tuple(score.split(",")) if score else ()
        classes = {name: each for each in (cls, *cls.__subclasses__()) for name in each._KERNELS}
        _check_known(text, "kernel", name, classes)
        _check_known(text, "the element type", cpp_type, _DTYPE)
        for part in parts:
            _check_part(text, part)
        spec = classes[name]._KERNELS[name]
        fields = spec.arguments
        values = [_value(each) for each in arguments[1:].split(",")]
        if [type(value) is bool for value in values] != [field not in NUMBERS for field in fields]:
            order = ("schedule",) if spec.schedules else ()
            takes = ", ".join(("type", *fields, *order, "score", "kv"))
            raise ValueError(f"{text!r}: {name} takes the arguments {takes}")
        by_name: dict[str, Any] = dict(zip(fields, values, strict=True))
        by_name |= spec.derived(by_name["bm"])
        kv = cpp_kv.rstrip(">").rpartition("<")[2]
        variant = classes[name](name, _DTYPE[cpp_type], **by_name, score=parts, kv=kv)
        if cpp_kv != variant.cpp_kv:
            raise ValueError(f"{text!r}: {name} has its kv as {variant.cpp_kv}, not {cpp_kv}")
        known = " or ".join(spec.schedules)
        if schedule in (None, variant.named_schedule):
            return variant
        if not known:
            raise ValueError(f"{text!r}: {name} has no schedules: leave {schedule!r} out")
        if schedule not in spec.schedules:
            raise ValueError(f"{text!r}: the schedule of {name} must be {known}, not {schedule!r}")
        return variant._replace(schedule=schedule)

    @property
    def spec(self) -> KernelSpec:
        """The kernel's spec; KeyError if there is no such kernel."""
        return self._KERNELS[self.kernel]

    @property
    def name_expression(self) -> str:
        """The C++ name of the instantiation."""
        values = [getattr(self, name) for name in self.spec.arguments]
        texts = [str(x).lower() if isinstance(x, bool) else str(int(x)) for x in values]
        if self.named_schedule:
            texts.append(self.named_schedule)
        score = f"Score<{', '.join(self.score)}>"
        return f"{self.kernel}<{', '.join((DTYPES[self.dtype].cpp, *texts, score, self.cpp_kv))}>"

    @property
    def cpp_kv(self) -> str:
        """The C++ name of the way of finding K and V."""
        return self.kv

    @property
    def named_schedule(self) -> str:
        """The schedule that is asked for, else the one that the spec names; "" if it has one."""
        choose = self.spec.schedule
        return self.schedule or (choose(self) if choose else "")

    @property
    def is_dependent(self) -> bool:
        """Whether it is launched as `cufa.compiler.dependent` says."""
        return self.spec.is_dependent

    @property
    def launch_registers(self) -> int | None:
        """A thread's registers at launch, if its warps hand registers on to each other."""
        counted = self.spec.launch_registers
        return counted and counted(self)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return self.spec.smem_bytes(self)

    @property
    def parameter(self) -> np.dtype:
        """Layout of what a launch passes by value."""
        return KERNELS[self.kernel].parameter(self)

    def illegal(self, device: Device) -> str | None:
        """Say why this variant cannot run on a device.

        Parameters
        ----------
        device : cufa.device.Device

        Returns
        -------
        str or None
            The first reason that is found; None if it can run.
        """
        if self.kernel not in self._KERNELS:
            return f"kernel must be one of {', '.join(self._KERNELS)}, not {self.kernel!r}"
        return self.spec.illegal(self, device)

    def __str__(self) -> str:
        """Return the C++ name expression."""
        return self.name_expression


class BackwardVariant(Variant):
    """One template instantiation of a kernel in `cufa.specs.BACKWARD_KERNELS`."""

    __slots__ = ()
    _KERNELS = BACKWARD_KERNELS


class Fp8Variant(Variant):
    """One template instantiation of a kernel in `cufa.specs.FP8_KERNELS`."""

    __slots__ = ()
    _KERNELS = FP8_KERNELS

    @property
    def cpp_kv(self) -> str:
        """The C++ name of the way of finding Q, K and V."""
        return f"Quantized<{self.kv}>"
