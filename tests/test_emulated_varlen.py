"""Sequences of unequal lengths by the kernels' source on the host."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import played_gpu
import pytest
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import on_gpu
from reference import Expected, random_inputs
from score_arrays import options_of
from test_emulated import (  # noqa: F401
    ALL,
    FA1,
    FA3,
    FA3_ONE_SLOT,
    FA3_TURNS,
    FA3_TWO_OF_THREE,
    FA3_TWO_SLOTS,
    FA3_WIDE,
    FP32,
    MMA,
    ONE_OF_EACH,
    emulated,
    emulator,
)
from test_varlen import LENGTHS, OPTIONS, assert_each_is_right
from test_varlen import ragged as ragged_of

import cufa
from cufa import device
from cufa.features import VALUES
from cufa.specs.variant import Variant

ragged = functools.partial(ragged_of, xp=played_gpu)

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]

forms = pytest.mark.parametrize(
    "form", [*(f for f in ALL if f is not FA1), FA3_ONE_SLOT], ids=lambda f: f[:50]
)


def score_of(**options: Any) -> tuple[str, ...]:
    """Return the parts of a call's score."""
    q = on_gpu(np.ones((1, 4, 8, 8), options.pop("dtype")))
    plan: Any = cufa.explain(q, q, q, **options)
    return tuple(plan.variant.score)


def varlen(form: str, arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the result and the log-sum-exp of a form."""
    variant = Variant.parse(form.format(score=""))
    plain = {k: x for k, x in options.items() if k in (*VALUES, "scale")}
    score = score_of(dtype=arrays[0].dtype, **plain)
    there: dict[str, Any] = {k: on_gpu(x) if hasattr(x, "dtype") else x for k, x in options.items()}
    out, lse = cufa.attention_varlen(
        *map(on_gpu, arrays),
        kernel=variant._replace(score=score, kv="Varlen"),
        return_lse=True,
        **there,
    )
    return out.get(), lse.get()


@forms
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@exhaustive(but=lambda form, options: form in ONE_OF_EACH or "softcap" in options, one_in=3)
def test_sequences_of_any_lengths(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    form: str,
    options: dict[str, Any],
) -> None:
    variant = Variant.parse(form.format(score=""))
    if variant.head_dim != variant.head_dim_v:
        pytest.skip("the arrays here have one head dim")
    for emulated.last_first, lengths in zip((False, True), (LENGTHS[0], LENGTHS[3]), strict=True):
        arrays = ragged(rng, variant.dtype, lengths, d=variant.head_dim)
        assert_each_is_right(varlen(form, arrays, **options), arrays, **options)


@pytest.mark.parametrize(
    "form",
    [FA3_WIDE, FA3_TWO_OF_THREE, FA3_TWO_SLOTS, FA3_TURNS, FA3_ONE_SLOT],
    ids=lambda f: f[:50],
)
@exhaustive(one_in=2)
def test_warps_that_are_not_in_step(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    """A warp of short sequences is at the next tile while another writes the one before."""
    one = device.named("h200")._replace(sm_count=1)
    monkeypatch.setattr(device, "of_id", lambda device_id: one)
    variant = Variant.parse(form.format(score=""))
    for emulated.seed in range(1, 5):
        lengths = tuple(rng.integers(1, 100, 10).tolist()), tuple(rng.integers(1, 60, 10).tolist())
        arrays = ragged(rng, variant.dtype, lengths, d=variant.head_dim)
        for causal in (False, True):
            assert_each_is_right(varlen(form, arrays, causal=causal), arrays, causal=causal)


@pytest.mark.parametrize("form", [FA3, MMA, FP32], ids=lambda f: f[:50])
def test_nothing_reaches_another_sequence(rng: np.random.Generator, form: str) -> None:
    variant = Variant.parse(form.format(score=""))
    lengths = ((70, 70, 5, 200), (70, 70, 90, 210))
    arrays = ragged(rng, variant.dtype, lengths, d=64)
    for array, of in zip(arrays[:3], (3, 4, 4), strict=True):
        array[arrays[of][1] : arrays[of][2]] = np.nan
    for causal in (False, True):
        out, lse = varlen(form, arrays, causal=causal)
        out = out.astype(np.float32)
        assert np.isnan(out[70:140]).all()
        assert np.isfinite(out[:70]).all()
        assert np.isfinite(out[140:345]).all()
        assert (out[345:] == 0).all()  # rows that no sequence has
        assert np.isneginf(lse[:, 345:]).all()


def test_heads_that_share_a_tile(rng: np.random.Generator) -> None:
    arrays = ragged(rng, "bfloat16", ((13, 0, 5, 40), (150, 9, 5, 64)), hq=8, hk=2, d=64)
    for options in ({}, {"causal": True}):
        assert_each_is_right(varlen(FA3, arrays, **options), arrays, **options)


@pytest.mark.parametrize("form", [FA3, MMA, FP32], ids=lambda f: f[:50])
def test_offsets_on_the_device_stay_within_the_arrays(rng: np.random.Generator, form: str) -> None:
    """Whatever they are, nothing outside is read or written: pages around the arrays say so."""
    variant = Variant.parse(form.format(score=""))
    arrays = ragged(rng, variant.dtype, ((50, 47), (60, 37)), d=64)
    q, k, v = (on_gpu(x) for x in arrays[:3])
    for bad in ((0, 70, 20), (-5, 3, 2**31 - 1), (2**31 - 1, -(2**31), 0), (90, 200, 90)):
        wild = on_gpu(np.array(bad, np.int32))
        for causal in (False, True):
            score = ("Causal",) if causal else ()
            kernel = variant._replace(score=score, kv="Varlen")
            cufa.attention_varlen(q, k, v, wild, wild, causal=causal, kernel=kernel)


@forms
@exhaustive(one_in=2)
def test_padded_batches(rng: np.random.Generator, form: str) -> None:
    variant = Variant.parse(form.format(score=""))
    d, dv = variant.head_dim, variant.head_dim_v
    lengths = np.array([200, 0, 1, 127, 64], np.int32)
    q, k, v = random_inputs(rng, variant.dtype, b=5, hq=2, hk=1, sq=70, sk=200, d=d, dv=dv)
    for i, n in enumerate(lengths):
        k[i, :, n:], v[i, :, n:] = np.nan, np.nan
    given = [on_gpu(x) for x in (q, k, v)]
    for options in (OPTIONS[0], OPTIONS[1], OPTIONS[3]):
        kernel = variant._replace(score=score_of(dtype=q.dtype, **options), kv="Padded")
        out, lse = cufa.attention(
            *given, lengths_k=on_gpu(lengths), kernel=kernel, return_lse=True, **options
        )
        cases = [
            Expected(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], **options)
            for i, n in enumerate(lengths)
        ]
        bound = max(case.bound for case in cases)
        for i, case in enumerate(cases):
            case.assert_accepts(out.get()[i : i + 1], lse.get()[i : i + 1], f"{i} {options}", bound)


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=lambda f: f[:50])
def test_longest_lengths_of_nothing(rng: np.random.Generator, form: str) -> None:
    if form is FA1:
        pytest.skip("fa1_fp32 takes no lengths")
    dtype = Variant.parse(form.format(score="")).dtype
    arrays = ragged(rng, dtype, ((5, 20), (0, 30)))
    out, lse = varlen(form, arrays, max_seqlen_k=0)
    assert not out[:25].astype(np.float32).any()
    assert np.isneginf(lse[:, :25]).all()
    out, lse = varlen(form, arrays, max_seqlen_q=0)
    assert not out.astype(np.float32).any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize(("dtype", "heads", "d"), [("bfloat16", 4, 64), ("float16", 1, 9)])
def test_rows_that_no_sequence_has(
    rng: np.random.Generator, dtype: str, heads: int, d: int
) -> None:
    """In front, behind, and behind the longest; of rows of whole chunks, and of an odd size."""
    arrays = ragged(rng, dtype, ((300,), (80,)), hq=heads, hk=1, d=d)
    q, k, v = (on_gpu(x) for x in arrays[:3])
    keys = on_gpu(np.array([0, 20, 20, 60, 80], np.int32))
    for ends, most in (
        ([0, 40, 100, 103, 303], None),
        ([70, 72, 72, 150, 299], None),
        ([0, 40, 40, 103, 290], 33),
        ([5, 5, 5, 5, 5], 7),
    ):
        offsets = np.array(ends, np.int32)
        has = np.zeros(303, bool)
        for first, end in itertools.pairwise(ends):
            has[first : end if most is None else min(end, first + most)] = True
        call: dict[str, Any] = {"max_seqlen_q": most, "return_lse": True}
        found = cufa.attention_varlen(q, k, v, on_gpu(offsets), keys, **call)
        out, lse = (x.get() for x in found)
        assert not out[~has].astype(np.float32).any()
        assert np.isneginf(lse[:, ~has]).all()
        assert np.isfinite(out[has].astype(np.float32)).all()
        mine = on_gpu(np.full(out.shape, 7, out.dtype))
        _, lse = cufa.attention_varlen(q, k, v, on_gpu(offsets), keys, out=mine, **call)
        assert (mine.get()[~has] == 7).all()
        np.testing.assert_array_equal(mine.get()[has], out[has])
        assert np.isneginf(lse.get()[:, ~has]).all()


def test_no_sequences(rng: np.random.Generator) -> None:
    q, k = on_gpu(np.ones((5, 4, 64), np.float16)), on_gpu(np.ones((7, 2, 64), np.float16))
    for n in (0, 1, 0):
        offsets = on_gpu(np.zeros(n + 1, np.int32))
        out, lse = cufa.attention_varlen(q, k, k, offsets, offsets, return_lse=True)
        assert not out.get().any()
        assert np.isneginf(lse.get()).all()
        mine = on_gpu(np.full((5, 4, 64), 7, np.float16))
        cufa.attention_varlen(q, k, k, offsets, offsets, out=mine)
        assert (mine.get() == 7).all()
        assert "\n" not in str(cufa.explain_varlen(q, k, k, offsets, offsets))


@pytest.mark.parametrize("keys", [150, 160])  # 160: rows begin with whole chunks
@pytest.mark.parametrize("name", ["alibi of sequences", "bias", "mask", "all"])
@exhaustive("fa3_wgmma", one_in=2)
def test_arrays_beside(rng: np.random.Generator, name: str, keys: int) -> None:
    """Whatever variant is planned."""
    arrays = ragged(rng, "bfloat16", ((30, 5, 61, 100), (40, 0, 61, 150)))
    options = options_of(rng, name, (4, 4, 2, 100, keys))
    there: dict[str, Any] = {k: on_gpu(x) if hasattr(x, "dtype") else x for k, x in options.items()}
    out, lse = cufa.attention_varlen(
        *map(on_gpu, arrays), max_seqlen_q=100, max_seqlen_k=keys, return_lse=True, **there
    )
    assert_each_is_right((out.get(), lse.get()), arrays, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_functions_of_the_caller(rng: np.random.Generator, dtype: str) -> None:
    """With lengths, arrays of their own and a seed, each in its place."""
    arrays = ragged(rng, dtype, ((30, 61, 100), (40, 61, 150)))
    table = rng.standard_normal((3, 4), np.float32)
    there = on_gpu(table)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + there[b, h] * kv_idx

    sinks = rng.standard_normal(4, np.float32)
    given = [on_gpu(x) for x in arrays]
    call: dict[str, Any] = {"score_mod": score_mod, "sinks": on_gpu(sinks), "return_lse": True}
    keep = cufa.dropout_mask((3, 4, 100, 150), 0.25, 6) / 0.75
    q, k, v, cu_q, cu_k = arrays
    for dropout_p in (0.0, 0.25):
        out, lse = cufa.attention_varlen(*given, dropout_p=dropout_p, seed=6, **call)
        for i in range(3):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            four = [x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])]

            def its_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, i: int = i) -> Any:
                return score + table[i, h] * kv_idx

            its: dict[str, Any] = {"score_mod": its_score, "sinks": sinks}
            if dropout_p:
                n, m = four[0].shape[2], four[1].shape[2]
                its["keep"] = keep[i : i + 1, :, :n, :m]
            expected = Expected(*four, **its)
            expected.assert_accepts(out.get()[rows].swapaxes(0, 1)[None], lse.get()[None, :, rows])


def test_a_call_that_is_like_another(rng: np.random.Generator) -> None:
    """Other offsets, other numbers of them, and other rows: each call follows its own."""
    for lengths in (LENGTHS[0], LENGTHS[0], ((5, 6), (7, 80)), LENGTHS[1], LENGTHS[0]):
        arrays = ragged(rng, "float16", lengths, d=64)
        out, lse = cufa.attention_varlen(*map(on_gpu, arrays), causal=True, return_lse=True)
        assert_each_is_right((out.get(), lse.get()), arrays, causal=True)


@pytest.mark.parametrize("form", [FA3, FA3_TURNS, MMA, FP32], ids=lambda f: f[:50])
@pytest.mark.parametrize("softcap", [3.0, None])
@exhaustive(one_in=2)
def test_the_next_sequence_changes_no_bit(
    rng: np.random.Generator, form: str, softcap: float | None
) -> None:
    """Where scores are small, a softcap is a polynomial: the next sequence's may be large."""
    variant = Variant.parse(form.format(score=""))
    lengths = ((70, 70), (150, 80))
    arrays = ragged(rng, variant.dtype, lengths, d=64)
    arrays[0][:70] /= 8  # scores are small
    found = set()
    for value in (None, 100.0, np.inf, np.nan):
        q, k, v = (x.copy() for x in arrays[:3])
        if value is not None:
            q[70:140], k[150:230], v[150:230] = value, value, value
        out, lse = varlen(form, (q, k, v, *arrays[3:]), softcap=softcap)
        found.add(out[:70].tobytes() + lse[:, :70].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=lambda f: f[:50])
def test_sections_of_heads(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """L2 holds the keys of two heads at a time."""
    variant = Variant.parse(form.format(score=""))
    lengths = (100, 3, 150), (100, 3, 150)
    arrays = ragged(rng, variant.dtype, lengths, d=variant.head_dim)
    of_mean_length = -(-sum(lengths[1]) // 3) * 2 * variant.head_dim * arrays[0].itemsize
    small = device.named("h200")._replace(sm_count=2, l2_bytes=5 * of_mean_length)
    monkeypatch.setattr(device, "of_id", lambda device_id: small)
    assert_each_is_right(varlen(form, arrays, causal=True), arrays, causal=True)
