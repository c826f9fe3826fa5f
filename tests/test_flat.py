"""Products with few rows and what is done with rows: kernels of scripts/models, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models import DTYPES, flat, rows
from script_kernels import on, script_kernels  # noqa: F401

# Ruff takes the fixture for a name that arguments hide.
# ruff: noqa: F811


def as_numpy(array: Any) -> np.ndarray:
    found = array if isinstance(array, np.ndarray) else array.get()
    return found.astype(np.float64)


def drawn(xp: Any, shape: tuple[int, ...], dtype: str, seed: int, scale: float = 1) -> Any:
    values = scale * np.random.default_rng(seed).standard_normal(shape)
    return xp.asarray(values.astype(DTYPES[dtype]))


GATES = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "clamped": lambda x: np.minimum(x, 7) / (1 + np.exp(-1.702 * np.minimum(x, 7))),
}


def opened(gate: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return what a gate makes of two operands."""
    return GATES[gate](a) * (b.clip(-7, 7) + 1 if gate == "clamped" else b)


#: Tolerances of numbers of magnitude 1.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def close(found: Any, expected: np.ndarray, dtype: str) -> bool:
    error = np.abs(as_numpy(found) - expected)
    return bool((error <= TOLERANCE[dtype] * (1 + np.abs(expected))).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "outputs", "inputs"), [(3, 50, 1608), (9, 24, 40), (37, 17, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_products(on: Any, dtype: str, count: int, outputs: int, inputs: int, bias: bool) -> None:
    if on is np and dtype == "float16":
        count = min(count, flat.GROUP_ROWS)  # more are as in bfloat16
    weight = drawn(on, (outputs, inputs), dtype, 1, inputs**-0.5)
    x = drawn(on, (count, inputs), dtype, 2)
    b = drawn(on, (outputs,), "float32", 3) if bias else None
    expected = as_numpy(x) @ as_numpy(weight).T + (0 if b is None else as_numpy(b))
    found = flat.product(weight, b, x, DTYPES[dtype])
    assert found.dtype == DTYPES[dtype]
    assert close(found, expected, dtype)
    assert close(flat.product(weight, b, x, DTYPES["float32"]), expected, "float32")
    sums = drawn(on, (count, outputs), "float32", 4)
    before = as_numpy(sums)
    flat.add_product(weight, b, x, sums)
    assert close(sums, before + expected, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "outputs"), [(1, 32), (8, 2 * 13)])
@pytest.mark.parametrize("gate", GATES)
def test_gates(on: Any, dtype: str, count: int, outputs: int, gate: str) -> None:
    weight = drawn(on, (outputs, 200), dtype, 1, 0.5)
    x = drawn(on, (count, 200), dtype, 2)
    bias = drawn(on, (outputs,), "float32", 3)
    a, b = np.split(as_numpy(x) @ as_numpy(weight).T + as_numpy(bias), 2, axis=1)
    found = flat.gated_product(weight, bias, x, gate)
    assert found.dtype == DTYPES[dtype]
    assert close(found, opened(gate, a, b), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_company(on: Any, dtype: str) -> None:
    weight, x = drawn(on, (16, 264), dtype, 1), drawn(on, (40, 264), dtype, 2)
    alone = [as_numpy(flat.product(weight, None, x[i : i + 1], DTYPES["float32"])) for i in (0, 7)]
    for count in (2, 9, 17, 40):
        found = as_numpy(flat.product(weight, None, x[:count], DTYPES["float32"]))
        assert np.array_equal(found[:1], alone[0])
        assert count < 8 or np.array_equal(found[7:8], alone[1])


def test_what_it_takes() -> None:
    cupy = pytest.importorskip("cupy")
    weight = np.zeros((3, 8), np.float16)
    assert not flat.takes(weight, 1)  # NumPy's own product is for those
    fake: Any = type("Array", (), {"shape": (3, 8), "itemsize": 2, "module": cupy})()
    assert flat.takes(fake, 1)
    assert flat.takes(fake, flat.MOST_ROWS)
    assert not flat.takes(fake, flat.MOST_ROWS + 1)
    fake.shape = (3, 12)
    assert not flat.takes(fake, 1)


@pytest.mark.parametrize(("width", "heads"), [(72, 0), (2000, 0), (32, 5)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rms_norm(on: Any, dtype: str, width: int, heads: int) -> None:
    shape = (3, heads, width) if heads else (3, width)
    whole = drawn(on, (3, 2 * width * max(1, heads)), dtype if heads else "float32", 1)
    x = (
        whole[:, : width * max(1, heads)].reshape(shape)
        if heads
        else drawn(on, shape, "float32", 1)
    )
    weight = drawn(on, shape[1:], "float32", 2)
    values = as_numpy(x)
    scale = 1 / np.sqrt((values**2).mean(axis=-1, keepdims=True) + 1e-5)
    y = x if heads else on.empty(shape, DTYPES[dtype])
    rest = as_numpy(whole)[:, width * heads :]
    rows.rms_norm(x, weight, y, 1e-5)
    assert close(y, values * scale * as_numpy(weight), dtype)
    if heads:
        assert np.array_equal(as_numpy(whole)[:, width * heads :], rest)


@pytest.mark.parametrize(("dtype", "width"), [("float16", 35), ("bfloat16", 64), ("float32", 12)])
@pytest.mark.parametrize("gate", GATES)
def test_gated(on: Any, dtype: str, width: int, gate: str) -> None:
    x = drawn(on, (3, 2 * width), dtype, 1, 6)
    a, b = np.split(as_numpy(x), 2, axis=1)
    found = rows.gated(x, gate)
    assert found.dtype == DTYPES[dtype]
    assert close(found, opened(gate, a, b), dtype)


def test_largest(on: Any) -> None:
    x = np.random.default_rng(1).standard_normal((4, 3001)).astype(np.float32)
    x[1, [2999, 17, 2048]] = 9
    x[2] = -np.inf
    x[3] = np.nan
    found = rows.largest(on.asarray(x))
    assert as_numpy(found).tolist() == [x[0].argmax(), 17, 0, 0]


@pytest.mark.parametrize(
    ("width", "count"), [(5000, 50), (5000, 1024), (1500, 1), (70, 70), (1024, 700)]
)
def test_top(on: Any, width: int, count: int) -> None:
    rng = np.random.default_rng(width + count)
    x = rng.standard_normal((4, width)).astype(np.float32)
    x[1] = rng.integers(-2, 2, width)  # many are equal
    x[2] = 0
    x[2, ::3] = -0.0
    x[3, width // 2 :] = -np.inf
    found = as_numpy(rows.top(on.asarray(x), count))
    assert np.array_equal(found, np.argsort(-x, axis=-1, kind="stable")[:, :count])
