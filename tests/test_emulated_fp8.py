"""fp8_wgmma.cu on the host, from `cufa.launch.fp8` on."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import played_gpu
import pytest
from emulated import FOLDERS, Emulator, emulate, needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, on_gpu
from quantized import E4M3, LARGEST, quantized, transposed
from reference import DTYPES, oracle
from shared_libraries import Sources

from cufa import device
from cufa.launch import fp8
from cufa.planner.fp8 import plan_fp8
from cufa.problem.extras import NO_EXTRAS, Extras
from cufa.problem.parse import parse
from cufa.specs.fp8_wgmma import HEAD_DIMS

pytestmark = needs_compiler

#: Errors of results, relative to their root mean square: P has four bits of 8.
RMSE = 0.03
#: Scores up to 10 or so are sums of 14 bits, in several steps.
LSE_ERROR = 1e-2

Sizes = tuple[int, int, int, int, int]
"""Batch, query heads, K/V heads, queries and keys."""

PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": (70, 9)},
    "causal window": {"causal": True, "window": (30, None)},
    "softcap": {"softcap": 2.0, "causal": True},
    "sinks": {"sinks": np.linspace(-1, 2, 4, dtype=np.float32)},
}


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture(autouse=True)
def emulated(
    gpu: Gpu,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Emulator:
    """Play a GPU of two multiprocessors; warps take turns at random, or in order."""
    few = device.named("h200")._replace(sm_count=2)
    monkeypatch.setattr(device, "of_id", lambda device_id: few)
    monkeypatch.setattr(fp8, "_prepared", {})
    emulate(monkeypatch, emulator)
    seed = zlib.crc32(request.node.name.encode()) % 8
    emulator.last_first, emulator.seed = seed % 2 == 1, seed
    return emulator


def drawn(
    rng: np.random.Generator, sizes: Sizes, d: int, dv: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw q, k and v whose rows differ in size."""
    b, hq, hk, sq, sk = sizes
    q, k, v = (
        rng.standard_normal(shape) for shape in ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv))
    )
    k *= np.exp(np.sin(np.arange(sk) / 50))[:, None]
    v *= np.exp(2 * np.sin(np.arange(sk) / 90))[:, None]
    return q, k, v


def computed(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dtype: str = "bfloat16",
    blocks: tuple[int | None, int | None, int | None] = (64, 128, 128),
    sinks: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the result and the log-sum-exp, and those of the oracle for the same 8 bits."""
    quantized_all = [quantized(x, block) for x, block in zip((q, k, v), blocks, strict=True)]
    like = [np.broadcast_to(np.zeros((), DTYPES[dtype]), x.shape) for x in (q, k, v)]
    given = dict(zip("qkv", like, strict=True))
    problem, _ = parse({**given, "sinks": sinks, "return_lse": True, **options}, np)
    extras = Extras() if sinks is None else Extras((None, None, None, on_gpu(sinks), None))
    operands = [
        fp8.Operand(on_gpu(transposed(values) if i == 2 else values), on_gpu(scales), block)
        for i, ((values, scales, _), block) in enumerate(zip(quantized_all, blocks, strict=True))
    ]
    out = played_gpu.Array((*q.shape[:3], v.shape[3]), DTYPES[dtype])
    lse = played_gpu.Array(q.shape[:3], np.float32)
    plan = plan_fp8(problem, device.of_id(0))
    launched(plan, problem, fp8.Operands(*operands), out, lse, extras)
    if sinks is not None:
        options["sinks"] = sinks
    expected, expected_lse = oracle(*(x for _, _, x in quantized_all), **options)
    return out.host.astype(np.float64), lse.host, expected, expected_lse


def launched(
    plan: Any, problem: Any, operands: Any, out: Any, lse: Any, extras: Any = NO_EXTRAS
) -> None:
    launch = fp8.prepared(plan, problem, operands, out, extras)
    values, scales = [x.values for x in operands], [x.scales for x in operands]
    launch(*fp8.addresses(values, scales, out, lse), *extras.addresses(plan.variant))


def check(found: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], lse_error: float) -> None:
    out, lse, expected, expected_lse = found
    size = np.sqrt((expected**2).mean())
    assert np.sqrt(((out - expected) ** 2).mean()) <= RMSE * size
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=lse_error)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("d", HEAD_DIMS)
@exhaustive("fp8", but=lambda d, parts: (d, parts) in [(128, "causal"), (64, "all")])
def test_results(rng: np.random.Generator, d: int, parts: str) -> None:
    """Two heads share K and V; no length is a multiple of a tile; blocks have several tiles."""
    arrays = drawn(rng, (2, 4, 2, 333, 300), d, d)
    check(computed(*arrays, **PARTS[parts]), LSE_ERROR)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (1, 2, 1, 64, 128), (1, 1, 1, 130, 700), (3, 1, 1, 20, 65)]
)
@pytest.mark.parametrize(
    ("d", "dv"), [(64, 64), (192, 128), (128, 128), (256, 256), (64, 256), (256, 96)]
)
@exhaustive("fp8", but=lambda d, sizes: d == 192 and sizes[3] > 1)
def test_sizes(rng: np.random.Generator, sizes: Sizes, d: int, dv: int) -> None:
    check(computed(*drawn(rng, sizes, d, dv), dtype="float16"), LSE_ERROR)


@pytest.mark.parametrize("blocks", [(None, None, None), (16, 256, 128), (1024, 128, None)])
@exhaustive("fp8", but=lambda blocks: blocks[0] == 16)
def test_blocks_of_scales(rng: np.random.Generator, blocks: Any) -> None:
    check(computed(*drawn(rng, (1, 2, 1, 200, 300), 64, 64), blocks=blocks), LSE_ERROR)


@pytest.mark.parametrize("drift", [-40.0, 40.0])
@exhaustive("fp8", but=lambda drift: drift > 0)
def test_scores_that_rise_or_fall_along_the_keys(rng: np.random.Generator, drift: float) -> None:
    """References follow the maxima: no weight passes 448. Sums of scores have 14 bits."""
    q, k, v = drawn(rng, (1, 1, 1, 70, 900), 128, 128)
    q[..., 0] = 4
    k[..., 0] += drift * np.arange(900) / 900
    check(computed(q, k, v), 0.1)


@pytest.mark.parametrize("d", [64, 128, 256])
@exhaustive("fp8", but=lambda d: d == 128)
def test_scores_that_leap(rng: np.random.Generator, d: int) -> None:
    """In some warps weights pass float32's range, and scores are computed once more."""
    q, k, v = drawn(rng, (1, 1, 1, 130, 700), d, d)
    q[..., 0] = np.where(np.arange(130) % 40 < 3, 30, 0)
    k[:, :, :100, 0] += 4 * d**0.5
    check(computed(q, k, v), 0.1)


@exhaustive("fp8", but=lambda: True)
def test_error_does_not_grow_with_the_keys(rng: np.random.Generator) -> None:
    """All weights are alike: sums of them in 14 bits would lose the later ones."""

    def error(keys: int) -> float:
        q, k, v = drawn(rng, (1, 1, 1, 64, keys), 64, 64)
        out, _, expected, _ = computed(q * 1e-3, k, np.abs(v))
        return float(np.sqrt(((out - expected) ** 2).mean() / (expected**2).mean()))

    assert error(8000) < 1.3 * error(500)


def test_the_scale_of_all(rng: np.random.Generator) -> None:
    """One scale stands for all heads and batches."""
    x = rng.standard_normal((2, 2, 130, 64))
    values, scales, _ = quantized(x.reshape(1, 1, -1, 64), None)
    q = fp8.Operand(on_gpu(values.reshape(x.shape)), on_gpu(scales), None)
    assert q.numbers == (0, 31)
    v = q._replace(values=on_gpu(transposed(values.reshape(x.shape))))
    like = np.broadcast_to(np.zeros((), np.float16), x.shape)
    problem, _ = parse(dict.fromkeys("qkv", like), np)
    out = played_gpu.Array(x.shape, np.float16)
    plan = plan_fp8(problem, device.of_id(0))
    launched(plan, problem, fp8.Operands(q, q, v), out, None)
    stored = values.view(E4M3).reshape(x.shape).astype(np.float64) * scales
    expected, _ = oracle(stored, stored, stored)
    error = np.sqrt(((out.host - expected) ** 2).mean() / (expected**2).mean())
    assert error <= RMSE


def test_the_emulator_rounds_to_e4m3_as_ml_dtypes_does(tmp_path: Path) -> None:
    top = """
#include "ptx_fp8.cuh"
SHARED_MEMORY(1024)
extern "C" void narrow_all(const float* x, unsigned* y, int n) {
    for (int i = 0; i < n; i += 4) y[i / 4] = pack4_e4m3(x[i], x[i + 1], x[i + 2], x[i + 3]);
}
extern "C" void widen_all(const unsigned char* x, float* y, int n) {
    for (int i = 0; i < n; ++i) y[i] = wide(float8{x[i]});
}
"""
    library = ctypes.CDLL(str(Sources(*FOLDERS, precompiled="ptx_sm90.cuh").library(top)))
    every = np.arange(256, dtype=np.uint8)
    wide = np.empty(256, np.float32)
    library.widen_all(every.ctypes, wide.ctypes, 256)
    np.testing.assert_array_equal(wide, every.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    numbers = np.sort(wide[np.isfinite(wide)])
    between = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, between, np.nextafter(between, 0), [500, -1e9, np.nan]])
    x = np.resize(x, -(-x.size // 4) * 4).astype(np.float32)
    narrow = np.empty(x.size, np.uint8)
    library.narrow_all(x.ctypes, narrow.ctypes, x.size)
    expected = np.clip(x, -LARGEST, LARGEST).astype(E4M3)
    np.testing.assert_array_equal(narrow.view(E4M3).astype(float), expected.astype(float))
