"""The keywords of the public functions, for type checkers: at run time nothing imports them.

The overloads of a function differ in the type of `return_lse`, which decides the type of the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from numpy.typing import DTypeLike
from typing_extensions import Required, TypedDict

from cufa.api.block_mask import BlockMask
from cufa.api.options import Causal, Layout, Precision, UserFunction, Window
from cufa.arrays import AnyArray
from cufa.specs.variant import Variant

#: The type of `return_lse`.
Lse = TypeVar("Lse", bound=bool)


class _Scores(TypedDict, total=False):
    """Keywords of all functions, for the scores."""

    window: Window
    attention_chunk: int | None
    softcap: float | None
    alibi_slopes: AnyArray | None
    sinks: AnyArray | None
    scale: float | None


class _OfAttention(_Scores, total=False):
    """Keywords of attention without a cache, also with gradients."""

    causal: Causal
    bias: AnyArray | None
    mask: AnyArray | None
    score_mod: UserFunction | None
    mask_mod: UserFunction | None
    dropout_p: float
    seed: int | None


class _Dense(_OfAttention, total=False):
    """Keywords of `attention`, also with gradients."""

    block_mask: BlockMask | None
    lengths_k: AnyArray | None
    lengths_q: AnyArray | None
    layout: Layout


class _Forward(TypedDict, Generic[Lse], total=False):
    """Keywords that gradients do not have."""

    return_lse: Lse
    out: AnyArray | None
    kernel: str | Variant | None


class _OfForward(_OfAttention, _Forward[Lse], Generic[Lse], total=False):
    """Keywords of attention without a cache, but without gradients."""

    precision: Precision | None


class _OfDense(_Dense, _OfForward[Lse], Generic[Lse], total=False):
    """Keywords of `attention`, on arrays and on `Quantized`."""

    batch_invariant: bool


class _OfPacked(_OfForward[Lse], Generic[Lse], total=False):
    """Keywords of `attention_varlen`, on arrays and on `Quantized`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_k: AnyArray | None


class AttentionOptions(_OfDense[Lse], Generic[Lse], total=False):
    """Keywords of `attention`."""

    out_dtype: DTypeLike | None


class QuantizedOptions(_OfDense[Lse], Generic[Lse], total=False):
    """Keywords of `attention` on `Quantized`."""

    out_dtype: Required[DTypeLike]


class VarlenOptions(_OfPacked[Lse], Generic[Lse], total=False):
    """Keywords of `attention_varlen`."""

    out_dtype: DTypeLike | None


class QuantizedVarlenOptions(_OfPacked[Lse], Generic[Lse], total=False):
    """Keywords of `attention_varlen` on `Quantized`."""

    out_dtype: Required[DTypeLike]


class GradientOptions(_Dense, total=False):
    """Keywords of `explain_backward`."""

    wrt: Sequence[str]
    deterministic: bool


class _OfDecoding(_Scores, _Forward[Lse], Generic[Lse], total=False):
    """Keywords of `decode`, as a function and as a method of caches."""

    causal: bool
    num_splits: int | None
    unified_max: float | None


class DecodeOptions(_OfDecoding[Lse], Generic[Lse], total=False):
    """Keywords of `decode`."""

    lengths: AnyArray | None
    block_table: AnyArray | None
    k_scale: AnyArray | None
    v_scale: AnyArray | None
    layout: Layout


class CacheOptions(_OfDecoding[Lse], Generic[Lse], total=False):
    """Keywords of the `decode` of a cache."""

    layer: int
