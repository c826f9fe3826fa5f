"""Dropout: the same weights whatever runs, and the formula with them."""

from __future__ import annotations

from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_cases import KERNELS
from played_gpu import Gpu, on_gpu
from reference import assert_accepted, random_inputs, to_host

import cufa
from cufa.features.dropout import philox


@pytest.mark.parametrize(
    ("word", "seed", "expected"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox(word: int, seed: int, expected: tuple[int, ...]) -> None:
    """The known answers of Random123's Philox4x32-10."""
    x = np.uint64(word)
    assert tuple(int(n) for n in philox((x, x, x, x), seed)) == expected


def test_how_many_are_kept() -> None:
    """Within four sigma, of 10^7."""
    for p, seed in ((0.1, 0), (0.5, 2**63 + 5)):
        kept = cufa.dropout_mask((2, 5, 1000, 1000), p, seed)
        assert abs(kept.mean() - (1 - p)) < 4 * np.sqrt(p * (1 - p) / kept.size)


@pytest.mark.gpu
def test_how_many_of_many_are_kept(cupy: Any) -> None:
    """Within four sigma, of 10^8."""
    for p in (0.1, 0.5):
        kept = cufa.dropout_mask((1, 10, 3200, 3200), p, 1, xp=cupy)
        assert abs(float(kept.mean()) - (1 - p)) < 4 * np.sqrt(p * (1 - p) / kept.size)


def test_a_mask_is_that_of_its_parts(xp: ModuleType) -> None:
    """And the same on the CPU and on a GPU."""
    whole = to_host(cufa.dropout_mask((3, 4, 50, 70), 0.4, 11, xp=xp))
    np.testing.assert_array_equal(whole, cufa.dropout_mask((3, 4, 50, 70), 0.4, 11))
    part = to_host(cufa.dropout_mask((2, 3, 20, 33), 0.4, 11, xp=xp))
    np.testing.assert_array_equal(whole[:2, :3, :20, :33], part)
    assert (whole != cufa.dropout_mask((3, 4, 50, 70), 0.4, 12)).any()
    assert cufa.dropout_mask((1, 1, 9, 9), 0.0, 1).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_formula_with_that_mask(xp: ModuleType, rng: np.random.Generator, dtype: str) -> None:
    for options in ({}, {"causal": True}, {"window": (60, 3), "softcap": 4.0}):
        arrays = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=130, sk=257, d=64)
        given = [xp.asarray(x) for x in arrays]
        keep = cufa.dropout_mask((2, 4, 130, 257), 0.25, 2**64 - 1) / 0.75
        call: dict[str, Any] = {"dropout_p": 0.25, "seed": 2**64 - 1, **options}
        out, lse = cufa.attention(*given, return_lse=True, **call)
        assert_accepted(out, lse, *arrays, keep=keep, **options)
        other = cufa.attention(*given, **{**call, "seed": 3})
        assert to_host(other).tobytes() != to_host(out).tobytes()


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_on_the_gpu(cupy: Any, rng: np.random.Generator, kernel: str, dtype: str) -> None:
    for d, causal in ((64, True), (128, False), (192, True)):
        arrays = random_inputs(rng, dtype, b=2, hq=4, hk=1, sq=333, sk=400, d=d)
        given = [cupy.asarray(x) for x in arrays]
        keep = cufa.dropout_mask((2, 4, 333, 400), 0.5, 5) / 0.5
        out, lse = cufa.attention(
            *given, dropout_p=0.5, seed=5, causal=causal, kernel=kernel, return_lse=True
        )
        assert_accepted(out, lse, *arrays, keep=keep, causal=causal)


def test_sequences_of_any_lengths(xp: ModuleType, rng: np.random.Generator) -> None:
    """Each by its own number, queries and keys."""
    offsets = np.array([0, 40, 40, 100], np.int32)
    q, k, v = (rng.standard_normal((100, 2, 32)).astype(np.float16) for _ in range(3))
    keep = cufa.dropout_mask((3, 2, 60, 60), 0.25, 9) / 0.75
    given = [xp.asarray(x) for x in (q, k, v, offsets, offsets)]
    out = to_host(cufa.attention_varlen(*given, dropout_p=0.25, seed=9))
    lengths = xp.asarray(np.array([40, 60], np.int32))
    for i in (0, 2):
        a = slice(offsets[i], offsets[i + 1])
        n = a.stop - a.start
        four = [x[a].swapaxes(0, 1)[None] for x in (q, k, v)]
        assert_accepted(out[a].swapaxes(0, 1)[None], None, *four, keep=keep[i : i + 1, :, :n, :n])
    q, k, v = random_inputs(rng, "float16", b=2, hq=2, sq=60, sk=60, d=32)
    given = [xp.asarray(x) for x in (q, k, v)]
    out = to_host(cufa.attention(*given, lengths_k=lengths, dropout_p=0.25, seed=9))
    for i, n in ((0, 40), (1, 60)):
        one = slice(i, i + 1)
        its = keep[one, :, :, :n]
        assert_accepted(out[one], None, q[one], k[one, :, :n], v[one, :, :n], keep=its)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be 0 or more"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be 0 or more"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p must be 0 or more"),
        ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a real number"),
        ({"dropout_p": 10**400}, ValueError, "dropout_p must be 0 or more"),
        ({"dropout_p": np.array([0.1, 0.2])}, TypeError, "dropout_p must be a real number"),
        ({"dropout_p": True}, TypeError, "dropout_p must be a real number"),
        ({"dropout_p": 0.1}, ValueError, "seed is needed with dropout_p"),
        ({"dropout_p": 0.1, "seed": -1}, ValueError, "seed must be 0 to"),
        ({"dropout_p": 0.1, "seed": 2**64}, ValueError, "seed must be 0 to"),
        ({"dropout_p": 0.1, "seed": 1.0}, TypeError, "seed must be an integer"),
        ({"dropout_p": 0.1, "seed": True}, TypeError, "seed must be an integer"),
    ],
    ids=str,
)
def test_bad_options(
    xp: ModuleType, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    q = xp.ones((1, 1, 4, 8), np.float16)
    for function in (cufa.attention, cufa.explain):
        for _ in range(2):
            with pytest.raises(error, match=f"^{message}"):
                function(q, q, q, **options)
    offsets = np.array([0, 1])
    with pytest.raises(error, match=f"^{message}"):
        cufa.attention_varlen(q[0], q[0], q[0], offsets, offsets, **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_bad_seeds_after_good_calls(gpu: Gpu, rng: np.random.Generator, dropout_p: float) -> None:
    """They are refused where nothing is dropped, too; on a GPU that is played."""
    q = on_gpu(rng.standard_normal((1, 1, 4, 64)).astype(np.float16))
    rows, offsets = q[0].swapaxes(0, 1), on_gpu(np.array([0, 4], np.int32))
    seeds: Any = 3, np.int64(3), 2**64 - 1
    for seed in seeds:
        cufa.attention(q, q, q, dropout_p=dropout_p, seed=seed)
        cufa.attention_varlen(rows, rows, rows, offsets, offsets, dropout_p=dropout_p, seed=seed)
    launches = len(gpu.launches)
    assert launches == 9  # those of attention_varlen are two
    for bad in -1, 2**64, 1.5, "x", True:
        options: dict[str, Any] = {"dropout_p": dropout_p, "seed": bad}
        with pytest.raises((TypeError, ValueError), match=r"^seed must be"):
            cufa.attention(q, q, q, **options)
        with pytest.raises((TypeError, ValueError), match=r"^seed must be"):
            cufa.attention_varlen(rows, rows, rows, offsets, offsets, **options)
    assert len(gpu.launches) == launches


def test_a_share_that_is_no_float(gpu: Gpu, rng: np.random.Generator) -> None:
    """One that is 0 as a float drops nothing; on a GPU that is played."""
    q = on_gpu(rng.standard_normal((1, 1, 4, 64)).astype(np.float16))
    for dropout_p in Fraction(1, 4), np.float32(0.25), Fraction(1, 10**400), 0:
        assert cufa.attention(q, q, q, dropout_p=dropout_p, seed=0) is not None  # type: ignore[arg-type]
    assert [variant.score for variant in gpu.launches[::2]] == [
        gpu.launches[1].score,
        gpu.launches[3].score,
    ]


def test_a_bad_mask() -> None:
    for shape in ((2, 3), [1, 1, 1, 1]):
        with pytest.raises(TypeError, match="shape must be a tuple"):
            cufa.dropout_mask(shape, 0.1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape must be 1 to"):
        cufa.dropout_mask((1, 0, 3, 4), 0.1, 1)
    with pytest.raises(TypeError, match="xp must be"):
        cufa.dropout_mask((1, 1, 3, 4), 0.1, 1, xp=pytest)  # type: ignore[arg-type]
