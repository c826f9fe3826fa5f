"""append.cu: the kernel that writes new tokens, played by the host, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_kernels
import numpy as np
import played_gpu
import pytest
from exhaustive import exhaustive
from reference import DTYPES

import cufa
from cufa import device
from cufa.api.options import Layout
from cufa.compiler import jit, nvrtc
from cufa.cpu import append as cpu
from cufa.launch import append as launch
from cufa.problem.tokens import Tokens
from cufa.specs import means8
from cufa.specs.instance import Instance

INSTANCES = [
    Instance("append", (dtype,), (elements, interleaved))
    for dtype in DTYPES
    for elements in (1, 16 // DTYPES[dtype].itemsize)
    for interleaved in (False, True)
]

OF_8_BITS = [
    *(
        Instance("append8", each.dtypes, (*each.arguments, is_integer))
        for each in INSTANCES
        for is_integer in (False, True)
    ),
    *(Instance("expand8", (dtype,), (n,)) for dtype in DTYPES for n in (False, True)),
    *(means8.instance(dtype, interleaved) for dtype in DTYPES for interleaved in (False, True)),
    *(Instance("lse_mean", (dtype,), ()) for dtype in DTYPES),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("instances", [INSTANCES, OF_8_BITS], ids=["same", "8 bits"])
@exhaustive("others", but=lambda arch: arch == "sm_90a")
def test_compiles_without_spills(instances: list[Instance], arch: str) -> None:
    for instance in instances:
        compiled = nvrtc.compile_variant(instance, device.of_arch(arch).arch)
        assert compiled.spill_bytes == compiled.stack_bytes == 0
        assert "warning" not in compiled.log.lower()


@pytest.fixture(scope="module")
def on_host() -> dict[Instance, Any]:
    return host_kernels.compiled("AppendParams", INSTANCES)


@pytest.fixture
def played(
    monkeypatch: pytest.MonkeyPatch, gpu: played_gpu.Gpu, on_host: dict[Instance, Any]
) -> list[Instance]:
    """Play a GPU that runs the kernel's own source; what it launches is listed."""
    launched: list[Instance] = []

    def kernel(instance: Instance, _gpu: Any, _device_id: int) -> Any:
        launched.append(instance)
        return on_host[instance]

    monkeypatch.setattr(jit, "kernel", kernel)
    return launched


def on_gpu_rotary(rotary: Any) -> cufa.Rotary:
    moved = cufa.Rotary(rotary.cos, rotary.sin, interleaved=rotary.interleaved)
    moved.cos, moved.sin = (played_gpu.on_gpu(x) for x in (rotary.cos, rotary.sin))
    return moved


def assert_agrees(tokens: Tokens, put: Callable[[np.ndarray], Any] = played_gpu.on_gpu) -> None:
    """Assert that the kernel writes what the CPU does, and nothing else."""
    arrays = {n: x for n, x in tokens._asdict().items() if isinstance(x, np.ndarray)}
    there: dict[str, Any] = {}
    for name, array in arrays.items():
        there[name] = (put if array.ndim == 4 else played_gpu.on_gpu)(array)
    rotary = None if tokens.rotary is None else on_gpu_rotary(tokens.rotary)
    launch.append(tokens._replace(**{**there, "rotary": rotary}))
    copies: dict[str, Any] = {name: array.copy() for name, array in arrays.items()}
    here = tokens._replace(**copies)
    cpu.append(here)
    for name, array in there.items():
        got, expected = array.get().astype(np.float32), getattr(here, name).astype(np.float32)
        eps = {2: 8e-3, 4: 1e-6}[array.itemsize] if name in ("k_cache", "turned_q") else 0
        np.testing.assert_allclose(got, expected, eps, eps, err_msg=name)


def some_tokens(
    rng: np.random.Generator,
    dtype: str,
    *,
    seq: int,
    d: int,
    dv: int,
    rotary: cufa.Rotary | None,
    page_size: int = 0,
) -> Tokens:
    """Unequally many new tokens of four sequences, one of them none, in a cache of NaN."""
    b, hk, hq, capacity = 4, 2, 6, 50

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])

    starts = np.array([0, 3, 17, 50], np.int32)
    lengths = np.minimum(starts + np.minimum([seq, 1, seq // 2, 9], seq), capacity).astype(np.int32)
    table, shape = None, (b, hk, capacity)
    if page_size:
        width = -(-capacity // page_size)
        table = rng.permutation(b * width).reshape(b, width).astype(np.int32)
        shape = (b * width, hk, page_size)
    k_cache, v_cache = (np.full((*shape, n), np.nan, DTYPES[dtype]) for n in (d, dv))
    q = drawn(b, hq, seq, d)
    return Tokens(
        k=drawn(b, hk, seq, d),
        v=drawn(b, hk, seq, dv),
        q=q,
        turned_q=None if rotary is None else np.full_like(q, np.nan),
        k_cache=k_cache,
        v_cache=v_cache,
        starts=starts,
        lengths=lengths,
        block_table=table,
        rotary=rotary,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [0, 1, 7, 16])
@pytest.mark.parametrize(
    ("d", "dv", "dim"), [(64, 64, 64), (64, 32, 32), (128, 64, 16), (40, 24, 22), (11, 3, 6)]
)
def test_kernel_agrees_with_the_cpu(
    rng: np.random.Generator,
    played: list[Instance],
    d: int,
    dv: int,
    dim: int,
    page_size: int,
    interleaved: bool,
    dtype: str,
) -> None:
    rotary = cufa.Rotary.of_theta(100.0, dim, 50, interleaved=interleaved)
    for seq in (1, 9):
        assert_agrees(
            some_tokens(rng, dtype, seq=seq, d=d, dv=dv, rotary=rotary, page_size=page_size)
        )
    elements = 16 // DTYPES[dtype].itemsize
    whole = d % elements == dv % elements == dim // 2 % elements == 0
    assert {each.arguments for each in played} == {(elements if whole else 1, interleaved)}


@pytest.mark.parametrize("d", [64, 11])
def test_without_rotary_and_with_odd_memory(
    rng: np.random.Generator, played: list[Instance], d: int
) -> None:
    tokens = some_tokens(rng, "bfloat16", seq=5, d=d, dv=d, rotary=None)
    assert_agrees(tokens)
    rotary = cufa.Rotary.of_theta(100.0, 6, 50)
    tokens = some_tokens(rng, "bfloat16", seq=5, d=d, dv=d, rotary=rotary)
    assert_agrees(tokens, put=played_gpu.one_in)
    assert_agrees(tokens, put=lambda x: played_gpu.on_gpu(x.swapaxes(1, 2)).swapaxes(1, 2))
    assert {each.arguments[0] for each in played[1:]} == {1}


def test_what_the_device_finds_is_not_written_outside(
    rng: np.random.Generator, played: list[Instance]
) -> None:
    """Lengths beyond the capacity, below 0, and pages that do not exist: nothing is written."""
    tokens = some_tokens(rng, "float16", seq=3, d=8, dv=8, rotary=None, page_size=16)
    assert tokens.block_table is not None
    tokens.block_table[0] = -1
    tokens.block_table[1] = len(tokens.k_cache)
    tokens.starts[:] = (0, 0, 2**31 - 4, -(2**31))
    tokens.lengths[:] = (3, 3, 2**31 - 1, -5)
    arrays = tokens._asdict().items()
    there: dict[str, Any] = {n: played_gpu.on_gpu(x) for n, x in arrays if x is not None}
    launch.append(tokens._replace(**there))
    for name in ("k_cache", "v_cache"):
        assert np.isnan(there[name].get().astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_tokens_are_turned_without_a_cache(
    gpu: played_gpu.Gpu,
    rng: np.random.Generator,
    played: list[Instance],
    layout: Layout,
    interleaved: bool,
    dtype: str,
) -> None:
    """A launch for each sequence, or one for all where their tokens are in step."""
    eps = {2: 8e-3, 4: 1e-6}[DTYPES[dtype].itemsize]
    for d, dim in ((64, 64), (40, 22), (11, 6)):
        here = cufa.Rotary.of_theta(100.0, dim, 50, interleaved=interleaved)
        there = on_gpu_rotary(here)
        for b, s in ((2, 7), (1, 9), (5, 1)):
            shape = (b, 6, s, d) if layout == "bhsd" else (b, s, 6, d)
            x = rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
            positions = rng.integers(0, 50, (b, s))
            for given in (3, positions, positions[0], played_gpu.on_gpu(positions)):
                on_host = given.get() if isinstance(given, played_gpu.Array) else given
                expected = here.apply(x, on_host, layout=layout).astype(np.float32)
                for put in (played_gpu.on_gpu, played_gpu.one_in, apart):
                    got = there.apply(put(x), given, layout=layout).get()
                    np.testing.assert_allclose(
                        got.astype(np.float32), expected, eps, eps, err_msg=str(given)
                    )
    outside = played_gpu.on_gpu(np.array([-1, 50, 2**31 - 1, 2**40, -(2**40), 49, 0]))
    x = rng.standard_normal((7, 11), np.float32).astype(DTYPES[dtype])
    got = there.apply(played_gpu.on_gpu(x), outside).get()
    np.testing.assert_array_equal(got[:5], x[:5])
    np.testing.assert_array_equal(got[6], x[6])
    assert (got[5] != x[5]).any()
    gpu.stream = played_gpu.Stream(capturing=True)
    with pytest.raises(RuntimeError, match=r"Rotary\.apply cannot be captured"):
        there.apply(played_gpu.on_gpu(x), 0)


def apart(x: np.ndarray) -> played_gpu.Array:
    """Put an array on the played GPU, a gap behind each element."""
    return played_gpu.on_gpu(np.repeat(x, 2, axis=-1))[..., ::2]
