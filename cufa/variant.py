"""Variant: one template instantiation of one kernel."""

from __future__ import annotations

import re
from typing import NamedTuple

from cufa.device import Device

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_CPP_TYPE = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float"}

KERNEL_DTYPES = {
    "fa1_fp32": ("float32",),
    "fa2_fp32": ("float32",),
    "fa2_mma": ("float16", "bfloat16"),
    "fa3_wgmma": ("float16", "bfloat16"),
}
"""The kernels, each a file of ``cufa/kernels``, and the element types that each takes."""

_FLAG = r"\s*,\s*(true|false)"
_PRINTED = re.compile(rf"\s*(\w+)\s*<\s*(\w+)((?:\s*,\s*[0-9]+)+){_FLAG}(?:{_FLAG})?\s*>\s*")
_EXAMPLE = "fa2_mma<bfloat16, 128, 128, 128, 64, 2, 4, 2, false>"

WGMMA_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
"""The N of wgmma that ``kernels/ptx_sm90.cuh`` has."""

MAX_TILE = 256
"""Rows and columns of a tile at most: lengths are rounded up to it in 32 bits."""


def panel_columns(columns: int) -> int:
    """Columns of a panel of a 16-bit tile in shared memory, see ``kernels/tile.cuh``."""
    return next((n for n in (64, 32) if columns % n == 0), 16)


class Variant(NamedTuple):
    """One template instantiation; the fields after ``kernel`` are its template arguments, in order.

    Attributes
    ----------
    kernel : str
        A key of `KERNEL_DTYPES`.
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
        """Read the printed form, such as "fa2_mma<bfloat16, 128, 128, 128, 64, 2, 4, 2, false>".

        Parameters
        ----------
        text : str
            Spaces do not matter. The variant need not be legal on any device.

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
        if match is None or len(numbers) != 7 or (match[5] is None) == (match[1] == "fa3_wgmma"):
            arguments = ", ".join(cls._fields[1:])
            raise ValueError(
                f"a variant looks like {_EXAMPLE} (kernel<{arguments}>, the last in fa3_wgmma "
                f"only), not {text!r}"
            )
        kernel, cpp_type = match[1], match[2]
        if kernel not in KERNEL_DTYPES:
            known = ", ".join(KERNEL_DTYPES)
            raise ValueError(f"{text!r}: kernel must be one of {known}, not {kernel!r}")
        dtypes = {cpp: dtype for dtype, cpp in _CPP_TYPE.items()}
        if cpp_type not in dtypes:
            known = ", ".join(dtypes)
            raise ValueError(f"{text!r}: the element type must be one of {known}, not {cpp_type!r}")
        flags = (match[4] == "true", match[5] == "true")
        return cls._make([kernel, dtypes[cpp_type], *numbers, *flags])

    @property
    def name_expression(self) -> str:
        """The C++ name of the instantiation."""
        flags = self[9:] if self.kernel == "fa3_wgmma" else self[9:10]
        arguments = [str(int(x)) for x in self[2:9]] + [str(flag).lower() for flag in flags]
        return f"{self.kernel}<{_CPP_TYPE[self.dtype]}, {', '.join(arguments)}>"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def _row_warps(self) -> int:
        """Warps that share the rows; in fa2_fp32 two share the columns of a wide output."""
        return self.warps // (2 if self.kernel == "fa2_fp32" and self.head_dim_v > 160 else 1)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        size = ELEMENT_BYTES[self.dtype]
        q, k, v = self.bm * self.head_dim, self.bn * self.head_dim, self.bn * self.head_dim_v
        if self.kernel == "fa1_fp32":
            return size * (q + k + v + 4 * (self.bm + self.bn) + self.bm * (self.bn + 4))
        if self.kernel == "fa3_wgmma":
            return self._fa3_smem_bytes
        tiles = size * (q + self.stages * (k + v))
        o_tile = size * self.bm * self.head_dim_v if self.kernel == "fa2_mma" else 0
        mask_from = 4 * self.warps
        return max(tiles + mask_from, o_tile)

    @property
    def _fa3_smem_bytes(self) -> int:
        """As fa3_wgmma.cu lays it out: up to three slots of Q and O, rings of K and V, barriers."""
        slot = 2 * self.bm * max(self.head_dim, self.head_dim_v)
        rings = 2 * self.stages * self.bn * (self.head_dim + self.head_dim_v)
        room = 227 * 1024 // self.blocks_per_sm - 1024 - rings
        slots = max(1, min(3, room // slot))
        return rings + slots * (slot + 16) + 32 * self.stages + 16 * max(2, slots)

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
        if self.kernel not in KERNEL_DTYPES:
            return f"kernel must be one of {', '.join(KERNEL_DTYPES)}, not {self.kernel!r}"
        if self.dtype not in KERNEL_DTYPES[self.kernel]:
            return (
                f"{self.kernel} takes {' or '.join(KERNEL_DTYPES[self.kernel])}, not {self.dtype}"
            )
        if self.ping_pong and self.kernel != "fa3_wgmma":
            return f"{self.kernel} has no ping_pong"
        if not all(isinstance(n, int) and n > 0 for n in self[2:9]):
            return "template arguments must be positive integers"
        if self.head_dim > 256 or self.head_dim_v > 256:
            return "head dims of more than 256 are not supported"
        step = 32 if self.kernel == "fa2_fp32" else 16
        if self.head_dim % step or self.head_dim_v % step:
            return f"{self.kernel} needs head dims that are multiples of {step}"
        if self.kernel == "fa2_fp32" and self.head_dim_v > 160 and self.head_dim_v % 64:
            return "fa2_fp32 splits a head_dim_v of more than 160: it must be multiples of 64"
        if self.bm > MAX_TILE or self.bn > MAX_TILE:
            return f"bm and bn of more than {MAX_TILE} are not supported"
        if self.kernel == "fa3_wgmma":
            complaint = self._illegal_fa3(device)
            if complaint is not None:
                return complaint
        elif self.kernel == "fa1_fp32":
            if self.stages != 1:
                return "fa1_fp32 has a single stage"
            if self.bm % (2 * self.warps) or self.bn % 16:
                return "bm must be a multiple of 2 * warps, and bn of 16"
        elif self.warps % 2:
            return "warps must be even: a thread copies rows in steps of 8"
        elif self.bm % (16 * self._row_warps) or self.bn % 16:
            return f"bm must be a multiple of {16 * self._row_warps}, and bn of 16"
        if self.threads * self.blocks_per_sm > device.threads_per_sm or self.threads > 1024:
            return (
                f"{self.blocks_per_sm} blocks of {self.threads} threads do not fit a multiprocessor"
            )
        if self.smem_bytes > device.smem_per_block:
            needs = f"{self.smem_bytes} bytes of shared memory are needed"
            return f"{needs}, {device.name} has {device.smem_per_block}"
        registers = device.registers_per_sm // (self.threads * self.blocks_per_sm) // 8 * 8
        if self.kernel == "fa3_wgmma" and registers < max(self.bn, self.head_dim_v) // 2 + 30:
            return f"{registers} registers a thread at launch are too few for wgmma of this width"
        return None

    def _illegal_fa3(self, device: Device) -> str | None:
        if device.arch != "sm_90a":
            return f"fa3_wgmma is for sm_90a, not for {device.arch}"
        if self.bm % 64 or self.warps != self.bm // 16 + 4:
            return "bm must be a multiple of 64, and warps bm / 16 + 4: a producer's 4 beside"
        for name in ("bn", "head_dim_v"):
            if getattr(self, name) not in WGMMA_WIDTHS:
                return f"{name} must be one of {', '.join(map(str, WGMMA_WIDTHS))} in fa3_wgmma"
        if panel_columns(self.head_dim) != panel_columns(self.head_dim_v):
            return "head_dim and head_dim_v must be swizzled alike, as multiples of 64, 32 or 16"
        skipped = -(-(self.bm - 64) // self.bn) if self.causal else 0
        if skipped > self.stages:  # it may hold a V meanwhile
            return f"a warpgroup skips {skipped} masked tiles of keys: as many stages are needed"
        if self.ping_pong and self.bm == 64:
            return "ping_pong needs two warpgroups, bm of 128 or more"
        return None

    def __str__(self) -> str:
        """Return the C++ name expression."""
        return self.name_expression
