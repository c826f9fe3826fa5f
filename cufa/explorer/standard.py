"""The problems of the standard prefill table."""

from __future__ import annotations

from collections.abc import Iterable

from cufa.problem.problem import Problem

HIDDEN = 2048
TOKENS = 16384
HEAD_DIMS = (64, 128, 256)
SEQS = (512, 1024, 2048, 4096, 8192, 16384)


def standard_problems(
    dtypes: Iterable[str] = ("bfloat16",),
    head_dims: Iterable[int] = HEAD_DIMS,
    masks: Iterable[bool] = (False, True),
    seqs: Iterable[int] = SEQS,
) -> list[Problem]:
    """Return problems of one hidden size and number of tokens, self-attention of equal heads.

    `masks` are values of causal. ValueError where a head dim does not divide `HIDDEN`, or a length
    `TOKENS`.
    """
    lengths, causals, dims = tuple(seqs), tuple(masks), tuple(head_dims)
    for d in dims:
        if d < 1 or HIDDEN % d:
            raise ValueError(f"head dim {d} does not divide the hidden size {HIDDEN}")
    for s in lengths:
        if s < 1 or TOKENS % s:
            raise ValueError(f"sequence length {s} does not divide {TOKENS} tokens")
    return [
        Problem.of_shapes(*[(TOKENS // s, HIDDEN // d, s, d)] * 3, dtype=dtype, causal=causal)
        for dtype in dtypes
        for d in dims
        for causal in causals
        for s in lengths
    ]
