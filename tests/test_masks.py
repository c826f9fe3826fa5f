"""Masks and score functions: causal corners, windows, softcap; on the CPU and on a GPU."""

from __future__ import annotations

import functools
import itertools
import math
import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_cases import KERNELS
from played_gpu import Gpu, on_gpu
from reference import (
    Expected,
    assert_accepted,
    assert_call_accepted,
    hidden_keys,
    lse_slack,
    random_inputs,
    same_without_lse,
    to_host,
)

import cufa
from cufa import device
from cufa.explorer import explore
from cufa.planner import rules
from cufa.planner.attention import Planner
from cufa.planner.decode import DecodePlan
from cufa.problem.problem import Problem

#: One at a time, and some together.
FEATURES: tuple[dict[str, Any], ...] = (
    {"causal": "top-left"},
    {"causal": "bottom-right"},
    {"window": (20, 0)},
    {"window": (0, 0)},
    {"window": (None, 7)},
    {"window": (70, None)},
    {"window": (64, 100)},
    {"window": (5, 90)},
    {"window": (90, 5)},
    {"window": (150, 3), "causal": True},
    {"window": (150, None), "causal": "top-left"},
    {"softcap": 2.0},
    {"softcap": 30.0, "causal": True},
    {"softcap": 0.5, "window": (40, 10), "scale": -0.7},
    {"softcap": 1e4},
)

#: Batch, heads of q and of K/V, queries, keys.
SHAPES = ((2, 4, 2, 131, 257), (1, 6, 1, 300, 190), (5, 8, 2, 5, 400), (2, 2, 2, 333, 333))

features = pytest.mark.parametrize("options", FEATURES, ids=str)


@features
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_on_the_cpu(rng: np.random.Generator, dtype: str, options: dict[str, Any]) -> None:
    for b, hq, hk, sq, sk in SHAPES:
        q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=24)
        out, lse = cufa.attention(q, k, v, return_lse=True, **options)
        assert_accepted(out, lse, q, k, v, **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@features
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_on_the_gpu(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, options: dict[str, Any]
) -> None:
    for (b, hq, hk, sq, sk), d in itertools.product(SHAPES, (64, 128, 192)):
        q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d)
        given = [cupy.asarray(x) for x in (q, k, v)]
        call = functools.partial(cufa.attention, *given, kernel=kernel, **options)
        assert_call_accepted(call, q, k, v, what=f"{sq} x {sk}, {d}", **options)


def drawn(rng: random.Random) -> tuple[dict[str, int], dict[str, Any]]:
    """Return sizes, and options of a call."""
    group, hk = rng.choice((1, 2, 4, 7)), rng.randint(1, 3)
    sizes = {"b": rng.randint(1, 2), "hq": group * hk, "hk": hk}
    sizes |= {"sq": rng.randint(1, 400), "sk": rng.randint(1, 400), "d": 8 * rng.randint(1, 32)}
    left = rng.choice((None, rng.randint(0, 300)))
    right = rng.choice((None, rng.randint(0, 300)))
    options = {
        "causal": rng.choice((False, True, "top-left")),
        "window": (left, right),
        "softcap": rng.choice((None, None, 10 ** rng.uniform(-1, 2))),
        "scale": rng.choice((None, 0.3, -1.0)),
    }
    return sizes, options


@pytest.mark.parametrize("seed", range(5))
def test_combinations(xp: ModuleType, seed: int) -> None:
    """300 of them on a GPU, and fewer on the CPU: whatever kernel takes them, odd strides too."""
    rng = random.Random(seed)
    for number in range(60 if xp is not np else 12):
        sizes, options = drawn(rng)
        dtype = rng.choice(("float16", "bfloat16", "float32"))
        data = np.random.default_rng(100 * seed + number)
        arrays = random_inputs(data, dtype, **sizes)
        given = [xp.asarray(x.swapaxes(1, 2).copy()) for x in arrays]  # as bshd
        out, lse = cufa.attention(*given, layout="bshd", return_lse=True, **options)
        slack = lse_slack(*arrays[:2], **options) if xp is not np else 0.0
        expected = Expected(*arrays, **options)
        expected.assert_accepts(out.swapaxes(1, 2), lse, f"{sizes}, {options}", lse_slack=slack)
        if not same_without_lse(dtype, options):
            out = cufa.attention(*given, layout="bshd", **options)
            expected.assert_accepts(out.swapaxes(1, 2), None, f"{sizes}, {options}")


def test_rows_that_see_no_key(xp: ModuleType, rng: np.random.Generator) -> None:
    """They are 0, and nothing of hidden keys reaches the others, NaN neither."""
    for dtype, d in (("bfloat16", 64), ("float32", 32)):
        q, k, v = random_inputs(rng, dtype, sq=300, sk=100, d=d)
        k[:, :, 40:60], v[:, :, 40:60] = np.nan, 1e4
        given = [xp.asarray(x) for x in (q, k, v)]
        for window in ((10, 0), (30, 0), (3, 20)):
            hidden = hidden_keys(300, 100, False, window=window)
            blind, hit = hidden.all(axis=1), ~hidden[:, 40:60].all(axis=1)
            out, lse = cufa.attention(*given, window=window, return_lse=True)
            out, lse = to_host(out)[0, 0].astype(np.float32), to_host(lse)[0, 0]
            assert blind.any()
            assert hit.any()
            assert not out[blind].any()
            assert (lse[blind] == -np.inf).all()
            assert np.isnan(out[hit]).all()
            assert np.isfinite(out[~hit]).all()


def test_scores_of_any_size_are_capped(xp: ModuleType, rng: np.random.Generator) -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        q, k, v = random_inputs(rng, dtype, sq=70, sk=90, d=64)
        out, lse = cufa.attention(
            *(xp.asarray(x) for x in (q, k, v)), scale=1e4, softcap=4, return_lse=True
        )
        assert_accepted(out, lse, q, k, v, scale=1e4, softcap=4)
        assert float(np.abs(to_host(lse)).max()) <= 4 + math.log(90)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": "upper"}, ValueError, "causal must be"),
        ({"causal": 1}, TypeError, "causal must be"),
        ({"window": 5}, TypeError, "window must be a tuple"),
        ({"window": (1, 2, 3)}, TypeError, "window must be a tuple"),
        ({"window": (1.0, 2)}, TypeError, "window: left must be an integer"),
        ({"window": (1, True)}, TypeError, "window: right must be an integer"),
        ({"window": (-1, -1)}, ValueError, r"window: left must be 0 or more, or None for no bound"),
        ({"window": (4, -1), "causal": True}, ValueError, "window: right must be 0 or more"),
        ({"window": (-(2**31), 2**31 - 1)}, ValueError, "window: left must be 0 or more"),
        ({"softcap": 0}, ValueError, "softcap must be"),
        ({"softcap": 2e4}, ValueError, "softcap must be"),
        ({"softcap": -1.0}, ValueError, "softcap must be"),
        ({"softcap": math.nan}, ValueError, "softcap must be"),
        ({"softcap": 10**400}, ValueError, "softcap must be"),
        ({"softcap": "50"}, TypeError, "softcap must be"),
        ({"softcap": True}, TypeError, "softcap must be"),
    ],
    ids=str,
)
def test_bad_options(
    xp: ModuleType, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    q = xp.ones((1, 1, 4, 8), np.float16)
    for function in (cufa.attention, cufa.explain):
        for _ in range(2):
            with pytest.raises(error, match=message):
                function(q, q, q, **options)


@pytest.mark.gpu
def test_options_of_equal_value_and_other_types(cupy: Any) -> None:
    """A call that is remembered does not accept what a first one refuses."""
    q = cupy.ones((1, 1, 4, 8), np.float16)
    cufa.attention(q, q, q, window=(1, 0), softcap=1)
    for options in ({"window": (True, 0)}, {"window": (1.0, 0)}, {"softcap": True}):
        with pytest.raises(TypeError, match=next(iter(options))):
            cufa.attention(q, q, q, **options)


def test_a_kernel_that_has_none() -> None:
    q = (1, 2, 30, 64)
    for options, name in (({"window": (3, 3)}, "window"), ({"softcap": 2}, "softcap")):
        problem = Problem.of_shapes(q, q, q, dtype="float32", **options)
        with pytest.raises(ValueError, match=f"{name}: fa1_fp32"):
            Planner(problem, device.named("h200"), "fa1_fp32")(problem)


def test_few_queries_are_for_decode_with_a_score_that_it_takes() -> None:
    """If a window leaves many keys."""
    shapes = (1, 32, 1, 128), (1, 8, 8192, 128), (1, 8, 8192, 128)
    h200 = device.named("h200")
    for options, reads, score in (
        ({}, (), ()),
        ({"window": (100, 0)}, (), None),
        ({"window": (8190, 0)}, (), ("WindowLeft",)),
        ({"window": (8191, 0)}, (), ()),
        ({"window": (2000, 5), "softcap": 5}, (), ("Softcap", "WindowLeft")),
        ({"causal": "top-left"}, (), None),
        ({"causal": True}, ("Alibi", "Sinks"), ("Alibi", "Sinks")),
        ({}, ("BiasFloat32",), None),
        ({}, ("Alibi", "Mask"), None),
        ({}, ("MaskBits",), None),
    ):
        problem = Problem.of_shapes(*shapes, dtype="bfloat16", **options).reading(*reads)
        found = Planner(problem, h200)(problem)
        assert isinstance(found, DecodePlan) == (score is not None)
        assert score is None or found.variant.score == score


def test_a_log_sum_exp_asks_for_more_of_a_softcap(gpu: Gpu, rng: np.random.Generator) -> None:
    """In bfloat16; but a variant that is named is what runs."""
    q, k, v = random_inputs(rng, "bfloat16", hq=4, hk=2, sq=70, sk=90, d=64)
    row, given = on_gpu(q[:, :, :1]), [on_gpu(x) for x in (q, k, v)]
    options: dict[str, Any] = {"softcap": 2.0}
    plans: list[Any] = [cufa.explain(*given, return_lse=flag, **options) for flag in (False, True)]
    faster, finer = (plan.variant for plan in plans)
    assert (faster.score, finer.score) == (("Softcap",), ("FineSoftcap",))
    for kernel, scores in ((None, (faster, finer)), (faster, (faster, faster))):
        for flag, variant in zip((False, True), scores, strict=True):
            cufa.attention(*given, kernel=kernel, return_lse=flag, **options)
            assert gpu.launches[-1].score == variant.score
            cufa.attention_varlen(
                *(
                    x[0]
                    for x in map(on_gpu, (q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)))
                ),
                *(np.array([0, n], np.int32) for n in (70, 90)),
                kernel=None if kernel is None else kernel._replace(kv="Varlen"),
                return_lse=flag,
                **options,
            )
            assert gpu.launches[-1].score == variant.score
    with pytest.raises(ValueError, match="its score is"):
        cufa.attention(*given, kernel=finer, **options)
    cufa.decode(row, *given[1:], return_lse=True, **options)
    assert gpu.launches[-1].score == finer.score
    of_decode = gpu.launches[-1]._replace(score=faster.score)
    for flag, kernel, score in (
        (False, None, faster.score),
        (True, None, finer.score),
        (True, of_decode, faster.score),
    ):
        cufa.decode(row, *given[1:], return_lse=flag, kernel=kernel, **options)
        assert gpu.launches[-1].score == score


def test_a_cache_that_outgrows_its_window(gpu: Gpu, rng: np.random.Generator) -> None:
    """The window is none up to there; on a GPU that the host plays."""
    q, k, v = random_inputs(rng, "float16", hq=4, hk=2, sq=1, sk=700, d=64)
    given = [on_gpu(x) for x in (q, k, v)]
    for n in range(460, 560, 9):
        part = slice(n)
        out = cufa.attention(given[0], given[1][:, :, part], given[2][:, :, part], window=(511, 0))
        assert_accepted(out, None, q, k[:, :, part], v[:, :, part], window=(511, 0))
        assert gpu.launches[-1].kernel == "decode"
        assert gpu.launches[-1].score == (("WindowLeft",) if n > 512 else ())


def test_time_of_a_window() -> None:
    """The planner expects that of the keys that it leaves."""
    shapes = [(1, 16, 16384, 128)] * 3
    h200, found = device.named("h200"), {}
    for window in (None, 4096, 1024):
        problem = Problem.of_shapes(*shapes, dtype="bfloat16", causal=True, window=(window, None))
        found[window] = min(rules.times(problem, h200, "fa3_wgmma").values())
    assert 0.35 < found[4096] / found[None] < 0.6
    assert 0.1 < found[1024] / found[None] < 0.25


def test_a_window_beyond_all_keys_is_none_to_the_planner() -> None:
    shapes = [(1, 32, 4096, 128), *[(1, 8, 4096, 128)] * 2]
    h200, found = device.named("h200"), []
    for window in ((None, None), (8192, None), (4095, 0)):
        problem = Problem.of_shapes(*shapes, dtype="bfloat16", causal=True, window=window)
        found.append(min(rules.times(problem, h200, "fa3_wgmma").values()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("window", [(5, 5), (5, 2**20), (None, 7)])
def test_lengths_beyond_which_a_window_is_not_for(window: Any) -> None:
    """Also where a problem like it has been planned."""
    h200 = device.named("h200")
    few, many = (
        Problem.of_shapes((1, 1, 16, 8), *[(1, 1, n, 8)] * 2, dtype="float32", window=window)
        for n in (100, 2**30 + 1)
    )
    planner = Planner(few, h200)
    planner(few)
    with pytest.raises(ValueError, match="window: k has seq"):
        planner(many)


def test_a_problem_does_not_say_what_cannot_be_drawn() -> None:
    q = (1, 1, 64, 64)
    problem = Problem.of_shapes(q, q, q, softcap=2.0)
    for unlike, name in (
        (problem.reading("Blocks"), "block_mask"),
        (problem._replace(kv="Padded"), "lengths"),
    ):
        with pytest.raises(ValueError, match=rf"^q: what {name} is like is not in a Problem"):
            explore(unlike, arch="sm_90a")
