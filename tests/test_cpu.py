"""cpu/attention.py: what tiling can get wrong."""

from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_accepted, hidden_keys, oracle, random_inputs

from cufa.arrays import Operands
from cufa.cpu import attention as cpu
from cufa.problem.parse import parse
from cufa.problem.problem import Problem


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    problem, operands = parse({"q": q, "k": k, "v": v, "causal": causal, "scale": scale}, np)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operands = operands._replace(out=np.empty((*q.shape[:3], v.shape[3]), q.dtype))
        return operands.out, cpu.attention(problem, operands)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 3 rows by 4 keys, so that small inputs have many of them and ragged ends."""
    monkeypatch.setattr(cpu, "ROWS", 3)
    monkeypatch.setattr(cpu, "KEYS", 4)
    monkeypatch.setattr(cpu, "STEP_ELEMENTS", 150)


@given(
    b=st.integers(1, 3),
    hk=st.integers(1, 4),
    group=st.integers(1, 7),
    sq=st.integers(0, 11),
    sk=st.integers(0, 13),
    dv=st.integers(1, 9),
    causal=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_division_into_tiles(
    b: int, hk: int, group: int, sq: int, sk: int, dv: int, causal: bool
) -> None:
    rng = np.random.default_rng(b + hk + sq + sk)
    q, k, v = random_inputs(rng, "float32", b=b, hq=hk * group, hk=hk, sq=sq, sk=sk, d=5, dv=dv)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ROWS", 3), ("KEYS", 4), ("STEP_ELEMENTS", 150)):
            patch.setattr(cpu, name, value)
        out, lse = attention(q, k, v, causal=causal)
    # Not the rule of reference.py: it compares two maxima, which means little for a few elements.
    expected, expected_lse = oracle(q, k, v, causal=causal)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["rising", "falling"])
def test_maximum_is_combined_over_tiles(rng: np.random.Generator, order: slice) -> None:
    """Scores that differ by hundreds between tiles: a maximum that is replaced overflows."""
    q, k, v = random_inputs(rng, "float32", sq=5, sk=23, d=4)
    q[...] = 1
    k[...] = np.linspace(-200, 200, 23, dtype=np.float32)[order, None]
    out, lse = attention(q, k, v)
    assert_accepted(out, lse, q, k, v)
    assert lse.max() > 300


def test_plan_covers_every_pair_and_bounds_the_step() -> None:
    for b, hk, group, sq, sk, d in [
        (1, 1, 1, 1, 1, 1),
        (0, 0, 1, 0, 0, 8),
        (64, 12, 1, 20, 20, 32),
        (3, 5, 7, 999, 4000, 128),
        (2, 1, 1000, 1, 5, 256),
        (500, 8, 4, 1, 5000, 128),
    ]:
        problem = Problem("float32", b, hk * group, hk, sq, sk, d, d, 1.0)
        step = cpu.plan(problem)
        assert min(step) >= 1
        if step.batch * step.heads_kv > 1:
            pairs = step.batch * step.heads_kv
            scores = step.rows * step.group * step.keys
            assert pairs * (scores + 2 * d * step.keys) <= cpu.STEP_ELEMENTS
        assert step.heads_kv == hk or step.batch == 1
        assert "\n" not in str(step)


def test_memory_is_bounded(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", sq=4001, d=8)
    tracemalloc.start()
    attention(q, k, v)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20  # the scores alone are 64 MB


def test_result_goes_into_out(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float16", b=2, hq=4, hk=2, sq=5, sk=7, d=8)
    problem = Problem.of_shapes(q.shape, k.shape, v.shape)
    buffer = np.full((2, 5, 4, 10), np.nan, np.float16)
    out = buffer[..., 1:9].swapaxes(1, 2)
    cpu.attention(problem, Operands(q, k, v, out))
    assert np.isnan(buffer[..., [0, 9]]).all()
    expected, _ = attention(q, k, v)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize(("sq", "sk"), [(11, 11), (5, 13), (13, 6)])
def test_hidden_keys_never_reach_a_result(
    rng: np.random.Generator, poison: float, which: str, sq: int, sk: int
) -> None:
    """Within a tile on the diagonal, too, where the weight is 0 and 0 * NaN would be NaN."""
    q, k, v = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=sq, sk=sk, d=8)
    clean, clean_lse = attention(q, k, v, causal=True)
    for j in range(sk):
        spoiled = {"k": k.copy(), "v": v.copy()}
        spoiled[which][1, 0, j, 3] = poison
        before = spoiled[which].copy()
        out, lse = attention(q, spoiled["k"], spoiled["v"], causal=True)
        np.testing.assert_array_equal(spoiled[which], before)
        same = np.ones((2, 4, sq), bool)
        same[1, :2] = hidden_keys(sq, sk)[:, j]  # heads 0 and 1 use K/V head 0
        np.testing.assert_allclose(out[same], clean[same], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(lse[same], clean_lse[same])
        if which == "v":
            assert not np.isfinite(out[~same][:, 3]).any()
            np.testing.assert_array_equal(lse, clean_lse)
        elif np.isnan(poison):
            assert np.isnan(out[~same]).all()


def test_nan_in_a_query_stays_in_its_row(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", sq=5, sk=7, d=8)
    expected, _ = attention(q, k, v)
    q[0, 0, 2, 1] = np.nan
    out, lse = attention(q, k, v)
    assert np.isnan(out[0, 0, 2]).all()
    assert np.isnan(lse[0, 0, 2])
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(out[0, 0, others], expected[0, 0, others])


@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.asfortranarray(x),
        lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        lambda x: np.repeat(x, 2, axis=3)[..., ::2],
        lambda x: np.broadcast_to(x[:1, :1], x.shape),
        lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    ],
    ids=["fortran", "reversed", "every second", "broadcast", "misaligned"],
)
def test_odd_strides(rng: np.random.Generator, change: Any) -> None:
    q, k, v = (change(x) for x in random_inputs(rng, "float32", b=2, hq=2, sq=9, sk=17, d=8))
    out, lse = attention(q, k, v, causal=True)
    assert_accepted(out, lse, q, k, v, causal=True)


def test_float32_is_float32_accurate(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", hq=2, sq=600, sk=1100, d=64)
    out, lse = attention(q, k, v)
    expected, expected_lse = oracle(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("q", "k", "scale"),
    [
        (1e30, 1e-38, 2.0**40),  # scale * q overflows
        (1e-30, 1e38, 1e-15),  # scale * q underflows
        (1e10, 1e10, 2.0**63),  # the scores overflow, all but their largest are infinitely less
        (1e10, 1e10, 0.0),
    ],
    ids=["large", "small", "overflow", "zero"],
)
def test_the_scale_multiplies_differences_of_products(
    q: float, k: float, scale: float, sign: int
) -> None:
    """As on the GPU: what q, k and their products hold is not lost to the scale."""
    rng = np.random.default_rng(0)
    rows = np.abs(rng.standard_normal((3, 1, 2, 9, 4), np.float32)) + 1
    arrays = (rows * np.array([q, k, 1], np.float32).reshape(3, 1, 1, 1, 1)).astype(np.float32)
    out, lse = attention(*arrays, causal=True, scale=sign * scale)
    expected, expected_lse = oracle(*arrays, causal=True, scale=sign * scale)
    np.testing.assert_allclose(out, expected, rtol=1e-3)
    with np.errstate(over="ignore"):
        expected_lse = expected_lse.astype(np.float32)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-12)


def test_overflow_of_the_result_is_infinite_and_silent() -> None:
    q = np.zeros((1, 1, 1, 8), np.float16)
    v = np.full((1, 1, 2, 8), 65504, np.float16)
    out, lse = attention(q, q.repeat(2, axis=2), v)
    assert np.all(out == 65504)
    assert lse[0, 0, 0] == np.float32(np.log(2))
