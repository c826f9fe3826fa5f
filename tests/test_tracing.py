"""tracing.py: the parts that functions become, traces that are kept, functions that are refused."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cufa.compiler import source
from cufa.features.expression import tracing as expressions
from cufa.features.expression.tracing import indices_read, trace
from cufa.features.parts import part_named
from cufa.specs.variant import Variant

TABLE, SAME = np.ones(3, np.float32), np.ones(3, np.float32)
SLOPES = np.ones(3, np.float32)
COMPLEX = np.zeros(3, np.complex64)

# --- the score ---


@pytest.mark.parametrize(
    ("score_mod", "line"),
    [
        (lambda s, b, h, i, j: s * 0.5, "numpy::multiply(s, 0x1.0000000000000p-1f)"),
        (lambda s, b, h, i, j: 2 * -s, "numpy::multiply(0x1.0000000000000p+1f, x0)"),
        (lambda s, b, h, i, j: s / (i + 1), "numpy::divide(s, x1)"),
        (lambda s, b, h, i, j: s + 1, "numpy::add(s, 0x1.0000000000000p+0f)"),
        (lambda s, b, h, i, j: np.where(i < j, s, -np.inf), "x0 ? s : -INF"),
        (lambda s, b, h, i, j: np.minimum(abs(s), 0.0), "numpy::minimum(x0, 0x0.0p+0f)"),
        (lambda s, b, h, i, j: s * s, "numpy::multiply(s, s)"),
        (lambda s, b, h, i, j: 1 / s, "numpy::divide(0x1.0000000000000p+0f, s)"),
        (lambda s, b, h, i, j: np.where(s > 1, s, 1), "x0 ? s : 0x1.0000000000000p+0f"),
        (lambda s, b, h, i, j: s + np.tanh(s), "numpy::add(s, x0)"),
        (lambda s, b, h, i, j: s.astype(np.int32), "static_cast<int>(s)"),
    ],
    ids=range(11),
)
def test_the_score_is_taken_as_it_is(score_mod: Any, line: str) -> None:
    """In natural units: sums are those of float32, also where they are very low."""
    text = part_named(trace(score_mod, None).parts[0]).source
    score, _, _ = text.partition("float slope(")
    assert f"= {line};" in score
    assert "NATURAL = true" in text


@pytest.mark.parametrize(
    ("score_mod", "is_even"),
    [
        (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), True),
        (lambda s, b, h, i, j: SAME[i] + (s - SLOPES[h] * (i - 2 * j)), True),
        (lambda s, b, h, i, j: s + j * 0.5 - (j - i) / 8.0 + np.where(i > 3, 1.0, 2.0), True),
        (lambda s, b, h, i, j: s + SAME[i], True),
        (lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j), True),
        (lambda s, b, h, i, j: s + np.fabs(3 - 2 * j) / 4 - abs(2 * j - i), False),
        (lambda s, b, h, i, j: s + j + np.fabs(2 * (j - 3) + i) / 4, True),
        (lambda s, b, h, i, j: s - abs(i - j + h), False),
        (lambda s, b, h, i, j: s - abs(i - SAME[j]), False),
        (lambda s, b, h, i, j: s - abs(0.5 * i - j), False),
        (lambda s, b, h, i, j: s - abs(i - j + 1000), True),
        (lambda s, b, h, i, j: s - abs(i - j + 2**25), False),  # it may wrap around
        (lambda s, b, h, i, j: s - np.fabs((i - j).astype(bool)), False),
        (lambda s, b, h, i, j: s + SAME[j], False),
        (lambda s, b, h, i, j: 2 * s + j, False),
        (lambda s, b, h, i, j: s * j, False),
        (lambda s, b, h, i, j: s + j * j, False),
        (lambda s, b, h, i, j: s + j // 2, False),
        (lambda s, b, h, i, j: s + j * 100000, False),
        (lambda s, b, h, i, j: s + j / SLOPES[h], False),
        (lambda s, b, h, i, j: j - s, False),
        (lambda s, b, h, i, j: np.where(j > 3, s, -np.inf), False),
        (lambda s, b, h, i, j: s + np.where(j > 3, j, 2 * j), False),
        (lambda s, b, h, i, j: s + (8 * (j - 2 * i) + 5), True),
        (lambda s, b, h, i, j: s + j * i, False),  # beyond 32 bits it wraps around
        (lambda s, b, h, i, j: s + j * 64 * 64, False),
        (lambda s, b, h, i, j: s + (j * 0.5).astype(np.int64), False),  # a staircase
        (lambda s, b, h, i, j: s + j.astype(np.int64) * i, True),
    ],
    ids=range(28),
)
def test_what_grows_evenly_from_key_to_key(score_mod: Any, is_even: bool) -> None:
    text = part_named(trace(score_mod, None).parts[0]).source
    assert ("AFFINE_IN_KEY = true" in text) == ("float step(" in text) == is_even


def test_what_is_used_twice_is_looked_at_once() -> None:
    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        more = j * 0.5
        for _ in range(60):
            more = more + more
        return s + more

    assert part_named(trace(score_mod, None).parts[0]).tilts


def test_what_changes_nothing_is_no_part() -> None:
    assert trace(lambda s, b, h, i, j: s, lambda b, h, i, j: True) == expressions.NOTHING
    assert trace(None, None) == expressions.NOTHING
    assert trace(lambda s, b, h, i, j: +s, None) == expressions.NOTHING
    (hides,) = trace(None, lambda b, h, i, j: False).parts
    assert "return !false;" in part_named(hides).source


# --- what is remembered ---


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments that are traced from now on."""
    found: list[str] = []
    trace = expressions._traced

    def noted(argument: str, *rest: Any) -> Any:
        found.append(argument)
        return trace(argument, *rest)

    monkeypatch.setattr(expressions, "_known", {})
    monkeypatch.setattr(expressions, "_traced", noted)
    return found


def test_a_function_is_traced_once(traces: list[str]) -> None:
    """And so are those that are made again in each call, of other arrays."""
    for n in range(1, 5):
        slopes, window = np.full(n, 0.5, np.float32), 7
        found = trace(
            lambda s, b, h, i, j: s - slopes[h] * (i - j),  # noqa: B023
            lambda b, h, i, j: i - j < window,  # noqa: B023
        )
        assert len(found.parts) == 2
        assert found.arrays == (slopes,)
        assert found.names == ("score_mod: slopes",)
    assert traces == ["score_mod", "mask_mod"]


def other_slope(scale: Any, table: Any, *, power: Any = 1, names: Any = None) -> Any:
    def helped(h: Any) -> Any:
        return table[h] * scale

    return lambda s, b, h, i, j, power=power: s - helped(h) * (i - j) ** power


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        ((2.0, TABLE), False),
        ((2, TABLE), False),
        ((3.0, TABLE), True),
        ((np.float32(2.0), TABLE), False),
        ((2.0, TABLE[:2]), False),
        ((2.0, TABLE.astype(np.float16)), True),
        ((0.0, TABLE), True),
        ((-0.0, TABLE), True),
        ((SAME[:1].reshape(()), TABLE), True),
    ],
    ids=str,
)
def test_what_a_function_refers_to_has_changed(changed: Any, is_other: bool) -> None:
    (part,) = trace(other_slope(2.0, TABLE), None).parts
    for _ in range(2):
        assert (trace(other_slope(*changed), None).parts[0] != part) == is_other


def test_zeros_of_either_sign() -> None:
    parts = [trace(other_slope(zero, TABLE), None).parts for zero in (0.0, -0.0, 0)]
    assert parts[0] == parts[2] != parts[1]


def test_two_names_of_an_array(traces: list[str]) -> None:
    """Where they may come to mean two arrays, each is read."""

    def made(a: Any, b: Any) -> Any:
        return trace(lambda s, _, h, i, j: s + a[i] - b[j], None)

    assert made(TABLE, TABLE).arrays == (TABLE,)
    one, other = made(TABLE, SAME).arrays
    assert one is TABLE
    assert other is SAME
    assert len(traces) == 2


def test_methods_of_what_changes_are_asked_each_time(traces: list[str]) -> None:
    numbers = {"factor": 2.0}
    get, largest = numbers.get, max  # a function of a module's is not

    def made() -> Any:
        return trace(lambda s, b, h, i, j: s * get("factor"), None)

    two = made()
    numbers["factor"] = largest(2.5, 3.0)
    assert made() != two
    for _ in range(2):
        trace(lambda s, b, h, i, j: s * largest(1.0, 2.0), None)
    assert len(traces) == 3


def test_what_has_attributes_is_asked_each_time(traces: list[str]) -> None:
    settings = SimpleNamespace(window=3)

    def made() -> Any:
        return trace(None, lambda b, h, i, j: i - j < settings.window).parts

    first = made()
    assert made() == first
    settings.window = 4
    assert made() != first
    assert len(traces) == 3


def test_containers_and_functions_of_functions(traces: list[str]) -> None:
    tables: Any = {"a": [TABLE, (SAME, 2.5)], "again": None}
    tables["again"] = tables

    def countdown(n: int, x: Any) -> Any:
        return x if n == 0 else countdown(n - 1, x + tables["again"]["a"][0][n])

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        first, (second, factor) = tables["a"]
        return countdown(2, s) + sum(first[i] * second[k] * factor for k in range(2))

    for _ in range(2):
        found = trace(score_mod, None)
        assert found.names == ("score_mod: tables['a'][0]", "score_mod: tables['a'][1][0]")
    assert traces == ["score_mod"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_known", {})
    monkeypatch.setattr(expressions, "_KNOWN", 3)
    for n in range(9):
        trace(lambda s, b, h, i, j: s + n, None)  # noqa: B023
        trace(f"score + {n}", None)
    assert len(expressions._known) == 3


def test_equal_functions_are_one_part_in_all_processes() -> None:
    text = "lambda s, b, h, i, j: np.where(i % 3 == 0, s - np.float32(0.1) * table[h, j], 7.5)"
    lines = (
        "import numpy as np",
        "from cufa.features.expression.tracing import trace",
        "table = np.ones((2, 3), np.float16)",
        f"print(*trace({text}, None).parts)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (part,) = trace(eval(text, {"np": np, "table": np.zeros((5, 6), np.float16)}), None).parts
    assert printed == f"{part}\n"
    assert part.startswith("ScoreMod_")
    assert len(part) == len("ScoreMod_") + 12


# --- errors ---


class Elsewhere:
    """Holds an array that no name of a function refers to."""

    table = np.arange(5)


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "if": (lambda s, b, h, i, j: s if i > j else 0, "a condition .* use numpy.where"),
    "and": (lambda s, b, h, i, j: (i > j) and s, "a condition"),
    "chain": (lambda s, b, h, i, j: s * (0 < i < j), "a condition"),
    "min": (lambda s, b, h, i, j: min(s, 1), "a condition .* numpy.minimum"),
    "int": (lambda s, b, h, i, j: s + int(i), r"int\(\) asks for a value"),
    "float": (lambda s, b, h, i, j: s + float(i), r"float\(\), or a function of math"),
    "complex": (lambda s, b, h, i, j: s + complex(i), r"complex\(\)"),
    "iteration": (lambda s, b, h, i, j: sum(s), "an iteration asks"),
    "range": (lambda s, b, h, i, j: sum(range(i)), r"or range\(\), asks"),
    "a list": (lambda s, b, h, i, j: [1, 2][i], "an index of a list"),
    "str": (lambda s, b, h, i, j: s + len(str(i)), r"str\(\), a format or print\(\) asks for a"),
    "format": (lambda s, b, h, i, j: s + len(f"{s}"), r"str\(\), a format or print"),
    "a bool to return": (
        lambda s, b, h, i, j: s > 1,
        "it returns what is bool: a score .* mask_mod",
    ),
    "len": (lambda s, b, h, i, j: s + len(s), r"len\(\)"),
    "asarray": (lambda s, b, h, i, j: np.asarray(s), "an array of it"),
    "an attribute": (lambda s, b, h, i, j: Elsewhere.table[i], "an index of a list"),
    "a method": (lambda s, b, h, i, j: s.sum(), "no attribute 'sum'"),
    "a reduction": (lambda s, b, h, i, j: np.sum(s), "numpy.sum is none of numpy.clip"),
    "reduce": (lambda s, b, h, i, j: np.add.reduce(s), "numpy.add with reduce"),
    "keywords": (lambda s, b, h, i, j: np.add(s, 1, dtype=np.float64), "numpy.add with dtype"),
    "a function": (lambda s, b, h, i, j: np.gcd(i, j), "gcd is no function that kernels have"),
    "bools": (lambda s, b, h, i, j: -(i < j), "numpy.negative is not for bools"),
    "bits": (lambda s, b, h, i, j: s & 1, "numpy.bitwise_and is for integers"),
    "power": (lambda s, b, h, i, j: i**j, "an integer to the power of an integer"),
    "an object": (lambda s, b, h, i, j: s + "1", "str is no number"),
    "an array": (lambda s, b, h, i, j: s + np.ones(3), "ndarray is no number"),
    "a large integer": (lambda s, b, h, i, j: i + 2**64, "no integer of 64 bits"),
    "no index": (lambda s, b, h, i, j: s + TABLE, "TABLE has 1 axes, and 0 indices"),
    "two indices": (lambda s, b, h, i, j: s + TABLE[i, j], "TABLE has 1 axes, and 2 indices"),
    "a slice": (lambda s, b, h, i, j: s + TABLE[:2][i], "TABLE is indexed by integers, not by sl"),
    "a float": (lambda s, b, h, i, j: s + TABLE[i / 2], "an index of TABLE is an integer, not fl"),
    "a bool": (lambda s, b, h, i, j: s + TABLE[i > 2], "an index of TABLE is an integer, not bool"),
    "a write": (lambda s, b, h, i, j: TABLE.__setitem__(i, s), "no attribute '__setitem__'"),
    "in place": (lambda s, b, h, i, j: i.__iadd__(s), "what is int cannot hold what is float"),
    "complex numbers": (lambda s, b, h, i, j: COMPLEX[i], "COMPLEX has dtype complex64"),
    "a dtype": (lambda s, b, h, i, j: s.astype(np.complex64), "none that kernels compute in"),
    "small integers": (lambda s, b, h, i, j: s + i.astype(np.uint8), "uint8 is none that kernels"),
    "small floats": (lambda s, b, h, i, j: s.astype(np.float16), "float16 is none that kernels"),
    "none": (lambda s, b, h, i, j: None, "NoneType is no number"),
    "five arguments": (lambda s, b, h, i: s, "takes 4 positional arguments but 5 were given"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_traced(name: str) -> None:
    """The message says what, and in which line."""
    score_mod, message = BAD[name]
    where = (
        ""
        if name in ("five arguments", "none", "a bool to return")
        else r".*test_tracing\.py, line \d+: "
    )
    with pytest.raises(TypeError, match=f"^score_mod cannot be traced: .*{message}{where}"):
        trace(score_mod, None)


def test_a_value_that_is_kept() -> None:
    kept: list[Any] = []

    class Keeps:
        values = kept

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        Keeps.values.append(s)
        return s + Keeps.values[0]

    with pytest.raises(TypeError, match="a value of an earlier trace"):
        trace(score_mod, None)


def test_a_mask_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^mask_mod cannot .* returns what is int: a bool"):
        trace(None, lambda b, h, i, j: i)


@pytest.mark.parametrize("given", [3, np.tanh, Elsewhere(), ["score"]], ids=range(4))
def test_what_is_no_function(given: Any) -> None:
    with pytest.raises(TypeError, match=r"^score_mod must be a function \(def, .*\) or a string"):
        trace(given, None)
    with pytest.raises(TypeError, match=r"^mask_mod must be a function"):
        trace(None, given)


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        (functools.lru_cache(lambda s, b, h, i, j: s), "give the function that it wraps"),
        (np.add, "call it in a lambda"),
        (functools.partial(np.add, 1), "call it in a lambda"),
        (max, "call it in a lambda"),
    ],
    ids=["lru_cache", "ufunc", "partial", "builtin"],
)
def test_what_can_be_called_and_is_no_function(given: Any, way_out: str) -> None:
    with pytest.raises(TypeError, match=f"^score_mod must be a function .*: {way_out}"):
        trace(given, None)


def test_a_function_that_is_another_each_time() -> None:
    """Else it would have the random numbers of its first trace for good."""
    numbers, coins = iter(range(10)), iter([True, True, True, False])
    for score_mod in (
        lambda s, b, h, i, j: s + np.random.rand(),
        lambda s, b, h, i, j: s + next(numbers),
        lambda s, b, h, i, j: s if next(coins) else 2 * s,  # the same by chance
    ):
        with pytest.raises(TypeError, match=r"^score_mod is another function .* dropout"):
            trace(score_mod, None)
    with pytest.raises(TypeError, match=r"^mask_mod is another function"):
        trace(None, lambda b, h, i, j: i < np.random.randint(1 << 30))


def test_indices_that_text_names() -> None:
    assert indices_read("q_idx / h >= kv_idx") == {"q_idx", "h", "kv_idx"}
    assert indices_read("q_idx /* not of b,\nnor h */ >= 4 // b\n + kv_idx // h") == {
        "q_idx",
        "kv_idx",
    }


def test_a_masked_array_is_not_read() -> None:
    table = np.ma.array([1.0, 2.0], mask=[False, True], dtype=np.float32)
    with pytest.raises(TypeError, match=r"^score_mod: table is a masked array.*filled\(\.\.\.\)"):
        trace(lambda s, b, h, i, j: s + table[h], None)


def test_too_many_arrays() -> None:
    arrays = [np.ones((1, 1, 1), np.float32) for _ in range(30)]
    with pytest.raises(ValueError, match=r"^score_mod reads 30 arrays, .* take 1320 bytes"):
        trace(lambda s, b, h, i, j: s + sum(array[0, 0, i] for array in arrays), None)


# --- what is compiled ---


def test_text_of_own_parts_follows_the_kernel() -> None:
    parts = trace(lambda s, b, h, i, j: s - TABLE[h], lambda b, h, i, j: i == j).parts
    for kernel in ("fa3_wgmma", "fa2_mma", "fa2_fp32"):
        plain = Variant(kernel, "float32", 64, 64, 64, 64, 2, 4, 1)
        assert source.of(plain) == source.text(kernel)
        text = source.of(plain._replace(score=("Causal", *parts)))
        assert text.startswith(source.text(kernel))
        assert text.count('#line 1 "expression.cuh"') == 1
        assert "#include" not in text
        for part in parts:
            assert text.count(f"struct {part} :") == 1


def test_parameters_are_laid_out_as_in_the_struct(cupy: Any) -> None:
    """Arrays with 0 to 4 axes, in both functions."""
    arrays = [np.ones((2,) * n, np.float32) for n in (1, 0, 3, 4, 2)]

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + sum(array[(i,) * array.ndim] for array in arrays)

    one, two = trace(score_mod, lambda b, h, i, j: arrays[0][i] < arrays[4][i, j]).parts
    nvrtc = cupy.cuda.nvrtc
    for kernel in ("fa2_mma", "fa3_wgmma"):
        variant = Variant(kernel, "float16", 64, 64, 64, 64, 2, 4, 1, score=("Sinks", one, two))
        dtype = variant.parameter
        arguments = f"Arguments<Score<Sinks, {one}, {two}>, Dense>"
        checks = [f"sizeof({one}) == {dtype[one].itemsize}"]
        checks += [f"sizeof({two}) == {dtype[two].itemsize}"]
        if kernel == "fa3_wgmma":
            arguments = f"TmaArguments<{arguments}>"
        checks.append(f"sizeof({arguments}) == {dtype.itemsize}")
        text = source.of(variant) + "".join(f"static_assert({check});\n" for check in checks)
        program = nvrtc.createProgram(text, "layout.cu", (), ())
        try:
            nvrtc.compileProgram(program, ("-std=c++17", "-arch=sm_90a"))
        except nvrtc.NVRTCError:
            pytest.fail(nvrtc.getProgramLog(program))
        finally:
            nvrtc.destroyProgram(program)


def test_a_variant_is_read_as_it_is_printed() -> None:
    (part,) = trace(None, lambda b, h, i, j: i < j).parts
    variant = Variant("fa2_mma", "float16", 64, 64, 64, 64, 2, 4, 1, score=("Causal", part))
    assert Variant.parse(str(variant)) == variant
    unknown = str(variant).replace(part, "MaskMod_0123456789ab")
    with pytest.raises(ValueError, match="MaskMod_0123456789ab is unknown in this process"):
        Variant.parse(unknown)
