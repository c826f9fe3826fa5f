"""cufa/expression: functions that were traced into C++ give what NumPy gives, on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated import FOLDERS, needs_compiler
from shared_libraries import Sources

from cufa.arrays import ArrayInfo
from cufa.features.expression.tracing import trace
from cufa.features.parts import part_named
from cufa.problem.extras import Extras, placed

FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.25, -7.25, 1e-3, 40.0, np.inf, -np.inf, np.nan],
    np.float32,
)
INTS = np.array([0, 1, -1, 2, -2, 3, 7, -7, 31, 32, -33, 100, 2**31 - 1, -(2**31)], np.int32)
LONGS = INTS.astype(np.int64) << 20
BOOLS = np.arange(len(INTS)) % 3 == 1

#: Functions of two floats, two integers of 32 bits, two of 64, and two bools.
CASES: dict[str, Callable[..., Any]] = {
    "sums": lambda x, y, i, j, m, n, p, q: (x + y) * 2 - (1 - x),
    "products of integers": lambda x, y, i, j, m, n, p, q: np.where(i * j - (i + 3) > 5, i, -j),
    "integers wrap": lambda x, y, i, j, m, n, p, q: i * 1000003 + j,
    "long integers": lambda x, y, i, j, m, n, p, q: (m * 3 - n) % 1009 + i,
    "quotients of integers": lambda x, y, i, j, m, n, p, q: i // j,
    "remainders of integers": lambda x, y, i, j, m, n, p, q: i % j,
    "remainders as in C": lambda x, y, i, j, m, n, p, q: np.fmod(i, j) - np.fmod(j, 5),
    "quotients of long ones": lambda x, y, i, j, m, n, p, q: (m // n) % 1000 - m % (n + 1) % 977,
    "quotients of floats": lambda x, y, i, j, m, n, p, q: x // y,
    "remainders of floats": lambda x, y, i, j, m, n, p, q: x % y,
    "fmod of floats": lambda x, y, i, j, m, n, p, q: np.fmod(x, y),
    "divmod": lambda x, y, i, j, m, n, p, q: sum(divmod(i, 7)) - divmod(x, 2.0)[1],
    "true division": lambda x, y, i, j, m, n, p, q: x / 3 + i / 7 + 1 / (y + 100),
    "powers": lambda x, y, i, j, m, n, p, q: x**2 + y**-1 + (i % 5) ** 3 + x**0 + y**1.0,
    "other powers": lambda x, y, i, j, m, n, p, q: np.abs(x) ** 1.5 + 2.0 ** (y % 7),
    "larger and smaller": lambda x, y, i, j, m, n, p, q: np.maximum(x, y) - np.minimum(i, j),
    "those but NaN": lambda x, y, i, j, m, n, p, q: np.fmax(x, y) + np.fmin(y, 0.25),
    "clip": lambda x, y, i, j, m, n, p, q: np.clip(x, -1, 2) + np.clip(i, -3, j),
    "signs": lambda x, y, i, j, m, n, p, q: np.sign(x) + np.sign(i) - abs(j // 2) + abs(y) - -x,
    "copysign": lambda x, y, i, j, m, n, p, q: np.copysign(np.fabs(x), y) + np.positive(i),
    "roots": lambda x, y, i, j, m, n, p, q: np.sqrt(x) + np.sqrt(i) + np.hypot(y, 2),
    "exponentials": lambda x, y, i, j, m, n, p, q: np.exp(x) - np.exp2(y) + np.expm1(-x),
    "logarithms": lambda x, y, i, j, m, n, p, q: np.log(x) + np.log2(y) + np.log10(x),
    "log1p": lambda x, y, i, j, m, n, p, q: np.log1p(x),
    "circular": lambda x, y, i, j, m, n, p, q: np.sin(x) + np.cos(y) * np.tan(x),
    "their inverses": lambda x, y, i, j, m, n, p, q: np.arcsin(x / 9) + np.arccos(y / 50),
    "arcs": lambda x, y, i, j, m, n, p, q: np.arctan(x) - np.arctan2(x, y),
    "hyperbolic": lambda x, y, i, j, m, n, p, q: np.sinh(x) * np.where(q, 1, 2),
    "tangents": lambda x, y, i, j, m, n, p, q: np.cosh(y) + np.tanh(x),
    "rounding": lambda x, y, i, j, m, n, p, q: np.floor(x) + np.ceil(y) * np.trunc(x) + np.rint(y),
    "rounding of integers": lambda x, y, i, j, m, n, p, q: np.floor(i) // 2 - np.ceil(j) // 3,
    "squares": lambda x, y, i, j, m, n, p, q: np.square(x) - np.square(i % 100),
    "bounds": lambda x, y, i, j, m, n, p, q: (
        np.clip(x, None, 1) + np.clip(i, a_min=3, a_max=None) + np.clip(y, min=-1, max=2)
    ),
    "comparisons": lambda x, y, i, j, m, n, p, q: (x < y) | (i >= j) & (m != n) ^ (y <= 2),
    "others": lambda x, y, i, j, m, n, p, q: (x == y) | ~(i > j) | (p == q),
    "logic": lambda x, y, i, j, m, n, p, q: np.logical_or(
        np.logical_and(p, i), np.logical_xor(q, np.logical_not(x))
    ),
    "arithmetic of bools": lambda x, y, i, j, m, n, p, q: (p + q) * p + (p * 3 + q * 0.5),
    "larger bools": lambda x, y, i, j, m, n, p, q: np.where(np.maximum(p, q), 1, np.minimum(p, q)),
    "bits": lambda x, y, i, j, m, n, p, q: (i & 0xFF) - (j | 5) // 9 + ((m ^ n) & 1023) - ~i // 3,
    "bits of bools": lambda x, y, i, j, m, n, p, q: np.where(~p ^ q, x, y),
    "shifts": lambda x, y, i, j, m, n, p, q: (i >> 3) + (j << 2) - (i >> np.abs(j % 50)),
    "tests": lambda x, y, i, j, m, n, p, q: np.isnan(x) | np.isinf(y) & ~np.isfinite(x + y),
    "where": lambda x, y, i, j, m, n, p, q: np.where(p, np.where(x > 0, x, i), np.where(q, 1, 2.5)),
    "conversions": lambda x, y, i, j, m, n, p, q: (
        np.where(np.isfinite(x), x, 0).astype(np.int32)
        + i.astype(np.float32)
        + p.astype(int)
        + j.astype(bool)
    ),
    "constants": lambda x, y, i, j, m, n, p, q: np.where(p, -(2**31), 2**31 - 1) + np.float32(0.1),
    "large constants": lambda x, y, i, j, m, n, p, q: (m + 2**40) // 2**20 - (n - 2**62) % 4093,
    "infinities": lambda x, y, i, j, m, n, p, q: np.where(p, np.inf, np.where(q, -np.inf, np.nan)),
    "NumPy's numbers": lambda x, y, i, j, m, n, p, q: x * np.float32(0.1) + np.int32(3) - np.True_,
}

RUN = """
extern "C" void run_{i}(const void* part, int queries, int keys, float* out) {{
    const Sequence sequence{{queries, keys}};
    for (int query = 0; query < queries; ++query)
        for (int key = 0; key < keys; ++key)
            *out++ = static_cast<const {name}*>(part)->score(0.f, {{sequence, 0, 0, query, key}});
}}
"""


def compiled(parts: list[str]) -> Any:
    """Compile the structs of some parts for the host."""
    lines = ['#include "score.cuh"', "SHARED_MEMORY(SHARED_PAGES)"]
    lines += [part_named(name).source for name in parts]
    lines += [RUN.format(i=i, name=name) for i, name in enumerate(parts)]
    # Products are rounded before they are added, as in NumPy.
    return ctypes.CDLL(str(Sources(*FOLDERS).library("\n".join(lines), "-ffp-contract=off")))


def info(array: np.ndarray) -> ArrayInfo:
    return ArrayInfo(array.shape, array.strides, array.dtype)


def parameter(part: str, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the members of a part's struct."""
    sizes = dict.fromkeys("bhqk", 1)
    found = placed((part,), 4, sizes, Extras(mods=tuple(map(info, arrays))))
    values = list(found[0])
    numbers = part_named(part).numbers
    places = [i for i, number in enumerate(numbers) if number.dtype == "u8"]
    for i, array in zip(places, arrays, strict=True):
        values[i] = array.ctypes.data
    return np.array([tuple(values)], np.dtype(list(numbers), align=True))


def evaluated(run: Any, part: str, arrays: tuple[np.ndarray, ...], sizes: tuple[int, int]) -> Any:
    """Return what a part makes of scores of 0."""
    out = np.full(sizes, np.nan, np.float32)
    members = parameter(part, arrays)
    run(ctypes.c_void_p(members.ctypes.data), *sizes, ctypes.c_void_p(out.ctypes.data))
    return out


def of_pairs(case: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    """Return a case as a function of a score, and what it gives in NumPy."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        x, i, m, p = FLOATS[q_idx], INTS[q_idx], LONGS[q_idx], BOOLS[q_idx]
        y, j, n, q = FLOATS[kv_idx], INTS[kv_idx], LONGS[kv_idx], BOOLS[kv_idx]
        result = case(x, y, i, j, m, n, p, q)
        return np.where(score == score, result, 0)  # whatever its type is

    rows, columns = np.ix_(np.arange(len(FLOATS)), np.arange(len(FLOATS)))
    with np.errstate(all="ignore"):
        return score_mod, score_mod(np.float32(0), 0, 0, rows, columns)


@pytest.fixture(scope="module")
def of_cases() -> Any:
    """Compile all cases at once."""
    made = {name: trace(of_pairs(case)[0], None) for name, case in CASES.items()}
    parts = [found.parts[0] for found in made.values()]
    library = compiled(parts)
    return {name: (library[f"run_{i}"], found) for i, (name, found) in enumerate(made.items())}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_cases_give_what_numpy_gives(of_cases: Any, name: str) -> None:
    run, found = of_cases[name]
    _, expected = of_pairs(CASES[name])
    out = evaluated(run, found.parts[0], found.arrays, (len(FLOATS), len(FLOATS)))
    expected = np.broadcast_to(np.asarray(expected, np.float64), out.shape)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(out, expected.astype(np.float32), rtol=2e-5, atol=2e-6)


ELEMENTS = [
    *(np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64),
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64),
]


def read_by(arrays: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that reads arrays of 0 to 3 axes, of any element type."""
    none, one, two, three = (arrays[name] for name in ("none", "one", "two", "three"))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        total = np.where(two[kv_idx % 5, 2 - q_idx % 3], 1, 2) + one[-1 - q_idx % 7] * 1.0
        return score + total + three[kv_idx % 2, -1, q_idx % 4] * 1.0 - none * 0.5

    return score_mod


def strided(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    """Draw such arrays, with strides of either sign and of 0."""
    numbers = rng.integers(0 if np.dtype(dtype).kind in "bu" else -9, 9, 200).astype(dtype)
    return {
        "none": numbers[7].reshape(()),
        "one": numbers[::-3][:7],
        "two": np.broadcast_to(numbers[20:23], (5, 3)),
        "three": numbers[:24].reshape(4, 3, 2).T,
    }


@needs_compiler
def test_arrays_of_all_types_and_strides(rng: np.random.Generator) -> None:
    drawn = [strided(rng, dtype) for dtype in ELEMENTS]
    made = [trace(read_by(arrays), None) for arrays in drawn]
    assert len({found.parts for found in made}) == len(ELEMENTS)
    library = compiled([found.parts[0] for found in made])
    rows, columns = np.ix_(np.arange(30), np.arange(20))
    for i, (arrays, found) in enumerate(zip(drawn, made, strict=True)):
        expected = read_by(arrays)(np.float32(0), 0, 0, rows, columns)
        out = evaluated(library[f"run_{i}"], found.parts[0], found.arrays, (30, 20))
        np.testing.assert_allclose(out, expected.astype(np.float64), 1e-6, 4e-6, err_msg=str(i))


@needs_compiler
def test_an_index_of_what_there_is_not() -> None:
    """The nearest is read, of any length that the array has by then."""

    def made(table: Any) -> Any:
        return trace(
            lambda s, b, h, q_idx, kv_idx: table[q_idx - kv_idx] + 100 * table[q_idx], None
        )

    table = np.arange(1, 8, dtype=np.int16)
    part = made(table).parts[0]
    run = compiled([part]).run_0
    for n in (7, 3, 1):
        found = made(table[:n])
        assert found.parts[0] == part
        rows, columns = np.ix_(np.arange(12), np.arange(12))
        steps = np.where(rows < columns, rows - columns + n, rows - columns)
        expected = table[np.clip(steps, 0, n - 1)] + 100 * table[np.clip(rows, 0, n - 1)]
        out = evaluated(run, part, found.arrays, (12, 12))
        np.testing.assert_allclose(out, expected, 1e-6)


@needs_compiler
def test_lengths_are_those_of_each_call() -> None:
    def made(table: Any) -> Any:
        return trace(lambda s, b, h, q_idx, kv_idx: q_idx * table.shape[1] + table.shape[0], None)

    part = made(np.zeros((2, 3))).parts[0]
    run = compiled([part]).run_0
    for shape in ((2, 3), (5, 7)):
        found = made(np.zeros(shape))
        assert found.parts[0] == part
        out = evaluated(run, part, found.arrays, (4, 1))
        np.testing.assert_allclose(out[:, 0], np.arange(4) * shape[1] + shape[0], 1e-6)


@needs_compiler
def test_text_is_an_expression_or_a_body() -> None:
    texts = (
        "score + 0.5f * (q_idx - kv_idx) // the nearer the better",
        "if (kv_idx > 5) return -INF; const float x = h + b; return score + x + q_idx;",
    )
    parts = [trace(text, None).parts[0] for text in texts]
    assert trace(texts[0], None).parts == (parts[0],)
    library = compiled(parts)
    rows, columns = np.ix_(np.arange(9), np.arange(9))
    for i, expected in enumerate(
        (0.5 * (rows - columns), np.where(columns > 5, -np.inf, rows + 0 * columns))
    ):
        out = evaluated(library[f"run_{i}"], parts[i], (), (9, 9))
        np.testing.assert_allclose(out, expected, 1e-6)
