"""Attention in 8 bits: the kernel alone and with its quantization, and peers, by graph replay."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import cupy

import cufa
from benchmarks import graphs
from benchmarks.accuracy import rms_errors
from benchmarks.cells import Cell
from benchmarks.contestants import CUFA, Contestants, columns, rounded, rows_of
from benchmarks.inputs import Operands
from benchmarks.peers import PEERS, Maker, cufa_call, flash_attn_3_interface
from benchmarks.race import Budget
from cufa.explorer.clock import Call, Clock
from cufa.planner.fp8 import Fp8Plan
from cufa.specs.template_arguments import TemplateArguments

_FROM_16_BITS, _QUANTIZE, _COPY = "from_16_bits", "quantize", "copy"


def _flash_attn_3(operands: Operands) -> Call:
    """Return FlashAttention-3 on arrays that are rounded to 8 bits with scales of 1."""
    import torch

    function = flash_attn_3_interface().flash_attn_func
    cell = operands.cell
    q, k, v = (x.transpose(1, 2).contiguous().to(torch.float8_e4m3fn) for x in operands.torch())
    scale = torch.ones((cell.b, cell.hk), device="cuda")
    scales = {f"{name}_descale": scale for name in "qkv"}

    def call() -> Any:
        out = function(q, k, v, causal=cell.causal, **scales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


MAKERS: dict[str, Maker] = {
    "fa3_fp8": _flash_attn_3,
    "cudnn_bf16": PEERS["cudnn"],
    "cufa_bf16": functools.partial(cufa_call, kernel=None),
}
"""The peers, by name: FlashAttention-3 in 8 bits, and bfloat16 by cuDNN and by cufa."""


def quantized(operands: Operands) -> tuple[cufa.Quantized, cufa.Quantized, cufa.Quantized]:
    """Return q, k and v as ``precision="fp8"`` quantizes them."""
    return cufa.quantize_qkv(operands.q, operands.k, operands.v)


class EightBits(Contestants):
    """cufa in 8 bits, on arrays that are quantized before the call, and its peers.

    Parameters
    ----------
    peers : iterable of str
        Keys of `MAKERS`.

    Attributes
    ----------
    rmse : dict
        The root mean square of each contestant's errors in the latest cell.
    """

    def __init__(self, peers: Iterable[str]) -> None:
        super().__init__(None, peers, MAKERS)
        self.rmse: dict[str, float] = {}

    def ours(self, operands: Any) -> Call:
        """Return cufa's call on operands."""
        arrays, cell = quantized(operands), operands.cell
        return lambda: cufa.attention(*arrays, causal=cell.causal, out_dtype=operands.q.dtype)

    def planned(self, operands: Any) -> TemplateArguments:
        """Return what it runs."""
        q, k, v = operands.q, operands.k, operands.v
        plan = cufa.explain(q, k, v, causal=operands.cell.causal, precision="fp8")
        return cast(TemplateArguments, cast(Fp8Plan, plan).variant)

    def errors(self, operands: Any, results: dict[str, Any]) -> dict[str, float]:
        """Return the largest error of each result."""
        arrays = operands.q, operands.k, operands.v
        self.rmse = rms_errors(cupy, operands.cell, arrays, results)
        return super().errors(operands, results)


def rows(
    contestants: EightBits, cells: Iterable[Cell], clock: Clock, budget: Budget, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a result row a cell that cufa can run, and print a line for each.

    ``from_16_bits`` is the speed with the quantization of q, k and v. ``quantize_gbs`` is that of
    the quantization alone: bytes that are read and written in a second. ``copy_gbs`` is that of a
    copy of as many bytes, which takes turns with the others.
    """
    rng = cupy.random.default_rng(seed)

    def row_of(cell: Cell) -> dict[str, Any] | None:
        operands = Operands(cell, rng)
        ready = contestants.ready(operands)
        if ready is None:
            return None
        own = {
            _FROM_16_BITS: _from_16_bits(operands),
            _QUANTIZE: lambda: quantized(operands)[0].values,
            _COPY: _copy(copied_bytes(cell)),
        }
        ms, replayed = graphs.medians({**ready.calls, **own}, clock, budget, "graph")
        speeds = {name: cell.tflops(each) for name, each in ms.items()}
        from_16_bits = speeds.pop(_FROM_16_BITS)
        moved = {_QUANTIZE: moved_bytes(cell), _COPY: 2 * copied_bytes(cell)}
        gbs = {f"{name}_gbs": rounded(x / ms[name] / 1e6, 5) for name, x in moved.items()}
        for name in moved:
            del speeds[name]
        return {
            **ready.row(speeds, [name for name in replayed if name in speeds]),
            "s": cell.sq,
            "rmse": rounded(contestants.rmse[CUFA], 4),
            "max_error": rounded(ready.errors[CUFA], 4),
            **columns({name: rounded(x, 4) for name, x in contestants.rmse.items()}, "_rmse"),
            _FROM_16_BITS: rounded(from_16_bits, 5),
            **gbs,
        }

    return rows_of(cells, row_of)


def moved_bytes(cell: Cell) -> int:
    """Return the bytes of q, k and v in 16 bits, in 8, and of their scales."""
    rows = cell.b * (cell.hq * cell.sq + cell.hk * cell.sk)
    elements = rows * cell.d + cell.b * cell.hk * cell.sk * cell.dv
    blocks = cell.b * (cell.hq * -(-cell.sq // 128) + 2 * cell.hk * -(-cell.sk // 128))
    return 3 * elements + 4 * blocks


def copied_bytes(cell: Cell) -> int:
    """Return about half of `moved_bytes`: whole pieces of 1 MiB, which the driver copies fast."""
    return -(-moved_bytes(cell) >> 21) << 20


def _copy(nbytes: int) -> Call:
    """Return what copies bytes within the GPU's memory."""
    source, copied = (cupy.zeros(nbytes, cupy.uint8) for _ in range(2))

    def call() -> Any:
        copied[...] = source
        return copied

    return call


def _from_16_bits(operands: Operands) -> Call:
    cell = operands.cell
    return lambda: cufa.attention(
        *quantized(operands), causal=cell.causal, out_dtype=operands.q.dtype
    )
