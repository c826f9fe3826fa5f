"""The kernels at the limits of values: large and infinite ones, NaN, and rows next to such."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import random_inputs, to_host
from test_gpu import on_device

import cufa
from cufa.planner.plan import Plan
from cufa.specs import KERNELS

pytestmark = pytest.mark.gpu

TENSOR_CORES = [
    ("fa2_mma", "float16"),
    ("fa2_mma", "bfloat16"),
    ("fa3_wgmma", "float16"),
    ("fa3_wgmma", "bfloat16"),
    ("fa2_fp32", "float32"),
]
kernels = pytest.mark.parametrize(("kernel", "dtype"), TENSOR_CORES)

# Rows that are multiplied together, else those of a tile: they may share a NaN of V.
ROWS_TOGETHER = {"fa2_mma": 16, "fa2_fp32": 1, "fa3_wgmma": 64}


@pytest.fixture(autouse=True)
def runs_here(request: pytest.FixtureRequest, cupy: Any) -> None:
    """Skip kernels that this GPU has no instructions for."""
    kernel = getattr(request.node, "callspec", None)
    name = kernel.params.get("kernel", "fa2_mma") if kernel else "fa2_mma"
    if KERNELS[name].archs is not None:
        request.getfixturevalue("hopper")


def called(cupy: Any, kernel: str, *arrays: np.ndarray, **options: Any) -> np.ndarray:
    out = cufa.attention(*on_device(cupy, *arrays), kernel=kernel, **options)
    return to_host(out).astype(np.float64)


@pytest.mark.parametrize("kernel", ["fa2_mma", "fa3_wgmma"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("key", [0, 100])
@pytest.mark.parametrize("value", [1e30, -1e33, 1e-30])
def test_values_near_the_ends_of_bfloat16(
    cupy: Any, kernel: str, d: int, key: int, value: float
) -> None:
    """P of a key 26 nats above those before it and V together fit float32."""
    q = np.zeros((1, 2, 200, d), ml_dtypes.bfloat16)
    k = np.zeros((1, 2, 700, d), ml_dtypes.bfloat16)
    v = np.full((1, 2, 700, d), value, ml_dtypes.bfloat16)
    q[..., 0], k[..., key, 0] = 1, 26
    out = called(cupy, kernel, q, k, v, scale=1.0)
    np.testing.assert_allclose(out, float(v[0, 0, 0, 0]), rtol=2**-7)


@pytest.mark.parametrize(("kernel", "dtype"), [*TENSOR_CORES, ("fa1_fp32", "float32")])
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize(("sq", "sk", "bad"), [(400, 400, 390), (300, 433, 420), (433, 300, 290)])
def test_nan_of_v_stays_with_rows_that_see_keys_of_its_tile(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, d: int, sq: int, sk: int, bad: int
) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=2, sq=sq, sk=sk, d=d)
    given = on_device(cupy, q, k, v)
    plan = cufa.explain(*given, causal=True, kernel=kernel)
    assert isinstance(plan, Plan)
    bm, bn = plan.variant.bm, plan.variant.bn
    expected = called(cupy, kernel, q, k, v, causal=True)
    v[:, :, bad] = np.nan
    out = called(cupy, kernel, q, k, v, causal=True)
    together = ROWS_TOGETHER.get(kernel, bm)
    last_key = np.arange(sq) // together * together + together - 1 + sk - sq
    clear = last_key < bad // bn * bn
    assert clear.any()
    np.testing.assert_allclose(out[:, :, clear], expected[:, :, clear], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["fa2_fp32"])
@pytest.mark.parametrize("d", [16, 64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_infinities_of_float32(
    cupy: Any, rng: np.random.Generator, kernel: str, d: int, causal: bool
) -> None:
    """They and what rounds up to them in TF32 give what they give on the CPU."""
    q, k, v = random_inputs(rng, "float32", b=1, hq=2, sq=150, sk=150, d=d)
    q[..., 0] = np.abs(q[..., 0]) + 0.1
    k[:, 0, 3, 0] = k[:, 0, 70, 0] = -np.inf
    v[:, 0, 40, 1] = np.inf
    v[:, 1, 41, 2] = -np.inf
    v[:, 1, 42, 3] = np.float32(3.4028e38)  # rounds up to infinity in TF32
    expected = cufa.attention(q, k, v, causal=causal)
    out = to_host(cufa.attention(*on_device(cupy, q, k, v), causal=causal, kernel=kernel))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_bits_of_a_row_do_not_depend_on_its_neighbours(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, d: int, causal: bool
) -> None:
    """Whatever the neighbours' scores make their warp do."""
    q, k, v = random_inputs(rng, dtype, b=1, hq=2, sq=270, sk=900, d=d)
    k *= np.linspace(3, 1, 900)[:, None].astype(k.dtype)
    alone = called(cupy, kernel, q, k, v, causal=causal)
    for factor in (0, 30, 1000):
        others = q.copy()
        rows = np.arange(270) % 3 != 1
        others[:, :, rows] = (others[:, :, rows].astype(np.float32) * factor).astype(q.dtype)
        beside = called(cupy, kernel, others, k, v, causal=causal)
        np.testing.assert_array_equal(beside[:, :, ~rows], alone[:, :, ~rows])


@kernels
@pytest.mark.parametrize("where", ["k", "v"])
def test_one_nan_key(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, where: str
) -> None:
    """All rows that see it are NaN, and no others."""
    arrays = dict(
        zip("qkv", random_inputs(rng, dtype, b=1, hq=2, sq=500, sk=500, d=64), strict=True)
    )
    arrays[where][:, 0, 300] = np.nan
    out = called(cupy, kernel, *arrays.values(), causal=True)
    assert np.isnan(out[:, 0, 300:]).all()
    assert not np.isnan(out[:, 1]).any()
    assert not np.isnan(out[:, 0, :128]).any()
