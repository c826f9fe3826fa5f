"""The gradients of PyTorch and of the flash-attn packages, as calls to time."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import cufa
from benchmarks.backward_inputs import Data, packed
from benchmarks.calls import Chosen
from cufa.explorer.clock import Call

Forward = Callable[[Any, Any, Any], Any]
"""Q, K and V -> the result of attention, through which PyTorch differentiates."""


@contextmanager
def _deterministic() -> Iterator[None]:
    """Have PyTorch add in a fixed order; it fills no memory to find what reads it unwritten."""
    import torch
    from torch.utils import deterministic

    was = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True)
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0])
        deterministic.fill_uninitialized_memory = was[1]


def _gradients(
    data: Data,
    forward: Forward,
    tensors: tuple[Any, Any, Any],
    dout: Any,
    choice: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Call:
    """Return a call of the gradients alone, or of both passes where the case asks for them."""
    import torch

    wrt = tuple(x.detach().requires_grad_() for x in tensors)
    if data.case.model:
        return Chosen(choice, lambda: torch.autograd.grad(forward(*wrt), wrt, dout))
    with choice():
        out = forward(*wrt)
    return Chosen(choice, lambda: torch.autograd.grad(out, wrt, dout, retain_graph=True))


def _sdpa(data: Data, backend: str) -> Call:
    """Return the gradients of PyTorch's SDPA, forced to one backend, without TF32."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    case, cell = data.case, data.cell
    if case.window is not None or case.lengths:
        raise ValueError("SDPA takes no window and no lengths")
    if (cell.dtype == "float32") != (backend == "EFFICIENT_ATTENTION"):
        raise ValueError(f"it is not measured in {cell.dtype}")
    torch.set_float32_matmul_precision("highest")

    @contextmanager
    def choice() -> Iterator[None]:
        order = _deterministic() if case.deterministic else nullcontext()
        with sdpa_kernel(getattr(SDPBackend, backend)), order:
            yield

    def forward(q: Any, k: Any, v: Any) -> Any:
        grouped = cell.hq != cell.hk
        return scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=grouped)

    return _gradients(data, forward, data.torch(), data.torch_dout(), choice)


def _flash_attn(data: Data, package: str) -> Call:
    """Return the gradients of a flash-attn package, in its own layout."""
    case, cell = data.case, data.cell
    name = "flash_attn_varlen_func" if case.lengths else "flash_attn_func"
    function = getattr(importlib.import_module(package), name, None)
    if function is None:  # a folder that other packages lie in
        raise ImportError(f"{package} has no {name}")
    if cell.dtype == "float32":
        raise ValueError("it takes 16 bits")
    options: dict[str, Any] = {"causal": cell.causal, "deterministic": case.deterministic}
    if case.window is not None:
        options["window_size"] = (case.window - 1, 0)
    tensors = (*data.torch(), data.torch_dout())
    if case.lengths:
        ends, longest = data.torch_offsets(), max(case.lengths)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        q, k, v, dout = (x[0].transpose(0, 1).contiguous() for x in tensors)
    else:
        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in tensors)

    def forward(q: Any, k: Any, v: Any) -> Any:
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    call = _gradients(data, forward, (q, k, v), dout)
    if case.lengths:
        return lambda: tuple(x.transpose(0, 1)[None] for x in call())
    return lambda: tuple(x.transpose(1, 2) for x in call())


def _cufa_causal(data: Data) -> Call:
    """Return cufa's gradients under the causal mask alone, by the operations of the window."""
    if data.case.window is None:
        raise ValueError("it is for windows")
    return cufa_gradients(data, causal=True)


def cufa_gradients(data: Data, **options: Any) -> Call:
    """Return ``cufa.attention_backward`` or ``_varlen_backward``, or both passes, on the data."""
    case, options = data.case, options or data.case.options
    deterministic = case.deterministic
    if case.lengths:
        q, k, v, dout = (packed(x) for x in (data.q, data.k, data.v, data.dout))
        ends = data.offsets()
        out, lse = cufa.attention_varlen(q, k, v, ends, ends, return_lse=True, **options)

        def of_lengths() -> Any:
            found = cufa.attention_varlen_backward(
                *(dout, q, k, v, out, lse, ends, ends), deterministic=deterministic, **options
            )
            return tuple(x.swapaxes(0, 1)[None] for x in found)

        return of_lengths
    q, k, v, dout = data.q, data.k, data.v, data.dout

    def forward() -> Any:
        return cufa.attention(q, k, v, return_lse=True, **options)

    def backward(out: Any, lse: Any) -> Any:
        return cufa.attention_backward(
            dout, q, k, v, out, lse, deterministic=deterministic, **options
        )

    if case.model:
        return lambda: backward(*forward())
    results = forward()
    return lambda: backward(*results)


PEERS: dict[str, Callable[[Data], Call]] = {
    "cudnn": functools.partial(_sdpa, backend="CUDNN_ATTENTION"),
    "fa2": functools.partial(_sdpa, backend="FLASH_ATTENTION"),
    "efficient": functools.partial(_sdpa, backend="EFFICIENT_ATTENTION"),
    "flash_attn_2": functools.partial(_flash_attn, package="flash_attn"),
    "flash_attn_3": functools.partial(_flash_attn, package="flash_attn_interface"),
    "flash_attn_4": functools.partial(_flash_attn, package="flash_attn.cute"),
    "cufa_causal": _cufa_causal,
}
"""Every contestant that cufa can be measured beside, by its name in the result file."""
