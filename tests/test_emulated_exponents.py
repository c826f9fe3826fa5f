"""The exponent without row maxima, over many tiles of keys, by fa3_wgmma's source.

ALiBi and other functions that grow evenly from key to key; a polynomial in place of a softcap, of
whose range row sums tell; the left edges of windows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import on_gpu
from reference import Expected, lse_slack, random_inputs
from test_emulated import (  # noqa: F401
    FA3,
    FA3_ONE_SLOT,
    FA3_TURNS,
    FA3_TWO_SLOTS,
    FA3_WIDE,
    emulated,
    emulator,
)

import cufa
from cufa.features.expression.tracing import trace
from cufa.features.parts import part_named
from cufa.specs.variant import Variant

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]

#: Three consumers, whose P is packed together with the curve.
FA3_THREE = "fa3_wgmma<bfloat16, 64, 64, 192, 128, 3, 16, 1, true, Score<{score}>, Dense>"

forms = pytest.mark.parametrize(
    "form", [FA3, FA3_TURNS, FA3_TWO_SLOTS], ids=lambda form: form.split(", Score")[0]
)

#: Heads of q and of K/V, queries and keys; of the second, several heads share a tile.
SHAPES = ((2, 1, 300, 450), (8, 2, 37, 500), (2, 2, 450, 200))
WINDOWS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (200, 0)},
    {"window": (5, 3)},
)


def drawn(rng: np.random.Generator, form: str, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    variant = Variant.parse(form.format(score=""))
    hq, hk, sq, sk = shape
    d, dv = variant.head_dim, variant.head_dim_v
    return random_inputs(rng, variant.dtype, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)


def checked(
    form: str,
    arrays: tuple[np.ndarray, ...],
    options: dict[str, Any],
    there: dict[str, Any],
) -> None:
    """Make a call of a form, with options of the device, and compare it to the oracle."""
    given = [on_gpu(x) for x in arrays]
    plan: Any = cufa.explain(*given, **there)
    chosen = Variant.parse(form.format(score=""))._replace(score=plan.variant.score)
    out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **there)
    what = f"{chosen}, {[x.shape for x in arrays]}, {options}"
    expected = Expected(*arrays, **options)
    its_slack = lse_slack(*arrays[:2], score=chosen.score, **options)
    expected.assert_accepts(out.get(), lse.get(), what, lse_slack=its_slack)


@forms
@pytest.mark.parametrize("options", WINDOWS, ids=str)
@pytest.mark.parametrize("steepness", [0.0, 0.05, -0.3, 3.0])
@exhaustive(but=lambda form, options: form is FA3 or not options, one_in=4)
def test_alibi(
    rng: np.random.Generator, form: str, options: dict[str, Any], steepness: float
) -> None:
    """Where slopes are steep, row maxima are far beyond those of the tile before."""
    for shape in SHAPES:
        arrays = drawn(rng, form, shape)
        slopes = (rng.random(shape[0], np.float32) + 0.1) * np.float32(steepness)
        its = options | {"alibi_slopes": slopes}
        checked(form, arrays, its, its | {"alibi_slopes": on_gpu(slopes)})


@forms
@pytest.mark.parametrize("queries", [8, 70, 150, 200])
@exhaustive(but=lambda form, queries: form is FA3 or queries == 150)
def test_rows_that_there_are_not_take_no_time(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    form: str,
    queries: int,
) -> None:
    """No scores are computed once more for them: only that takes mma.sync."""
    arrays = drawn(rng, form, (1, 1, queries, 900))
    slopes = np.array([0.5], np.float32)
    options = {"causal": True, "alibi_slopes": slopes}
    variant = Variant.parse(form.format(score="Alibi, Causal"))
    count = ctypes.c_longlong.in_dll(emulated.library(variant), "emulator_mmas")
    before = count.value
    checked(form, arrays, options, options | {"alibi_slopes": on_gpu(slopes)})
    assert count.value == before


@pytest.mark.parametrize("form", [FA3_WIDE, FA3_TWO_SLOTS], ids=lambda f: f.split(", Score")[0])
@pytest.mark.parametrize("options", [{}, {"window": (300, 90)}, {"causal": True}], ids=str)
@exhaustive(one_in=2)
def test_keys_on_both_sides_of_a_turn_are_not_computed_once_more(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    form: str,
    options: dict[str, Any],
) -> None:
    """They are among those that need row maxima; scores of no others are taken one by one."""
    slopes = np.array([0.05, 0.02, -0.01, 0.03], np.float32)

    def made(slopes: Any) -> Any:
        return lambda s, b, h, i, j: s - slopes[h] * abs(i - j)

    its, there = ({**options, "score_mod": made(x)} for x in (slopes, on_gpu(slopes)))
    (part,) = trace(there["score_mod"], None).parts
    for shape in ((4, 1, 300, 700), (4, 4, 200, 450)):
        arrays = drawn(rng, form, shape)
        given = [on_gpu(x) for x in arrays]
        plan: Any = cufa.explain(*given, **there)
        assert part in plan.variant.score
        variant = Variant.parse(form.format(score=""))._replace(score=plan.variant.score)
        count = ctypes.c_longlong.in_dll(emulated.library(variant), "emulator_mmas")
        before = count.value
        checked(form, arrays, its, there)
        assert count.value == before


@forms
@pytest.mark.parametrize("options", WINDOWS[:2], ids=str)
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@exhaustive(but=lambda form, options, alibi: form is FA3 or (alibi and bool(options)), one_in=2)
def test_even_steps(
    rng: np.random.Generator, form: str, options: dict[str, Any], alibi: bool, turns: bool
) -> None:
    """A caller's own function, and ALiBi with it, whose slopes change their sign."""
    for shape in SHAPES:
        arrays = drawn(rng, form, shape)
        slopes = rng.standard_normal(shape[0]).astype(np.float32)
        table = rng.standard_normal(shape[2]).astype(np.float32)

        def made(slopes: Any, table: Any) -> Any:
            if turns:
                return lambda s, b, h, i, j: s - slopes[h] * abs(3 * j - 2 * i - 80) / 8 + j / 16
            return lambda s, b, h, i, j: table[i] + (s - slopes[h] * (i - 2 * j) / 4)

        there = options | {"score_mod": made(on_gpu(slopes), on_gpu(table))}
        its = options | {"score_mod": made(slopes, table)}
        if alibi:
            its["alibi_slopes"] = np.abs(slopes)[::-1].copy()
            there["alibi_slopes"] = on_gpu(its["alibi_slopes"])
        checked(form, arrays, its, there)


@forms
@pytest.mark.parametrize("options", [*WINDOWS, {"causal": "top-left"}], ids=str)
@pytest.mark.parametrize("line", [(1, -1, 0), (1, -1, -50), (-1, 1, 150), (1, -2, 33)], ids=str)
@exhaustive(but=lambda form, options: form is FA3 or options == {"causal": True}, one_in=4)
def test_distances(
    rng: np.random.Generator, form: str, options: dict[str, Any], line: tuple[int, int, int]
) -> None:
    """To the key that a query stands at, or to others: where rows have few keys on a piece."""
    of_query, of_key, beyond = line

    def made(slopes: Any) -> Any:
        return lambda s, b, h, i, j: s - slopes[h] * abs(of_query * i + of_key * j + beyond)

    slopes = np.array([0.4, -0.03], np.float32)
    its, there = ({**options, "score_mod": made(x)} for x in (slopes, on_gpu(slopes)))
    assert part_named(trace(its["score_mod"], None).parts[0]).tilts
    for sq, sk in ((390, 390), (200, 450)):
        checked(form, drawn(rng, form, (2, 1, sq, sk)), its, there)


@forms
@pytest.mark.parametrize(
    "options", [{"causal": "top-left"}, {"window": (None, 5)}, {"window": (40, 3)}], ids=str
)
@exhaustive(but=lambda form, options: form is FA3 or "causal" in options)
def test_distances_that_turn_at_the_last_key(
    rng: np.random.Generator, form: str, options: dict[str, Any]
) -> None:
    """Where the last tile of keys has fewer, and rows see it beginning with one in their midst."""
    for sq, sk in ((60, 40), (45, 40), (150, 110)):
        arrays = drawn(rng, form, (1, 1, sq, sk))
        for beyond in (-33, -34, -7):
            its = options | {
                "score_mod": lambda s, b, h, i, j, c=beyond: s - 8.0 * abs(2 * j - i + c)
            }
            checked(form, arrays, its, its)


def factors(rng: np.random.Generator, kind: str, keys: int) -> np.ndarray:
    """Draw by how much scores are larger than others, of each key."""
    found = np.ones(keys, np.float32)
    if kind == "few":
        found[rng.integers(0, keys, 5)] = 30, -60, 90, 20, -40
    elif kind == "the last ones to come":
        found[:3] = 40, 100, -70
    elif kind == "all":
        found[:] = 30
    elif kind == "growing":
        found = np.linspace(30, 0, keys, dtype=np.float32)
    return found


@pytest.mark.parametrize(
    "form",
    [FA3, FA3_TURNS, FA3_THREE, FA3_TWO_SLOTS, FA3_ONE_SLOT],
    ids=lambda form: form.split(", Score")[0],
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (250, None)}], ids=str)
@pytest.mark.parametrize("kind", ["few", "the last ones to come", "all", "growing"])
@exhaustive(but=lambda form, options: form is FA3 or "window" in options, one_in=4)
def test_softcap(rng: np.random.Generator, form: str, options: dict[str, Any], kind: str) -> None:
    """Scores are far beyond where the polynomial ends, some of them or all."""
    q, k, v = drawn(rng, form, (2, 1, 200, 450))
    k = (k.astype(np.float32) * factors(rng, kind, 450)[:, None]).astype(k.dtype)
    for softcap in (1e-3, 1.0, 20.0, 50.0, 1e4):
        its = options | {"softcap": softcap}
        checked(form, (q, k, v), its, its)


@forms
def test_softcap_of_infinite_scores(rng: np.random.Generator, form: str) -> None:
    """They are the cap, with their sign."""
    q, k, v = drawn(rng, form, (1, 1, 100, 450))
    q = np.abs(q)
    k[..., (3, 200), :], k[..., (40, 440), :] = np.inf, -np.inf
    largest = k.copy()
    largest[..., (3, 200), :], largest[..., (40, 440), :] = 500, -500
    for softcap in (0.5, 20.0):
        given = [on_gpu(x) for x in (q, k, v)]
        plan: Any = cufa.explain(*given, softcap=softcap)
        chosen = Variant.parse(form.format(score=""))._replace(score=plan.variant.score)
        out, lse = cufa.attention(*given, softcap=softcap, kernel=chosen, return_lse=True)
        expected = Expected(q, largest, v, softcap=softcap)
        slack = lse_slack(q, k, softcap=softcap, score=chosen.score)
        expected.assert_accepts(out.get(), lse.get(), f"{form}, {softcap}", lse_slack=slack)


@forms
@pytest.mark.parametrize("shape", [(8, 2, 300, 450), (8, 8, 450, 200)], ids=str)
@exhaustive(one_in=2)
def test_slopes_that_are_not_finite(
    rng: np.random.Generator, form: str, shape: tuple[int, ...]
) -> None:
    """Rows of such heads are NaN, if they see a key, and only these."""
    arrays = drawn(rng, form, shape)
    slopes = np.array([np.inf, 0.5, -np.inf, 0.0, np.nan, 0.25, 1.0, np.inf], np.float32)
    given = [on_gpu(x) for x in (*arrays, slopes)]
    its: dict[str, Any] = {"causal": True, "alibi_slopes": given.pop()}
    plan: Any = cufa.explain(*given, **its)
    chosen = Variant.parse(form.format(score=""))._replace(score=plan.variant.score)
    out = cufa.attention(*given, **its, kernel=chosen).get().astype(np.float32)
    with np.errstate(invalid="ignore"):
        expected = cufa.attention(*arrays, **its | {"alibi_slopes": slopes}).astype(np.float32)
    np.testing.assert_allclose(out, expected, rtol=0.02, atol=0.02, equal_nan=True)


@forms
@pytest.mark.parametrize("shape", [(8, 2, 300, 450), (8, 8, 450, 200)], ids=str)
@exhaustive(one_in=2)
def test_slopes_that_leave_one_key(
    rng: np.random.Generator, form: str, shape: tuple[int, ...]
) -> None:
    """A few keys away they are infinite; a row has the V of its own key, and that key's score."""
    slopes = np.array([1e30, 0.5, 3e37, 2e38, 1e29, 0.25, 1.0, 2e35], np.float32)
    options = {"causal": True, "alibi_slopes": slopes}
    there = options | {"alibi_slopes": on_gpu(slopes)}
    with np.errstate(over="ignore"):
        checked(form, drawn(rng, form, shape), options, there)


@forms
@pytest.mark.parametrize("options", WINDOWS[2:], ids=str)
@exhaustive(one_in=2)
def test_windows(rng: np.random.Generator, form: str, options: dict[str, Any]) -> None:
    """Rows that see none, and rows whose first keys come late; scores that grow."""
    for shape in SHAPES:
        q, k, v = drawn(rng, form, shape)
        checked(form, (q, k, v), options, options)
        k = (k.astype(np.float32) * factors(rng, "growing", shape[3])[:, None]).astype(k.dtype)
        checked(form, (q, k, v), options, options)
