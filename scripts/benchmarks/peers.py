"""The contestants of the tables, each found at run time."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any

import cupy

import cufa
from benchmarks import plain
from benchmarks.calls import Chosen
from benchmarks.cells import Cell
from benchmarks.inputs import DTYPES, Operands
from cufa.explorer.clock import Call

_LOWER_RIGHT = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION")
"""The backends of SDPA that PyTorch gives a causal mask aligned at its end."""

Maker = Callable[[Operands], Call]
"""Prepares a contestant for a cell: what a user would do once, outside the timed call."""


def cufa_call(
    operands: Operands, kernel: str | None, package: ModuleType = cufa, **options: Any
) -> Call:
    """Return ``cufa.attention`` on the operands, as users call it, of this package or another."""
    q, k, v = operands.q, operands.k, operands.v
    causal = operands.cell.causal
    return lambda: package.attention(q, k, v, causal=causal, kernel=kernel, **options)


def _cufa_bfloat16(operands: Operands) -> Call:
    """Return ``cufa.attention`` on float16 operands converted to bfloat16 before."""
    cell = operands.cell
    if cell.dtype != "float16":
        raise ValueError(f"it is for float16, not {cell.dtype}")
    q, k, v = (
        # Through float32, as every library converts to and from it.
        x.astype(cupy.float32).astype(DTYPES["bfloat16"])
        for x in (operands.q, operands.k, operands.v)
    )
    return lambda: cufa.attention(q, k, v, causal=cell.causal)


def _check_square(cell: Cell) -> None:
    """Refuse a causal mask of other numbers of queries and keys: it would begin at both's first."""
    if cell.causal and cell.sq != cell.sk:
        raise ValueError("its causal mask ends at the last key for as many queries as keys only")


def _plain_cupy(operands: Operands) -> Call:
    cell = operands.cell
    q, k, v = operands.q, operands.k, operands.v
    return lambda: plain.attention(cupy, q, k, v, causal=cell.causal, scale=cell.scale)


def _sdpa(operands: Operands, backend: str) -> Call:
    """Return PyTorch's SDPA, forced to one backend, without TF32."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_float32_matmul_precision("highest")
    q, k, v = operands.torch()
    options = {**_sdpa_mask(operands.cell, backend), "enable_gqa": _grouped(operands.cell)}
    chosen = getattr(SDPBackend, backend)
    return Chosen(
        lambda: sdpa_kernel(chosen), lambda: scaled_dot_product_attention(q, k, v, **options)
    )


def _sdpa_mask(cell: Cell, backend: str) -> dict[str, Any]:
    """Return the arguments that say the mask: is_causal gives the first query the first key."""
    if not cell.causal or cell.sq == cell.sk or backend not in _LOWER_RIGHT:
        _check_square(cell)
        return {"is_causal": cell.causal}
    from torch.nn.attention.bias import causal_lower_right

    return {"attn_mask": causal_lower_right(cell.sq, cell.sk)}


def _grouped(cell: Cell) -> bool:
    return cell.hq != cell.hk


def _sdpa_math(operands: Operands) -> Call:
    """Return PyTorch's unfused SDPA, where its score matrices fit comfortably."""
    cell = operands.cell
    scores_bytes = 4 * cell.b * cell.hq * cell.sq * cell.sk
    free_bytes, _ = cupy.cuda.runtime.memGetInfo()
    if 3.5 * scores_bytes > free_bytes:
        raise MemoryError("the score matrices do not fit")
    return _sdpa(operands, "MATH")


def _flex(operands: Operands) -> Call:
    import torch
    import torch._dynamo
    from torch.nn.attention.flex_attention import create_block_mask

    # Every cell is a shape of its own; the default limit falls back to eager code.
    for limit in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 512)
    q, k, v = operands.torch()
    cell = operands.cell
    _check_square(cell)
    mask = None
    if cell.causal:
        mask = create_block_mask(_sees, B=None, H=None, Q_LEN=cell.sq, KV_LEN=cell.sk)
    compiled = _compiled_flex()
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=_grouped(cell))


def _sees(b: Any, h: Any, row: Any, column: Any) -> Any:
    return row >= column


@functools.cache
def _compiled_flex() -> Any:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _rows_first(operands: Operands) -> tuple[Any, Any, Any]:
    """Return tensors of (batch, seq, heads, head_dim), the layout these libraries are made for."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in operands.torch())
    return q, k, v


def _flash_attn(operands: Operands, function: Callable[..., Any]) -> Call:
    q, k, v = _rows_first(operands)
    causal = operands.cell.causal

    def call() -> Any:
        out = function(q, k, v, causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def _flash_attn_2(operands: Operands) -> Call:
    from flash_attn import flash_attn_func

    return _flash_attn(operands, flash_attn_func)


def flash_attn_3_interface() -> ModuleType:
    """Return FlashAttention-3, as its own project or a package of its forward pass names it."""
    try:
        return importlib.import_module("flash_attn_interface")
    except ImportError:
        return importlib.import_module("fa3_fwd_interface")


def _flash_attn_3(operands: Operands) -> Call:
    return _flash_attn(operands, flash_attn_3_interface().flash_attn_func)


def _flash_attn_3_cache(operands: Operands) -> Call:
    """Return its decoding, in as many splits as it chooses."""
    return _flash_attn(operands, flash_attn_3_interface().flash_attn_with_kvcache)


def _flash_attn_4(operands: Operands) -> Call:
    from flash_attn.cute import flash_attn_func

    return _flash_attn(operands, flash_attn_func)


def _flashinfer(operands: Operands) -> Call:
    import flashinfer
    import torch

    cell = operands.cell
    q, k, v = (x.flatten(0, 1) for x in _rows_first(operands))
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(cell.b + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        starts * cell.sq,
        starts * cell.sk,
        cell.hq,
        cell.hk,
        cell.d,
        head_dim_vo=cell.dv,
        causal=cell.causal,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    shape = (cell.b, cell.sq, cell.hq, cell.dv)
    return lambda: wrapper.run(q, k, v).view(shape).transpose(1, 2)


PEERS: dict[str, Maker] = {
    "fa2": functools.partial(_sdpa, backend="FLASH_ATTENTION"),
    "cudnn": functools.partial(_sdpa, backend="CUDNN_ATTENTION"),
    "efficient": functools.partial(_sdpa, backend="EFFICIENT_ATTENTION"),
    "math": _sdpa_math,
    "flex": _flex,
    "flash_attn_2": _flash_attn_2,
    "flash_attn_3": _flash_attn_3,
    "flash_attn_3_cache": _flash_attn_3_cache,
    "flash_attn_4": _flash_attn_4,
    "flashinfer": _flashinfer,
    "cupy": _plain_cupy,
    "cufa_bfloat16": _cufa_bfloat16,
    "cufa_fa1": functools.partial(cufa_call, kernel="fa1_fp32"),
}
"""Every contestant that cufa can be measured beside, by its name in the result files.

``fa2``, ``cudnn``, ``efficient`` and ``math`` are the backends of PyTorch's SDPA (the first is its
FlashAttention-2); ``flash_attn_*`` are the packages of that name."""


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError when a name is none of the contestants that are known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown peer {', '.join(unknown)}; known are {', '.join(known)}")
