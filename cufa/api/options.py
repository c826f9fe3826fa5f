"""Types of the public functions' arguments, and the keywords that a function's overloads share.

An overload names the arguments that decide the type of its result. It takes the others as
``**options`` of a class below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from numpy.typing import DTypeLike

from cufa.arrays import AnyArray

if TYPE_CHECKING:
    from cufa.api.block_mask import BlockMask
    from cufa.specs.variant import Variant

Causal = bool | Literal["bottom-right", "top-left"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["fp8"]
Window = tuple[int | None, int | None]
#: A Python function, or C++ for the GPU.
UserFunction = Callable[..., Any] | str


class _Options(TypedDict, total=False):
    window: Window
    attention_chunk: int | None
    softcap: float | None
    alibi_slopes: AnyArray | None
    sinks: AnyArray | None
    scale: float | None
    out: AnyArray | None
    kernel: str | Variant | None


class _OfAttention(_Options, total=False):
    causal: Causal
    bias: AnyArray | None
    mask: AnyArray | None
    score_mod: UserFunction | None
    mask_mod: UserFunction | None
    dropout_p: float
    seed: int | None
    precision: Precision | None


class QuantizedOptions(_OfAttention, total=False):
    """Keywords of `attention` on `Quantized`, but for `out_dtype`, which is needed there."""

    block_mask: BlockMask | None
    lengths_k: AnyArray | None
    lengths_q: AnyArray | None
    layout: Layout
    batch_invariant: bool


class AttentionOptions(QuantizedOptions, total=False):
    """Keywords of `attention`."""

    out_dtype: DTypeLike | None


class QuantizedVarlenOptions(_OfAttention, total=False):
    """Keywords of `attention_varlen` on `Quantized`, but for `out_dtype`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_k: AnyArray | None


class VarlenOptions(QuantizedVarlenOptions, total=False):
    """Keywords of `attention_varlen`."""

    out_dtype: DTypeLike | None


class _OfDecoding(_Options, total=False):
    causal: bool
    num_splits: int | None
    unified_max: float | None


class DecodeOptions(_OfDecoding, total=False):
    """Keywords of `decode`."""

    lengths: AnyArray | None
    block_table: AnyArray | None
    k_scale: AnyArray | None
    v_scale: AnyArray | None
    layout: Layout


class CacheOptions(_OfDecoding, total=False):
    """Keywords of the `decode` of a cache."""

    layer: int
