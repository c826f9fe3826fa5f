"""A mixture of experts for few tokens: the kernels of scripts/models, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models import DTYPES, experts
from script_kernels import on, script_kernels  # noqa: F401
from test_flat import as_numpy, close, drawn, opened

# Ruff takes the fixture for a name that arguments hide.
# ruff: noqa: F811


def chosen_of(logits: np.ndarray, chosen: int) -> np.ndarray:
    """Return the experts of each token, from the largest logit on; of equal ones the first."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :chosen]


@pytest.mark.parametrize(
    ("tokens", "count", "chosen"), [(1, 32, 4), (64, 7, 3), (5, 128, 4), (3, 2, 2), (64, 300, 16)]
)
def test_route(on: Any, tokens: int, count: int, chosen: int) -> None:
    logits = np.random.default_rng(tokens).standard_normal((tokens, count)).astype(np.float32)
    logits[::3] = logits[::3].round()  # many are equal
    taken = experts.route(on.asarray(logits), chosen)
    expected = chosen_of(logits, chosen)
    weights = np.exp(np.take_along_axis(logits, expected, axis=-1).astype(np.float64))
    shares = weights / weights.sum(axis=-1, keepdims=True)
    assert np.abs(as_numpy(taken.shares) - shares).max() < 1e-6
    sorted_ = np.argsort(expected.reshape(-1), kind="stable")
    assert np.array_equal(as_numpy(taken.pairs), sorted_)
    numbers, firsts, counts = np.unique(
        expected.reshape(-1)[sorted_], return_index=True, return_counts=True
    )
    slots = as_numpy(taken.slots)
    assert len(slots) == min(tokens * chosen, count)
    assert np.array_equal(slots[: len(numbers)], np.stack([numbers, firsts, counts], axis=1))
    assert not slots[len(numbers) :].any()


def test_what_is_no_number_leads_to_an_expert_all_the_same(on: Any) -> None:
    logits = np.full((4, 5), np.nan, np.float32)
    logits[1] = -np.inf
    logits[2] = np.inf
    logits[3] = np.array([0x7FFFFFFF] * 5, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        taken = experts.route(on.asarray(logits), 2)
    slots = as_numpy(taken.slots)
    assert ((slots[:, 0] >= 0) & (slots[:, 0] < 5)).all()
    assert slots[:, 2].sum() == 8
    assert np.array_equal(np.sort(as_numpy(taken.pairs)), np.arange(8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"), [(1, 264, 21), (6, 40, 24), (37, 96, 32), (64, 32, 8)]
)
@pytest.mark.parametrize(("gate", "bias"), [("clamped", True), ("silu", False)])
def test_products(
    on: Any, dtype: str, tokens: int, hidden: int, inner: int, gate: str, bias: bool
) -> None:
    if on is np and dtype == "float16":
        tokens = min(tokens, 8)  # more are as in bfloat16
    count, chosen = 7, 3
    logits = drawn(on, (tokens, count), "float32", 1, 4)
    weight = drawn(on, (count, 2 * inner, hidden), dtype, 2, 3 * hidden**-0.5)
    b = drawn(on, (count, 2 * inner), "float32", 3) if bias else None
    x = drawn(on, (tokens, hidden), dtype, 4)
    taken = experts.route(logits, chosen)
    found = experts.gated_product(weight, b, x, taken, gate)
    assert found.dtype == DTYPES[dtype]
    expected = chosen_of(as_numpy(logits), chosen)
    both = np.einsum("th,tcoh->tco", as_numpy(x), as_numpy(weight)[expected])
    if b is not None:
        both += as_numpy(b)[expected]
    both = both.reshape(tokens * chosen, -1)
    assert close(found, opened(gate, both[:, :inner], both[:, inner:]), dtype)

    y = drawn(on, (tokens * chosen, hidden), dtype, 5)
    given = experts.product(weight, b, y, taken)
    assert given.dtype == np.float32
    rows = np.einsum("ph,poh->po", as_numpy(y), as_numpy(weight)[expected.reshape(-1)])
    if b is not None:
        rows += as_numpy(b)[expected.reshape(-1)]
    assert close(given, rows, "float32")

    sums = drawn(on, (tokens, 2 * inner), "float32", 6)
    before = as_numpy(sums)
    experts.add_shares(given, taken, sums)
    shared = rows.reshape(tokens, chosen, -1) * as_numpy(taken.shares)[..., None]
    assert close(sums, before + shared.sum(axis=1), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_in_any_company(on: Any, dtype: str) -> None:
    weight, x = drawn(on, (4, 16, 264), dtype, 1), drawn(on, (40, 264), dtype, 2)
    logits = drawn(on, (40, 4), "float32", 3)

    def outputs(tokens: Any) -> np.ndarray:
        taken = experts.route(on.ascontiguousarray(logits[tokens]), 2)
        inner = experts.gated_product(weight, None, x[tokens], taken, "clamped")
        return as_numpy(inner).reshape(-1, 2, 8)

    alone = outputs(slice(7, 8))
    for count in (8, 9, 17, 40):
        assert np.array_equal(outputs(slice(count))[7:8], alone)


def test_what_they_take() -> None:
    cupy = pytest.importorskip("cupy")
    fake: Any = type("Array", (), {"shape": (3, 8), "itemsize": 2, "module": cupy})()
    assert experts.takes([fake, fake], 32, 4, 64)
    assert not experts.takes([fake], 32, 4, 65)
    assert not experts.takes([fake], 32, 17, 64)
    assert not experts.takes([np.zeros((3, 8), np.float16)], 32, 4, 1)
