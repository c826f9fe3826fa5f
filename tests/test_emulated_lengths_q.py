"""Batches whose queries are padded, by the kernels' source on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import on_gpu
from reference import random_inputs
from score_arrays import options_of
from test_block_mask import played_cupy  # noqa: F401
from test_emulated import (  # noqa: F401
    ALL,
    FA1,
    FA3,
    FA3_ONE_SLOT,
    FA3_TWO_SLOTS,
    MMA,
    ONE_OF_EACH,
    emulated,
    emulator,
)
from test_emulated_varlen import score_of
from test_lengths_q import assert_each_is_right, mask_mod, padded, score_mod
from test_varlen import OPTIONS

import cufa
from cufa.specs.variant import Variant

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]

#: In arrays of 150 queries and 200 keys: tiles without rows, and with some.
LENGTHS_Q = np.array([150, 0, 6, 128, 65], np.int32)
LENGTHS_K = np.array([200, 70, 6, 0, 130], np.int32)

forms = pytest.mark.parametrize(
    "form", [*(f for f in ALL if f is not FA1), FA3_ONE_SLOT], ids=lambda f: f[:50]
)
one_of_each = pytest.mark.parametrize("form", ONE_OF_EACH, ids=lambda f: f[:50])


def inputs(
    rng: np.random.Generator, form: str, lengths_k: np.ndarray | None = LENGTHS_K, **sizes: int
) -> tuple[np.ndarray, ...]:
    variant = Variant.parse(form.format(score=""))
    sizes = {"b": 5, "hq": 2, "hk": 1, "sq": 150} | sizes
    d, dv = variant.head_dim, variant.head_dim_v
    return padded(rng, variant.dtype, LENGTHS_Q, lengths_k, d, dv, **sizes)


def called(form: str, arrays: Any, score: tuple[str, ...] | None = None, **options: Any) -> Any:
    """Return the result and the log-sum-exp of a form."""
    variant = Variant.parse(form.format(score=""))
    if score is None:
        score = score_of(dtype=arrays[0].dtype, **options)
    lengths = {"lengths_q": LENGTHS_Q, "lengths_k": LENGTHS_K} | options
    there: dict[str, Any] = {k: on_gpu(x) if hasattr(x, "dtype") else x for k, x in lengths.items()}
    kernel = variant._replace(score=score, kv="Padded")
    found = cufa.attention(*map(on_gpu, arrays), kernel=kernel, return_lse=True, **there)
    return tuple(x.get() for x in found)


@forms
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@exhaustive(but=lambda form, options: form in ONE_OF_EACH or "softcap" in options, one_in=3)
def test_each_sequence_by_its_own_lengths(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    form: str,
    options: dict[str, Any],
) -> None:
    arrays = inputs(rng, form)
    for emulated.last_first in (False, True):
        found = called(form, arrays, **options)
        assert_each_is_right(found, arrays, LENGTHS_Q, LENGTHS_K, **options)


@one_of_each
def test_keys_of_all(rng: np.random.Generator, form: str) -> None:
    arrays = inputs(rng, form, None)
    for causal in (False, True):
        score = ("Causal",) if causal else ()
        found = called(form, arrays, score, causal=causal, lengths_k=None)
        assert_each_is_right(found, arrays, LENGTHS_Q, None, causal=causal)


@one_of_each
def test_values_that_are_not_finite(rng: np.random.Generator, form: str) -> None:
    """All keys count; rows behind the last query are 0 all the same."""
    q, k, v = inputs(rng, form)
    k[:, :, 2], v[:, :, 3] = np.nan, np.inf
    out, lse = called(form, (q, k, v))
    for i, n in enumerate(LENGTHS_Q):
        assert not out[i, :, n:].astype(np.float32).any()
        assert np.isneginf(lse[i, :, n:]).all()


@pytest.mark.parametrize("form", [MMA, FA3, FA3_TWO_SLOTS], ids=lambda f: f[:50])
@pytest.mark.parametrize("name", ["alibi of sequences", "bias", "bits", "all"])
@exhaustive(one_in=3)
def test_arrays_beside(rng: np.random.Generator, form: str, name: str) -> None:
    """Rows that are not there are not looked up in an array either."""
    sizes = 5, 2, 1, 150, 200
    options = options_of(rng, name, sizes)
    arrays = inputs(rng, form)
    there: dict[str, Any] = {k: on_gpu(x) if hasattr(x, "dtype") else x for k, x in options.items()}
    q, k, v = map(on_gpu, arrays)
    plan: Any = cufa.explain(q, k, v, kernel=Variant.parse(form.format(score="")).kernel, **there)
    found = called(form, arrays, plan.variant.score, **options)
    assert_each_is_right(found, arrays, LENGTHS_Q, LENGTHS_K, **options)


def test_arrays_beside_by_rows_in_float32(rng: np.random.Generator) -> None:
    """Infinite scores, of which rows are computed once more; whatever variant is planned."""
    options = options_of(rng, "all", (5, 2, 1, 150, 200))
    arrays = padded(rng, "float32", LENGTHS_Q, LENGTHS_K, 64, b=5, hq=2, hk=1, sq=150)
    arrays[1][:, :, 1] = np.inf
    for array in arrays[:1]:
        np.abs(array, out=array)
    there: dict[str, Any] = {k: on_gpu(x) if hasattr(x, "dtype") else x for k, x in options.items()}
    its: dict[str, Any] = {"lengths_q": on_gpu(LENGTHS_Q), "lengths_k": on_gpu(LENGTHS_K)}
    out, lse = cufa.attention(*map(on_gpu, arrays), return_lse=True, **(its | there))
    for i, n in enumerate(LENGTHS_Q):
        assert not out.get()[i, :, n:].any()
        assert np.isneginf(lse.get()[i, :, n:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_functions_tiles_and_a_dropout(
    played_cupy: Any,  # noqa: F811
    rng: np.random.Generator,
    dtype: str,
) -> None:
    """Each address goes to its place; whatever variant is planned."""
    arrays = padded(rng, dtype, LENGTHS_Q, LENGTHS_K, 64, b=5, hq=2, hk=1, sq=150)
    q, k, v = map(on_gpu, arrays)
    sinks = rng.standard_normal(2, np.float32)
    tiles = cufa.BlockMask.of(mask_mod, 5, 2, 150, 200, block=(64, 32), xp=played_cupy)
    keep = cufa.dropout_mask((5, 2, 150, 200), 0.25, 6) / 0.75
    options: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod, "causal": True}
    call: dict[str, Any] = {
        "lengths_q": on_gpu(LENGTHS_Q),
        "lengths_k": on_gpu(LENGTHS_K),
        "return_lse": True,
    }
    call |= {"dropout_p": 0.25, "seed": 6, "sinks": on_gpu(sinks)}
    for block_mask in (None, tiles):
        found = cufa.attention(q, k, v, block_mask=block_mask, **(call | options))
        assert_each_is_right(
            *(found, arrays, LENGTHS_Q, LENGTHS_K), keep=keep, sinks=sinks, **options
        )


def test_heads_that_share_a_tile(rng: np.random.Generator) -> None:
    lengths_q, lengths_k = np.array([9, 0, 3, 5], np.int32), np.array([150, 9, 0, 5], np.int32)
    arrays = padded(rng, "bfloat16", lengths_q, lengths_k, 64, b=4, hq=8, sq=40, sk=150)
    its: dict[str, Any] = {"lengths_q": on_gpu(lengths_q), "lengths_k": on_gpu(lengths_k)}
    for causal in (False, True):
        found = cufa.attention(*map(on_gpu, arrays), causal=causal, return_lse=True, **its)
        assert_each_is_right(found, arrays, lengths_q, lengths_k, causal=causal)


@one_of_each
def test_lengths_that_the_arrays_do_not_hold(rng: np.random.Generator, form: str) -> None:
    """On the device they are cut; pages around the arrays say that nothing outside is read."""
    variant = Variant.parse(form.format(score=""))
    q, k, v = random_inputs(rng, variant.dtype, b=3, hq=2, hk=1, sq=70, sk=90, d=64)
    wild = np.array([2**31 - 1, -5, 71], np.int32)
    score = ("Causal",)
    found = called(form, (q, k, v), score, causal=True, lengths_q=wild, lengths_k=wild)
    cut_q, cut_k = np.array([70, 0, 70]), np.array([90, 0, 71])
    assert_each_is_right(found, (q, k, v), cut_q, cut_k, causal=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_batch_and_its_sequences_have_the_same_bits(rng: np.random.Generator, dtype: str) -> None:
    arrays = padded(rng, dtype, LENGTHS_Q, LENGTHS_K, 64, b=5, hq=2, hk=1, sq=150)
    its: dict[str, Any] = {"causal": True, "batch_invariant": True, "return_lse": True}
    of_q, of_k = on_gpu(LENGTHS_Q), on_gpu(LENGTHS_K)
    found = cufa.attention(*map(on_gpu, arrays), lengths_q=of_q, lengths_k=of_k, **its)
    for i in range(5):
        one = slice(i, i + 1)
        alone = cufa.attention(
            *(on_gpu(x[one]) for x in arrays), lengths_q=of_q[one], lengths_k=of_k[one], **its
        )
        for x, y in zip(found, alone, strict=True):
            assert x.get()[one].tobytes() == y.get().tobytes()


def test_a_call_that_is_like_another(rng: np.random.Generator) -> None:
    """Each follows its own lengths, and those that it has."""
    arrays = random_inputs(rng, "float16", b=5, hq=2, hk=1, sq=150, sk=200, d=64)
    given = [on_gpu(x) for x in arrays]
    others = LENGTHS_Q[::-1].copy()
    calls: tuple[tuple[np.ndarray | None, np.ndarray | None], ...] = (
        *((LENGTHS_Q, LENGTHS_K), (LENGTHS_Q, LENGTHS_K), (others, LENGTHS_K)),
        *((None, LENGTHS_K), (others, None), (LENGTHS_Q, LENGTHS_K)),
    )
    for of_q, of_k in calls:
        for place in (on_gpu, lambda x: x):
            its = [None if x is None else place(x) for x in (of_q, of_k)]
            found = cufa.attention(*given, lengths_q=its[0], lengths_k=its[1], return_lse=True)
            assert_each_is_right(found, arrays, of_q, of_k)
