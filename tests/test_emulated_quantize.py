"""quantize.cu: its source on the host writes what the CPU does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from exhaustive import exhaustive
from played_gpu import on_gpu
from quantized_alike import assert_alike
from reference import DTYPES
from test_emulated import emulated, emulator  # noqa: F401

import cufa
from cufa import device
from cufa.api.quantize_qkv import prepare_qkv
from cufa.launch.quantize import run
from cufa.quantized.transform import COLUMNS

runs = pytest.mark.usefixtures("emulated")


def assert_agrees(x: np.ndarray, there: Any = None, **options: Any) -> None:
    found = cufa.quantize(on_gpu(x) if there is None else there, **options)
    expected = cufa.quantize(x, **options)
    assert_alike(found, expected)
    assert (found.shape, found.dtype, found.block) == (x.shape, x.dtype, expected.block)


def drawn(rng: np.random.Generator, *shape: int, dtype: str = "float16") -> np.ndarray:
    x = rng.standard_normal(shape, np.float32) * np.float32(2) ** rng.integers(-8, 8, shape)
    return x.astype(DTYPES[dtype])


@needs_compiler
@runs
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_of_each(rng: np.random.Generator, hadamard: bool, transposed: bool) -> None:
    x = drawn(rng, 2, 2, 150, 64)
    x[0, 0, 3, 4], x[0, 1, 140, 5], x[1, 1, 2, 3] = np.nan, np.inf, -np.inf
    x[1, 0, :128] = 0
    for granularity in ("block", "tensor"):
        options: dict[str, Any] = {"granularity": granularity, "seed": 3}
        assert_agrees(x, hadamard=hadamard, transposed=transposed, **options)


@needs_compiler
@runs
@exhaustive("quantize")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*COLUMNS, 8, 100, 131])
def test_dtypes_and_head_dims(rng: np.random.Generator, d: int, dtype: str) -> None:
    x = drawn(rng, 3, 140, d, dtype=dtype)
    assert_agrees(x, hadamard=True)
    assert_agrees(x, transposed=True)


@needs_compiler
@runs
@exhaustive("quantize")
@pytest.mark.parametrize(
    "options",
    [
        *({"block": block} for block in (16, 32, 64, 256, 1024)),
        {"granularity": "head"},
        {"granularity": "tensor"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_granularities(rng: np.random.Generator, options: dict[str, Any]) -> None:
    for seq in (1, 128, 300):
        assert_agrees(drawn(rng, 2, 3, seq, 64), hadamard=True, **options)


@needs_compiler
@runs
def test_strides_and_layouts(rng: np.random.Generator) -> None:
    wide = drawn(rng, 2, 70, 3, 80)
    for at in (np.s_[..., :64], np.s_[:, ::-1, :, :64], np.s_[..., 1:65], np.s_[..., ::2]):
        assert_agrees(wide[at], on_gpu(wide)[at], layout="bshd")
    assert_agrees(wide[0, :, :, :64], on_gpu(wide)[0, :, :, :64], layout="thd")


@needs_compiler
@runs
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_take_tiles_in_turn(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, d: int, dtype: str
) -> None:
    """On a GPU with one multiprocessor each block takes several tiles, in all passes."""
    small = device.named("h200")._replace(sm_count=1)
    monkeypatch.setattr(device, "of_id", lambda _: small)
    x = drawn(rng, 1, 3, 600, d, dtype=dtype)
    x[0, 1, 130, 2], x[0, 2, 3, 4] = np.inf, np.nan
    for granularity in ("block", "head"):
        assert_agrees(x, hadamard=True, granularity=granularity)
        assert_agrees(x, transposed=True, granularity=granularity)


@needs_compiler
@runs
def test_empty_arrays() -> None:
    for shape in ((0, 2, 5, 64), (2, 0, 5, 64), (2, 2, 0, 64)):
        assert_agrees(np.ones(shape, np.float32), granularity="tensor")


@runs
def test_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "of_id", lambda _: device.named("a100"))
    with pytest.raises(ValueError, match=r"x is on a GPU .* 8.0: 8.9 or later .*asnumpy\(x\)\)"):
        cufa.quantize(on_gpu(np.ones((4, 64), np.float16)))


@runs
def test_what_the_gpu_does_not_take() -> None:
    x = on_gpu(np.ones((4, 64), np.float16))
    with pytest.raises(ValueError, match="smooth must be False for CuPy arrays"):
        cufa.quantize(x, smooth=True)


OFFSETS = ([0, 0, 7, 135, 135, 300], [0, 300], [0, 128, 256], [0, 5], [0])


@needs_compiler
@runs
@pytest.mark.parametrize(
    "options",
    [{}, {"block": 32}, {"transposed": True}, {"granularity": "head", "transposed": True}],
    ids=str,
)
def test_sequences_in_blocks_of_their_own(
    rng: np.random.Generator, options: dict[str, Any]
) -> None:
    x = drawn(rng, 300, 3, 64)
    hadamard = not options.get("transposed", False)
    for numbers in OFFSETS:
        offsets = np.array(numbers)
        assert_agrees(x, layout="thd", hadamard=hadamard, cu_seqlens=offsets, **options)
    assert_agrees(x[:0], layout="thd", cu_seqlens=np.array([0, 0, 0]), **options)


@needs_compiler
@runs
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_that_do_not_count_are_zeros(rng: np.random.Generator, transposed: bool) -> None:
    """They hold numbers that would be the largest of their blocks."""
    x = drawn(rng, 3, 2, 300, 64)
    used = np.array([0, 130, 300], np.int32)
    for i, n in enumerate(used):
        x[i, :, n:] = 6e4

    def made(x: Any, used: Any, offsets: Any, layout: str) -> cufa.Quantized:
        name = "v" if transposed else "k"
        how: dict[str, Any] = {"transposed": transposed, "layout": layout}
        how["hadamard"] = not transposed
        arrays, launches = prepare_qkv({name: x}, {name: offsets}, {name: used}, **how)
        run(launches)
        return arrays[name]

    found = made(on_gpu(x), on_gpu(used), None, "bhsd")
    expected = made(x, used, None, "bhsd")
    assert_alike(found, expected)
    assert np.abs(expected.dequantize()[1, :, 130:]).max() == 0
    x, offsets = drawn(rng, 300, 2, 64), np.array([0, 140, 290, 300])
    used = np.array([129, 0, 10], np.int32)
    x[129:290] = 6e4
    found = made(on_gpu(x), on_gpu(used), offsets, "thd")
    expected = made(x, used, offsets, "thd")
    assert_alike(found, expected)
    assert expected.scales.max() < 6e4 / 448


@needs_compiler
@runs
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_have_no_signs(dtype: str, transposed: bool) -> None:
    """Those of short rows and of rows between sequences, whatever signs the transform has."""
    how: dict[str, Any] = {"hadamard": True, "transposed": transposed}
    for seed in (0, 14, 17):
        zeros = np.zeros((2, 20, 8), DTYPES[dtype])
        assert_agrees(zeros, seed=seed, **how)
        assert not cufa.quantize(zeros, seed=seed, **how).values.view(np.uint8).any()
        ones = np.ones((200, 2, 64), DTYPES[dtype])
        offsets = np.array([0, 7, 150, 200])
        assert_agrees(ones, seed=seed, layout="thd", cu_seqlens=offsets, **how)


@needs_compiler
@runs
@pytest.mark.parametrize("numbers", [[5, 400, -3, 200], [300, 0, 300, 0], [7, 7, 2**31 - 1, 9]])
def test_offsets_that_mean_nothing_read_nothing_outside(
    rng: np.random.Generator, numbers: list[int]
) -> None:
    x = on_gpu(drawn(rng, 300, 2, 64))
    found = cufa.quantize(x, layout="thd", cu_seqlens=on_gpu(np.array(numbers, np.int32)))
    assert np.isfinite(found.scales.get()).all()
