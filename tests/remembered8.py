"""Calls in 8 bits that are remembered: they give the bits of calls that are checked in full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cufa
from cufa.launch import fp8_calls


def assert_packed_calls_agree(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    there: Callable[[np.ndarray], Any],
    d: int,
    sizes: tuple[int, int],
) -> None:
    """Compare packed calls that differ in all arrays and offsets, but not in what these are like.

    Parameters
    ----------
    there : callable
        Copies an array to the GPU.
    d : int
        The head dim.
    sizes : tuple of int
        Queries and keys, of which some belong to no sequence.
    """
    attention: Any = cufa.attention_varlen
    known: dict[Any, Any] = {}
    for _ in range(3):
        x = [there(rng.standard_normal((n, 4, d)).astype(np.float16)) for n in (*sizes, sizes[1])]
        ends = [np.sort(rng.integers(0, n - 2, 3)) for n in sizes]
        offsets = [there(np.concatenate([[0], end]).astype(np.int32)) for end in ends]
        options = {
            **{"sinks": there(rng.standard_normal(4, np.float32)), "causal": True},
            **{"alibi_slopes": there(rng.random(4, np.float32)), "return_lse": True},
        }
        both: Any = {"layout": "thd", "cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
        eights = cufa.quantize_qkv(*x, **both)
        for arrays, how in ((x, {"precision": "fp8"}), (eights, {"out_dtype": np.float16})):
            results = []
            for memory in ({}, known):  # checked in full; then known, from the second time on
                monkeypatch.setattr(fp8_calls.CALLS, "known", memory)
                out = there(np.full((sizes[0], 4, d), 7, np.float16))
                found, lse = attention(*arrays, *offsets, out=out, **options, **how)
                assert found is out
                results.append((found.get(), lse.get()))
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(one, other)
            assert (results[0][0][ends[0][-1] :] == 7).all()  # rows that no sequence has
    assert len(known) == 2
