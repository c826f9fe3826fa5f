"""Variant: one template instantiation of one kernel."""

from __future__ import annotations

import re
from typing import NamedTuple

from cufa.device import Device
from cufa.kernel import KERNELS, NUMBERS
from cufa.problem import MAX_HEAD_DIM

_CPP_TYPE = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float"}
_PRINTED = re.compile(
    r"\s*(\w+)\s*<\s*(\w+)((?:\s*,\s*[0-9]+)+)(?:\s*,\s*(true|false))?"
    r"\s*,\s*Score\s*<\s*(Causal)?\s*>\s*,\s*Dense\s*>\s*"
)
_EXAMPLE = "fa2_mma<bfloat16, 128, 128, 128, 64, 2, 4, 2, Score<Causal>, Dense>"

MAX_TILE = 256
"""Rows and columns of a tile at most: lengths are rounded up to it in 32 bits."""


def _has_ping_pong(kernel: str) -> bool:
    return kernel in KERNELS and "ping_pong" in KERNELS[kernel].arguments


class Variant(NamedTuple):
    """One template instantiation; the fields after ``kernel`` are its template arguments, in order.

    Attributes
    ----------
    kernel : str
        A key of `cufa.kernel.KERNELS`.
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
    causal : bool
        Whether the causal mask is compiled in.
    ping_pong : bool
        fa3_wgmma only: whether the warpgroups take turns with the tensor cores.
    """

    kernel: str
    dtype: str
    head_dim: int
    head_dim_v: int
    bm: int
    bn: int
    stages: int
    warps: int
    blocks_per_sm: int
    causal: bool
    ping_pong: bool = False

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read the printed form.

        Parameters
        ----------
        text : str
            Such as "fa2_mma<bfloat16, 128, 128, 128, 64, 2, 4, 2, Score<>, Dense>". Spaces do not
            matter. The variant need not be legal on any device.

        Returns
        -------
        Variant

        Raises
        ------
        TypeError
            `text` is no string.
        ValueError
            It is of another form, or names an unknown kernel or type.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, not {type(text).__name__}")
        match = _PRINTED.fullmatch(text)
        numbers = [int(n) for n in re.findall("[0-9]+", match[3])] if match else []
        if match is None or len(numbers) != 7 or (match[4] is None) == _has_ping_pong(match[1]):
            arguments = ", ".join(cls._fields[1:])
            raise ValueError(
                f"a variant looks like {_EXAMPLE} (kernel<{arguments}>, ping_pong in fa3_wgmma "
                f"only, before the score), not {text!r}"
            )
        kernel, cpp_type = match[1], match[2]
        if kernel not in KERNELS:
            known = ", ".join(KERNELS)
            raise ValueError(f"{text!r}: kernel must be one of {known}, not {kernel!r}")
        dtypes = {cpp: dtype for dtype, cpp in _CPP_TYPE.items()}
        if cpp_type not in dtypes:
            known = ", ".join(dtypes)
            raise ValueError(f"{text!r}: the element type must be one of {known}, not {cpp_type!r}")
        flags = (match[5] is not None, match[4] == "true")
        return cls._make([kernel, dtypes[cpp_type], *numbers, *flags])

    @property
    def name_expression(self) -> str:
        """The C++ name of the instantiation."""
        arguments = [str(int(x)) for x in self[2:9]]
        if _has_ping_pong(self.kernel):
            arguments.append(str(self.ping_pong).lower())
        arguments += [f"Score<{'Causal' if self.causal else ''}>", "Dense"]
        return f"{self.kernel}<{_CPP_TYPE[self.dtype]}, {', '.join(arguments)}>"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return KERNELS[self.kernel].smem_bytes(self)

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
        v, kernel = self, KERNELS.get(self.kernel)
        if kernel is None:
            return f"kernel must be one of {', '.join(KERNELS)}, not {v.kernel!r}"
        if v.dtype not in kernel.dtypes:
            return f"{v.kernel} takes {' or '.join(kernel.dtypes)}, not {v.dtype}"
        if v.ping_pong and "ping_pong" not in kernel.arguments:
            return f"{v.kernel} has no ping_pong"
        if not all(isinstance(n, int) and n > 0 for n in (getattr(v, name) for name in NUMBERS)):
            return "template arguments must be positive integers"
        if v.head_dim > MAX_HEAD_DIM or v.head_dim_v > MAX_HEAD_DIM:
            return f"head dims of more than {MAX_HEAD_DIM} are not supported"
        if v.head_dim % kernel.head_dim_step or v.head_dim_v % kernel.head_dim_step:
            return f"{v.kernel} needs head dims that are multiples of {kernel.head_dim_step}"
        if v.bm > MAX_TILE or v.bn > MAX_TILE:
            return f"bm and bn of more than {MAX_TILE} are not supported"
        if not kernel.runs_on(device):
            return f"{v.kernel} is for {' and '.join(kernel.archs or ())}, not for {device.arch}"
        complaint = kernel.complaint(v, device)
        if complaint is not None:
            return complaint
        if v.threads * v.blocks_per_sm > device.threads_per_sm or v.threads > 1024:
            return f"{v.blocks_per_sm} blocks of {v.threads} threads do not fit a multiprocessor"
        if v.smem_bytes > device.smem_per_block:
            needs = f"{v.smem_bytes} bytes of shared memory are needed"
            return f"{needs}, {device.name} has {device.smem_per_block}"
        registers = kernel.launch_registers(v) if kernel.launch_registers else None
        if registers is not None and registers < max(v.bn, v.head_dim_v) // 2 + 30:
            return f"{registers} registers a thread at launch are too few for wgmma of this width"
        return None

    def __str__(self) -> str:
        """Return the C++ name expression."""
        return self.name_expression
