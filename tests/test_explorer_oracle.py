"""The explorer's oracle: it accepts what the tests' oracle accepts, and refuses what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import score_mods
from reference import hidden_keys, oracle, random_inputs, twin
from score_arrays import FEATURES, options_of

import cufa
from cufa.explorer import _of_arrays
from cufa.explorer import oracle as explorer_oracle
from cufa.explorer.inputs import Inputs, drawn
from cufa.explorer.oracle import Oracle, same_bits, sampled_heads, sampled_rows
from cufa.features.dropout import Dropout
from cufa.problem.problem import Problem

DTYPES = ("float16", "bfloat16", "float32")
SHAPES = (
    {"b": 2, "hq": 3, "sq": 33, "sk": 65, "d": 16},
    {"b": 1, "hq": 6, "hk": 2, "sq": 70, "sk": 41, "d": 24, "dv": 40},
    {"b": 1, "hq": 1, "sq": 1, "sk": 129, "d": 64},
)


def problem_of(q: Any, k: Any, v: Any, dtype: str, **options: Any) -> Problem:
    return Problem.of_shapes(q.shape, k.shape, v.shape, dtype=dtype, **options)


def judge_of(
    xp: ModuleType, dtype: str, shape: dict[str, int], **options: Any
) -> tuple[Oracle, np.ndarray, tuple[np.ndarray, ...]]:
    """Return the oracle of random inputs, the tests' float64 result, and the inputs."""
    inputs = random_inputs(np.random.default_rng(7), dtype, **shape)  # type: ignore[arg-type]
    given = Inputs(tuple(map(xp.asarray, inputs)))
    found = Oracle(xp, problem_of(*inputs, dtype, **options), given)
    return found, oracle(*inputs, **options)[0], inputs


SCORES: tuple[dict[str, Any], ...] = (
    *({}, {"causal": True}, {"causal": "top-left"}, {"window": (9, 3)}),
    {"softcap": 0.5, "causal": True, "window": (20, None)},
)


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accepts_right_results(
    xp: ModuleType, dtype: str, shape: dict[str, int], score: dict[str, Any]
) -> None:
    judge, expected, inputs = judge_of(xp, dtype, shape, **score)
    for out in (expected.astype(inputs[0].dtype), twin(*inputs, **score)):
        verdict = judge.judge(xp.asarray(out))
        assert verdict.complaint is None
        assert verdict.max_error < 0.02


SIZES = 2, 6, 2, 70, 250


@pytest.mark.parametrize("name", [*FEATURES, *score_mods.FEATURES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_stands_beside(
    xp: ModuleType, rng: np.random.Generator, dtype: str, name: str
) -> None:
    """It is in what is right: what is right without it is wrong."""
    if name in FEATURES:
        options = options_of(rng, name, SIZES)
        there = {k: xp.asarray(x) if hasattr(x, "dtype") else x for k, x in options.items()}
    else:
        options, there = score_mods.made(rng, name, SIZES, xp.asarray)
    b, hq, hk, sq, sk = SIZES
    inputs = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=16)
    given = dict(zip("qkv", map(xp.asarray, inputs), strict=True))
    problem, given_ones = _of_arrays(given, dict(there), timed=False)
    judge = Oracle(xp, problem, given_ones)
    expected, _ = oracle(*inputs, **options)
    for out in (expected.astype(inputs[0].dtype), twin(*inputs, **options)):
        assert judge.judge(xp.asarray(out)).complaint is None
    if dtype == "float32":  # in 16 bits a sink may be less than what is allowed
        others = {"causal": options["causal"]} if "causal" in options else {}
        without, _ = oracle(*inputs, **others)
        assert judge.judge(xp.asarray(without.astype(np.float32))).complaint is not None


def test_dropped_weights(xp: ModuleType, rng: np.random.Generator) -> None:
    inputs = random_inputs(rng, "float16", b=2, hq=3, sq=40, sk=90, d=16)
    given = dict(zip("qkv", map(xp.asarray, inputs), strict=True))
    options = {"dropout_p": 0.4, "causal": True}
    for seed, right in ((5, True), (6, False)):
        problem, given_ones = _of_arrays(given, {**options, "seed": seed}, timed=False)
        keep = cufa.dropout_mask((2, 3, 40, 90), 0.4, 5) / Dropout(0.4).keep
        out = oracle(*inputs, causal=True, keep=keep)[0].astype(np.float16)
        judge = Oracle(xp, problem, given_ones)
        assert (judge.judge(xp.asarray(out)).complaint is None) == right


@pytest.mark.parametrize("name", ["Alibi", "BiasBfloat16", "Mask", "MaskBits", "Sinks"])
def test_what_is_drawn_beside(xp: ModuleType, rng: np.random.Generator, name: str) -> None:
    inputs = random_inputs(rng, "float32", b=2, hq=4, sq=60, sk=130, d=16)
    problem = problem_of(*inputs, "float32").reading(name)
    drawn_ones = drawn(problem, xp)
    ((argument, array),) = drawn_ones.arrays.items()
    given = drawn_ones._replace(tensors=tuple(map(xp.asarray, inputs)))
    judge = Oracle(xp, problem, given)
    host: Any = {argument: array if xp is np else array.get()}
    out = oracle(*inputs, **host)[0].astype(np.float32)
    assert judge.judge(xp.asarray(out)).complaint is None
    out = oracle(*inputs)[0].astype(np.float32)
    assert judge.judge(xp.asarray(out)).complaint is not None


def test_reference_is_float64(xp: ModuleType) -> None:
    judge, expected, _ = judge_of(xp, "float32", SHAPES[1], causal=True, scale=-0.3)
    assert judge.judge(xp.asarray(expected)).max_error < 2e-7  # float32's rounding


def without_last_key(inputs: Any, expected: np.ndarray) -> np.ndarray:
    q, k, v = inputs
    return oracle(q, k[:, :, :-1], v[:, :, :-1])[0]


def heads_swapped(inputs: Any, expected: np.ndarray) -> np.ndarray:
    return expected[:, ::-1].copy()


def wrong_scale(inputs: Any, expected: np.ndarray) -> np.ndarray:
    return oracle(*inputs, scale=0.9 * inputs[0].shape[-1] ** -0.5)[0]


def one_row_shifted(inputs: Any, expected: np.ndarray) -> np.ndarray:
    wrong = expected.copy()
    wrong[1, 2, 17] = expected[1, 2, 18]
    return wrong


def one_nan(inputs: Any, expected: np.ndarray) -> np.ndarray:
    wrong = expected.copy()
    wrong[1, 0, 5, 3] = np.nan
    return wrong


def untouched(inputs: Any, expected: np.ndarray) -> np.ndarray:
    return np.full_like(expected, np.nan)


@pytest.mark.parametrize(
    "mistake",
    [without_last_key, heads_swapped, wrong_scale, one_row_shifted, one_nan, untouched],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_refuses_wrong_results(
    xp: ModuleType, dtype: str, mistake: Callable[[Any, np.ndarray], np.ndarray]
) -> None:
    judge, expected, inputs = judge_of(xp, dtype, SHAPES[0])
    wrong = mistake(inputs, expected).astype(inputs[0].dtype)
    assert judge.judge(xp.asarray(wrong)).complaint is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_refuses_a_mask_that_is_off_by_one(xp: ModuleType, dtype: str) -> None:
    judge, _, (q, k, v) = judge_of(xp, dtype, SHAPES[0], causal=True)
    scores = (q.astype(np.float64) @ k.swapaxes(-1, -2).astype(np.float64)) / 4
    scores[..., hidden_keys(33, 66)[:, :65]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wrong = weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64)
    assert "exceeds" in str(judge.judge(xp.asarray(wrong.astype(q.dtype))).complaint)


def test_rows_without_a_key_are_zero(xp: ModuleType) -> None:
    judge, expected, _ = judge_of(xp, "float16", SHAPES[1], causal=True)
    out = expected.astype(np.float16)
    assert not out[:, :, : 70 - 41].any()
    assert judge.judge(xp.asarray(out)).complaint is None
    out[0, 0, 0] = 1
    assert judge.judge(xp.asarray(out)).complaint is not None


def test_nan_outside_the_sample_is_found(xp: ModuleType) -> None:
    inputs = random_inputs(np.random.default_rng(1), "float32", sq=9001, sk=2, d=8, hq=7)
    given = Inputs(tuple(map(xp.asarray, inputs)))
    judge = Oracle(xp, problem_of(*inputs, "float32"), given)
    out = oracle(*inputs)[0].astype(np.float32)
    assert judge.judge(xp.asarray(out)).complaint is None
    out[0, 1, 77] = np.nan  # a head that is not among the sampled
    assert "finite" in str(judge.judge(xp.asarray(out)).complaint)


def test_chunks_make_no_difference(xp: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected, _ = judge_of(xp, "float16", SHAPES[1], causal=True)
    out = xp.asarray(expected.astype(np.float16))
    monkeypatch.setattr(explorer_oracle, "CHUNK_BYTES", 3000)
    chunked, _, _ = judge_of(xp, "float16", SHAPES[1], causal=True)
    assert chunked.judge(out).max_error == pytest.approx(whole.judge(out).max_error, abs=1e-12)
    assert chunked._bound == pytest.approx(whole._bound, rel=0.3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_inputs_must_be_finite(xp: ModuleType, bad: float) -> None:
    q, k, v = random_inputs(np.random.default_rng(2), "float16", sq=9, d=8)
    k[0, 0, 4, 4] = bad
    problem = problem_of(q, k, v, "float16")
    given = Inputs(tuple(map(xp.asarray, (q, k, v))))
    with pytest.raises(ValueError, match="finite"):
        Oracle(xp, problem, given)


def test_same_bits(xp: ModuleType) -> None:
    a = xp.asarray(np.array([[0.0, np.nan]], np.float16))
    assert same_bits(a, a.copy())
    assert not same_bits(a, -a)


@pytest.mark.parametrize(("b", "hq"), [(1, 1), (1, 2), (2, 1), (3, 5), (8, 16), (1, 4)])
def test_sampled_heads(b: int, hq: int) -> None:
    heads = sampled_heads(b, hq)
    assert len(set(heads)) == len(heads) == min(4, b * hq)
    assert heads[0] == (0, 0)
    assert heads[-1] == (b - 1, hq - 1)


@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
@pytest.mark.parametrize("seq", [1, 2, 100, 255, 1024, 2175, 2176, 4096, 5000, 16384, 131072])
def test_sampled_rows_reach_every_row_of_a_tile(seq: int, pairs: int) -> None:
    rows = sampled_rows(seq, pairs)
    assert rows.min() == 0
    assert rows.max() == seq - 1
    assert rows.shape[0] == pairs
    assert rows.size <= max(512 + 8, min(seq, 6000) * pairs)
    for bm in (16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256):
        assert set(range(min(bm, seq))) <= set((rows % bm).ravel()), bm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sq", "sk", "d"), [(64, 512, 64), (64, 300, 128), (32, 4096, 64)])
def test_allows_what_the_tests_allow(dtype: str, sq: int, sk: int, d: int) -> None:
    for seed in range(3):
        inputs = random_inputs(np.random.default_rng(seed), dtype, sq=sq, sk=sk, d=d)
        judge = Oracle(np, problem_of(*inputs, dtype), Inputs(inputs))
        error = float(np.abs(twin(*inputs).astype(np.float64) - oracle(*inputs)[0]).max())
        assert 1.0 < judge._bound / error < 7
        assert judge.judge(cufa.attention(*inputs)).complaint is None
