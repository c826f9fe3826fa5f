"""`score_mod` and `mask_mod`: functions of a caller's own; on the CPU and on a GPU."""

from __future__ import annotations

import functools
import math
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_cases import KERNELS, SHAPES, inputs
from played_gpu import Gpu, at, on_gpu
from reference import assert_accepted, assert_call_accepted, oracle, random_inputs, to_host
from score_mods import FEATURES, made

import cufa
from cufa.compiler import jit
from cufa.specs.variant import Variant

features = pytest.mark.parametrize("name", FEATURES)


@features
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_on_the_cpu(rng: np.random.Generator, dtype: str, name: str) -> None:
    for sizes in SHAPES:
        arrays = inputs(rng, dtype, sizes)
        options, _ = made(rng, name, sizes, np.asarray)
        out, lse = cufa.attention(*arrays, return_lse=True, **options)
        assert_accepted(out, lse, *arrays, what=str(sizes), **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@features
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_on_the_gpu(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, name: str
) -> None:
    for sizes in SHAPES:
        for d in (64, 128, 192):
            arrays = inputs(rng, dtype, sizes, d)
            options, there = made(rng, name, sizes, cupy.asarray)
            given = [cupy.asarray(x) for x in arrays]
            call = functools.partial(cufa.attention, *given, kernel=kernel, **there)
            assert_call_accepted(call, *arrays, what=f"{sizes}, {d}", **options)


@features
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_arrays_of_fewer_axes(
    xp: ModuleType, rng: np.random.Generator, dtype: str, name: str
) -> None:
    """Missing axes have the index 0."""
    q, k, v = inputs(rng, dtype, (1, 1, 1, 40, 50))
    options, there = made(rng, name, (1, 1, 1, 40, 50), xp.asarray)
    expected = cufa.attention(q, k, v, **options)
    arrays = [xp.asarray(x)[0, 0] for x in (q, k, v)]
    if "bias" in there:
        there["bias"] = there["bias"][0]
    out = to_host(cufa.attention(*arrays, **there)).astype(np.float32)
    np.testing.assert_allclose(out, expected[0, 0].astype(np.float32), 1e-2, 1e-2)


def test_what_is_hidden_stays_hidden(xp: ModuleType, rng: np.random.Generator) -> None:
    """Infinities and NaN of hidden scores reach nothing."""
    for dtype in ("bfloat16", "float32"):
        arrays = inputs(rng, dtype, (1, 2, 1, 90, 150), 64)
        given = [xp.asarray(x) for x in arrays]
        options: Any = {"mask_mod": lambda b, h, i, j: (i + j) % 3 > 0, "causal": True}
        expected = cufa.attention(*given, return_lse=True, **options)
        for bad in (np.inf, -np.inf, np.nan):
            found = cufa.attention(
                *given,
                score_mod=lambda s, b, h, i, j: np.where((i + j) % 3 > 0, s, bad),  # noqa: B023
                return_lse=True,
                **options,
            )
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_allclose(
                    to_host(x).astype(np.float32), to_host(y).astype(np.float32), 2e-2, 2e-2
                )


def test_scores_that_are_not_finite(xp: ModuleType, rng: np.random.Generator) -> None:
    """NaN and infinity make a row NaN, and a row whose scores are all -inf sees no key."""
    for dtype in ("float16", "float32"):
        given = [xp.asarray(x) for x in inputs(rng, dtype, (1, 1, 1, 6, 70), 32)]
        for bad in (np.nan, np.inf, -np.inf):
            out, lse = cufa.attention(
                *given,
                score_mod=lambda s, b, h, i, j: np.where(i == 3, bad, s),  # noqa: B023
                return_lse=True,
            )
            plain = to_host(cufa.attention(*given))
            out, lse = to_host(out)[0, 0], to_host(lse)[0, 0]
            others = [0, 1, 2, 4, 5]
            np.testing.assert_allclose(
                out[others].astype(np.float32), plain[0, 0, others].astype(np.float32), 1e-2, 1e-2
            )
            if bad == -np.inf:
                assert not out[3].any()
                assert lse[3] == -np.inf
            else:
                assert np.isnan(out[3].astype(np.float32)).all()


def test_few_queries_are_not_those_of_decode(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v = map(on_gpu, random_inputs(rng, "float16", hq=8, hk=2, sq=1, sk=5000, d=64))
    assert "decode" in str(cufa.explain(q, k, v))
    plan = cufa.explain(q, k, v, score_mod=lambda s, b, h, i, j: s + j)
    assert "fa3_wgmma" in str(plan)
    assert "ScoreMod_" in str(plan)
    both = str(cufa.explain(q, k, v, score_mod="score * 0.5f", mask_mod="kv_idx > 5", causal=True))
    assert re.search(r"Score<Causal, ScoreMod_\w{12}, MaskMod_\w{12}>", both)
    # The score as it is.
    plan = cufa.explain(q, k, v, score_mod=lambda s, b, h, i, j: s, mask_mod=lambda *_: True)
    assert "decode" in str(plan)


@pytest.mark.parametrize("argument", ["score_mod", "mask_mod"])
def test_what_is_refused(gpu: Gpu, rng: np.random.Generator, argument: str) -> None:
    host = inputs(rng, "float32", (1, 2, 2, 5, 6))
    there = [on_gpu(x) for x in host]
    table = np.ones(6, np.float32)
    strided = on_gpu(np.zeros(24, np.int8)).view_of(np.zeros(25, np.int8)[1:].view(np.float32))

    def reads(array: Any) -> Any:
        return (
            (lambda score, b, h, q_idx, kv_idx: score + array[kv_idx])
            if argument == "score_mod"
            else (lambda b, h, q_idx, kv_idx: array[kv_idx] > 0)
        )

    other = on_gpu(table)
    other.device_id = 1
    out = on_gpu(np.zeros_like(host[0]))
    cases: Any = (
        (host, {argument: "1 > 0"}, ValueError, f"{argument} must be a function for NumPy arrays"),
        (host, {argument: np.tanh}, TypeError, f"{argument} must be a function"),
        (host, {argument: lambda b: b}, TypeError, f"{argument}: .* it is called with"),
        (there, {argument: lambda b: b}, TypeError, f"{argument} cannot be traced"),
        (there, {argument: np.tanh}, TypeError, f"{argument} must be a function"),
        (there, {argument: lambda *_: "x"}, TypeError, f"{argument} cannot be traced"),
        (there, {argument: reads(table)}, TypeError, f"{argument}: array must be a cupy array"),
        (there, {argument: reads(other)}, ValueError, f"{argument}: array .* is on device 1"),
        (there, {argument: reads(on_gpu(table[:0]))}, ValueError, f"{argument}: array has shape"),
        (there, {argument: reads(strided)}, ValueError, f"{argument}: array .* no multiple of 4"),
        (
            there,
            {argument: reads(out[0, 0, 0]), "out": out},
            ValueError,
            f"out .* shares memory with {argument}: array",
        ),
        (
            there,
            {argument: "1 > 0", "kernel": "fa1_fp32"},
            ValueError,
            f"{argument}: fa1_fp32 has no such scores",
        ),
    )
    for arrays, options, error, message in cases:
        for function in (cufa.attention, cufa.explain):
            for _ in range(2):
                with pytest.raises(error, match=message):
                    function(*arrays, **options)
    assert not gpu.launches


def test_a_function_that_fails_on_the_cpu_leaves_out_whole(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, "float32", (1, 2, 2, 700, 20))
    out = np.full_like(q, 7.0)

    table = np.zeros(600, np.float32)  # the first tile has enough

    def fails(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score / table[q_idx]

    with pytest.raises(IndexError):
        cufa.attention(q, k, v, score_mod=fails, out=out)
    flat_q, flat_k, flat_v = (x.reshape(-1, 2, x.shape[-1]) for x in (q, k, v))
    ragged, ends = np.full_like(flat_q, 7.0), (np.array([0, 700]), np.array([0, 20]))
    with pytest.raises(IndexError):
        cufa.attention_varlen(flat_q, flat_k, flat_v, *ends, score_mod=fails, out=ragged)
    for each in (out, ragged):
        np.testing.assert_array_equal(each, 7.0)


def test_what_functions_return(xp: ModuleType, rng: np.random.Generator) -> None:
    q, k, v = (xp.asarray(x) for x in inputs(rng, "float32", (1, 2, 2, 5, 6)))
    refused = r"^mask_mod cannot be traced: it returns what is int: a bool is needed"
    with pytest.raises(TypeError, match=refused):
        cufa.attention(q, k, v, mask_mod=lambda b, h, i, j: i + j)
    with pytest.raises(TypeError, match=r"^mask_mod cannot be traced: ndarray is no number"):
        cufa.attention(q, k, v, mask_mod=lambda b, h, i, j: np.ones(7, bool))
    with pytest.raises(TypeError, match=r"^score_mod cannot be traced: complex is no number"):
        cufa.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 1j)
    with pytest.raises(TypeError, match=r"^score_mod cannot be traced: NoneType is no number"):
        cufa.attention(q, k, v, score_mod=lambda s, b, h, i, j: None)


LIST = [1.0, 2.0]


@pytest.mark.parametrize(
    ("score_mod", "what"),
    [
        (lambda s, b, h, i, j: s if i > j else -s, "a condition (if, "),
        (lambda s, b, h, i, j: np.where((i > j) and (i > 3), s, 0), "a condition (if, while, and"),
        (lambda s, b, h, i, j: s + min(i, j), "a condition (if, "),
        (lambda s, b, h, i, j: s + math.sin(i), "float(), or a function of math,"),
        (lambda s, b, h, i, j: s + LIST[h], "an index of a list"),
        (lambda s, b, h, i, j: s + int(h), "int()"),
    ],
    ids=["if", "and", "min", "math", "list", "int"],
)
def test_what_asks_for_a_value_is_refused(
    xp: ModuleType, rng: np.random.Generator, score_mod: Any, what: str
) -> None:
    """On NumPy arrays, too, of which single ones have a value: by the line of the function."""
    line = rf".* \({re.escape(__file__)}, line \d+: \(lambda s, b, h, i, j: "
    message = f"^score_mod cannot be traced: {re.escape(what)}{line}"
    for sizes in ((1, 2, 2, 5, 6), (1, 1, 1, 1, 1)):
        q, k, v = (xp.asarray(x) for x in inputs(rng, "float32", sizes))
        with pytest.raises(TypeError, match=message):
            cufa.attention(q, k, v, score_mod=score_mod)


class Slope:
    """A callable as FlexAttention takes it: an object with attributes."""

    def __init__(self, slopes: Any, factor: float) -> None:
        self.slopes, self.factor = slopes, factor

    def __call__(self, score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Return a score."""
        return score + self.by_distance(h, i, j)

    def by_distance(self, h: Any, i: Any, j: Any) -> Any:
        """Return what is added."""
        return self.factor * self.slopes[h] * (j - i)

    def sees(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Return whether a query sees a key."""
        return self.slopes[h] * (i - j) < 3


def scaled(slopes: Any, score: Any, b: Any, h: Any, i: Any, j: Any, *, factor: float) -> Any:
    return score + factor * slopes[h] * (j - i)


def test_other_callables(xp: ModuleType, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, "float32", (1, 2, 2, 15, 26))
    slopes = np.array([0.25, 0.5], np.float32)
    there, given = xp.asarray(slopes), [xp.asarray(x) for x in (q, k, v)]
    for factor in (1.0, 2.0):
        expected, _ = oracle(
            *(q, k, v),
            score_mod=lambda s, b, h, i, j: s + factor * slopes[h] * (j - i),  # noqa: B023
            mask_mod=lambda b, h, i, j: slopes[h] * (i - j) < 3,
        )
        owner = Slope(there, factor)
        partial = functools.partial(scaled, there, factor=factor)
        for score_mod in (owner, partial, functools.partial(owner)):
            out = cufa.attention(*given, score_mod=score_mod, mask_mod=owner.sees)
            np.testing.assert_allclose(to_host(out), expected, 1e-5, 1e-5)


# --- calls that come again ---


def test_new_functions_and_lengths_are_of_one_kind(gpu: Gpu, rng: np.random.Generator) -> None:
    """A function that is made for each call, of arrays that lie elsewhere and are longer."""
    kernels = set()
    for n in (20, 20, 25, 20, 31):
        arrays = [on_gpu(x) for x in inputs(rng, "float16", (1, 2, 1, n, n), 64)]
        table = on_gpu(np.ones((2, 2 * n), np.float32))[:, ::2]
        cufa.attention(
            *arrays,
            score_mod=lambda s, b, h, i, j: s + table[h, i - j],  # noqa: B023
            mask_mod=lambda b, h, i, j: i - j < 9,
        )
        kernels.add(gpu.launches[-1])
    assert gpu.parsed == 1
    assert len(kernels) == len(gpu.loaded) == 1
    assert len(gpu.launches) == 5


def test_attributes_of_functions(gpu: Gpu, rng: np.random.Generator) -> None:
    """Numbers are constants of a kernel, arrays may change; as with other names."""
    arrays = [on_gpu(x) for x in inputs(rng, "float16", (1, 2, 1, 20, 30), 64)]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * score_mod.factor + score_mod.table[h]  # type: ignore[attr-defined]

    kernels = set()
    for factor in (2, 2, 3):
        score_mod.factor = factor  # type: ignore[attr-defined]
        score_mod.table = on_gpu(np.ones(2, np.float32))  # type: ignore[attr-defined]
        cufa.attention(*arrays, score_mod=score_mod)
        kernels.add(gpu.launches[-1])
    assert len(kernels) == 2


@pytest.mark.parametrize("changed", ["window", "dtype", "function", "text", "nothing"])
def test_other_functions_are_other_kernels(
    gpu: Gpu, rng: np.random.Generator, changed: str
) -> None:
    arrays = [on_gpu(x) for x in inputs(rng, "float16", (1, 2, 1, 20, 30), 64)]

    def options(window: int, dtype: Any, sign: int) -> Any:
        table: Any = on_gpu(np.ones(30, dtype))
        less = lambda b, h, i, j: i - j < window + table[j]  # noqa: E731
        more = lambda b, h, i, j: i - j > window + table[j]  # noqa: E731
        return {"mask_mod": less if sign < 0 else more}

    for _ in range(2):
        cufa.attention(*arrays, **options(5, np.int32, 1))
    if changed == "text":
        cufa.attention(*arrays, mask_mod="q_idx - kv_idx > 5")
    else:
        window, dtype = 5 + (changed == "window"), np.int16 if changed == "dtype" else np.int32
        cufa.attention(*arrays, **options(window, dtype, -1 if changed == "function" else 1))
    assert len(set(gpu.launches)) == (1 if changed == "nothing" else 2)


@pytest.mark.parametrize("changed", ["out", "device", "kind", "empty"])
def test_a_call_that_is_like_another(gpu: Gpu, rng: np.random.Generator, changed: str) -> None:
    """Calls refuse what the first one refuses."""
    q, k, v = (on_gpu(x) for x in inputs(rng, "float16", (1, 2, 1, 8, 16)))

    def call(table: Any, out: Any = None) -> Any:
        return cufa.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j], out=out)

    for _ in range(2):
        call(on_gpu(np.ones(16, np.float32)))
    out, launches = None, len(gpu.launches)
    table: Any = on_gpu(np.ones(16, np.float32))
    if changed == "out":
        flat = on_gpu(np.zeros(1024, np.float16))
        table = flat.view_of(flat.host[16:48].view(np.float32))
        out = flat.view_of(flat.host[:384].reshape(1, 2, 8, 24))
    elif changed == "device":
        table.device_id = 1
    elif changed == "kind":
        table = table.host
    else:
        table = table[:0]
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="score_mod: table"):
            call(table, out)
    assert len(gpu.launches) == launches


def test_addresses_are_those_of_each_call(
    gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of both functions, with steps and lengths, come after the arrays of arguments."""
    seen = []

    def noted(variant: Variant, device: Any, device_id: int) -> Any:
        function, dtype = gpu.kernel(variant, device, device_id), variant.parameter

        def launch(grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
            seen.append(at(args[0].ptr, (1,), (dtype.itemsize,), dtype)[0].copy())
            function(grid, block, args, smem_bytes)

        return launch

    monkeypatch.setattr(jit, "kernel", noted)
    q, k, v = (on_gpu(x) for x in inputs(rng, "float32", (1, 2, 1, 8, 16)))
    for n in (16, 16, 30):
        one: Any = on_gpu(np.ones((n, 3), np.int8))
        two: Any = on_gpu(np.ones(n, np.float32))
        sinks = on_gpu(np.ones(2, np.float32))
        cufa.attention(
            *(q, k, v),
            sinks=sinks,
            score_mod=lambda s, b, h, i, j: s + one[j, h] + two[i],  # noqa: B023
            mask_mod=lambda b, h, i, j: two[j] > 0,  # noqa: B023
        )
        _, of_sinks, score_mod, mask_mod = seen[-1].item()
        assert of_sinks == (sinks.data.ptr, 1)
        assert score_mod == (one.data.ptr, 3, 1, n, 3, two.data.ptr, 4, n)
        assert mask_mod == (two.data.ptr, 4, n)
