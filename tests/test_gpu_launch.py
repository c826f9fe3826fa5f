"""On a CUDA device: calls of which the like has been made, CUDA graphs, and the memory of both."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from forgetting import forget_calls
from reference import DTYPES, assert_accepted, random_inputs, to_host
from test_gpu import kernels, poisoned_out, same_bits

import cufa
from cufa.device import Device
from cufa.launch import calls, counters
from cufa.planner.plan import Plan
from cufa.specs.variant import Variant

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_runs_here")]


@contextmanager
def allocations(cupy: Any) -> Iterator[list[int]]:
    """Give the sizes of what is allocated meanwhile."""
    pool, sizes = cupy.get_default_memory_pool(), []

    def malloc(size: int) -> Any:
        sizes.append(size)
        return pool.malloc(size)

    with cupy.cuda.using_allocator(malloc):
        yield sizes


def planned(*arrays: Any, **options: Any) -> Variant:
    chosen = cufa.explain(*arrays, **options)
    assert isinstance(chosen, Plan)
    return chosen.variant


# --- lengths that are new ---


@kernels
@pytest.mark.parametrize("d", [64, 128, 59])
def test_new_lengths(cupy: Any, rng: np.random.Generator, d: int, kernel: str, dtype: str) -> None:
    """They are patched into what another length has left."""
    problems = []
    for n in range(30):
        hk = int(rng.integers(1, 4))
        sizes = {"b": int(rng.integers(1, 4)), "hq": hk * int(rng.integers(1, 5)), "hk": hk}
        sizes |= {"sq": int(rng.integers(1, 260)), "sk": int(rng.integers(1, 260))}
        q, k, v = random_inputs(rng, dtype, **sizes, d=d)
        options: dict[str, Any] = {"causal": n % 3 == 0, "return_lse": True, "kernel": kernel}
        given = [cupy.asarray(x) for x in (q, k, v)]
        out = poisoned_out(cupy, q, v) if n % 2 else None
        result, lse = cufa.attention(*given, **options, out=out)
        assert_accepted(result, lse, q, k, v, causal=n % 3 == 0, what=str(sizes))
        problems.append((given, options, (result, lse)))
    for given, options, found in problems:
        forget_calls()
        for a, b in zip(found, cufa.attention(*given, **options), strict=True):
            assert same_bits(a, b)


@kernels
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_cache_that_grows(
    cupy: Any, rng: np.random.Generator, causal: bool, layout: str, kernel: str, dtype: str
) -> None:
    """Keys that will be there later are NaN until then."""
    length = 150
    # With fewer results, the largest error of float32, the twin's too, is chance.
    q, k, v = random_inputs(rng, dtype, b=24, hq=8, hk=2, sq=1, sk=length, d=64)
    axes = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
    query = cupy.asarray(q.transpose(axes).copy())
    full = [cupy.asarray(x) for x in (k, v)]
    cache = [cupy.full([x.shape[n] for n in axes], np.nan, x.dtype) for x in (k, v)]
    options: dict[str, Any] = {"causal": causal, "layout": layout, "kernel": kernel}
    found = []
    for n in range(1, length + 1):
        parts = []
        for there, here in zip(cache, full, strict=True):
            there.transpose(axes)[:, :, n - 1] = here[:, :, n - 1]
            parts.append(there[:, :, :n] if layout == "bhsd" else there[:, :n])
        found.append(cufa.attention(query, *parts, **options, return_lse=True))
    for n, (out, lse) in enumerate(found, 1):
        # With one key the twin makes no error at all, and the split products one of the last bit.
        if n in (2, 3, 15, 16, 17, 64, 65, 128, 129, length):
            result = to_host(out).transpose(axes)
            assert_accepted(result, lse, q, k[:, :, :n], v[:, :, :n], what=f"{n} keys")
        parts = [cupy.ascontiguousarray(x[:, :, :n]).transpose(axes) for x in full]
        again, lse_again = cufa.attention(query, *parts, **options, return_lse=True)
        assert same_bits(again, out), f"{n} keys"
        assert same_bits(lse_again, lse), f"{n} keys"


# --- memory ---


@kernels
@pytest.mark.parametrize("shared", ["batch", "heads", "batch and heads"])
def test_broadcast_keys_and_values_are_read_in_place(
    cupy: Any, rng: np.random.Generator, shared: str, kernel: str, dtype: str
) -> None:
    one = (slice(1 if "batch" in shared else None), slice(1 if "heads" in shared else None))
    for sq in (1, 7, 131, 300):  # with rows of several heads in a tile, and without
        q, k, v = random_inputs(rng, dtype, b=3, hq=8, hk=2, sq=sq, sk=193, d=64, dv=32)
        given = [cupy.asarray(q)]
        for x in (k, v):
            given.append(cupy.broadcast_to(cupy.asarray(x[one].copy()), x.shape))
        hosts = [to_host(cupy.ascontiguousarray(x)) for x in given]
        for causal in (False, True):
            options: dict[str, Any] = {"causal": causal, "kernel": kernel}
            expected = cufa.attention(*(cupy.ascontiguousarray(x) for x in given), **options)
            for _ in range(2):
                out = poisoned_out(cupy, q, v)
                with allocations(cupy) as sizes:
                    cufa.attention(*given, out=out, **options)
                assert len(sizes) == (kernel == "fa1_fp32"), "a copy was made"
                assert same_bits(out, expected), f"{sq} queries, causal {causal}"
            assert_accepted(out, None, *hosts, causal=causal)


@kernels
def test_a_graph_that_is_gone_leaves_no_memory(
    cupy: Any, rng: np.random.Generator, stream: Any, kernel: str, dtype: str
) -> None:
    if kernel == "fa1_fp32":
        pytest.skip("it is not captured")
    pool = cupy.get_default_memory_pool()

    def replayed() -> None:
        q, k, v = (cupy.zeros((2, 70, 300, 64), DTYPES[dtype]) for _ in range(3))
        options: dict[str, Any] = {"causal": True, "kernel": kernel, "return_lse": True}
        cufa.attention(q, k, v, **options)
        stream.begin_capture()
        results = [cufa.attention(q, k, v, **options) for _ in range(3)]
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert results

    replayed()
    gc.collect()
    before = pool.used_bytes()
    for _ in range(3):
        replayed()
    gc.collect()
    assert pool.used_bytes() == before


# --- CUDA graphs ---


@kernels
@pytest.mark.parametrize("mode", ["Relaxed", "Global"])
def test_cuda_graph(
    cupy: Any, rng: np.random.Generator, stream: Any, mode: str, kernel: str, dtype: str
) -> None:
    """After one call with the same tile, of other lengths; results are not all that may be new."""
    if kernel == "fa1_fp32":
        pytest.skip("it is not captured")
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, sq=129, sk=150, d=64)
    given = [cupy.asarray(np.zeros_like(x)) for x in (q, k, v)]
    out = poisoned_out(cupy, q, v)
    options: dict[str, Any] = {"causal": True}
    options["kernel"] = planned(*given, causal=True, kernel=kernel)
    forget_calls()
    cufa.attention(*(x[:, :, :100] for x in given), **options, return_lse=True)
    if mode == "Relaxed":
        options["return_lse"] = True  # for which CuPy's pool may have to grow
    stream.synchronize()
    stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
    try:
        with allocations(cupy) as sizes:
            result = cufa.attention(*given, out=out, **options)
    finally:
        graph = stream.end_capture()
    lse = result[1] if mode == "Relaxed" else None
    assert sizes == ([] if lse is None else [lse.nbytes])
    others = [cupy.full(q.shape, np.nan, q.dtype) for _ in range(16)]  # may not get its memory
    for there, here in zip(given, (q, k, v), strict=True):
        there[...] = cupy.asarray(here)
    out[...] = poisoned_out(cupy, q, v)
    if lse is not None:
        lse[...] = np.nan
    graph.launch(stream)
    stream.synchronize()
    assert_accepted(out, lse, q, k, v, causal=True)
    assert all(np.isnan(cupy.asnumpy(x).astype(np.float32)).all() for x in others)


@kernels
def test_what_is_not_captured(
    cupy: Any, rng: np.random.Generator, stream: Any, kernel: str, dtype: str
) -> None:
    """The capture goes on."""
    odd = [cupy.asarray(x) for x in random_inputs(rng, dtype, hq=4, sq=67, d=59)]
    even = random_inputs(rng, dtype, hq=4, sq=67, d=64)
    given = [cupy.asarray(x) for x in even]
    out = poisoned_out(cupy, even[0], even[2])
    cufa.attention(*odd, kernel=kernel)
    cufa.attention(*given, kernel=kernel, scale=-0.1)
    cufa.attention(*given, kernel=kernel, out=out)
    expected = out.copy()
    out.fill(np.nan)
    stream.synchronize()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
    try:
        with pytest.raises(ValueError, match=r"^q \(shape \(1, 4, 67, 59\), .* would be copied"):
            cufa.attention(*odd, kernel=kernel)
        with pytest.raises(ValueError, match=r"^q .* would be copied.* scale is -0.1"):
            cufa.attention(*given, kernel=kernel, scale=-0.1)
        if kernel == "fa1_fp32":
            with pytest.raises(ValueError, match=r"^kernel: fa1_fp32 needs memory"):
                cufa.attention(*given, kernel=kernel, out=out)
        else:
            cufa.attention(*given, kernel=kernel, out=out)
    finally:
        graph = stream.end_capture()
    if kernel != "fa1_fp32":
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(out, expected)


@pytest.fixture
def own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without counters."""
    monkeypatch.setattr(counters, "_of_device", {})
    monkeypatch.setattr(calls, "_prepared", {})
    monkeypatch.setattr(calls, "_latest_calls", {})


def many_tiles(cupy: Any, rng: np.random.Generator, hopper: Device) -> tuple[Any, Any, Variant]:
    """Return a causal problem whose tiles blocks draw: on the host, on the GPU, its variant."""
    host = random_inputs(rng, "float16", b=3, hq=80, sq=300, sk=250, d=64)
    given = [cupy.asarray(x) for x in host]
    chosen = cufa.explain(*given, causal=True, kernel="fa3_wgmma")
    assert isinstance(chosen, Plan)
    assert chosen.grid == hopper.sm_count * chosen.variant.blocks_per_sm
    assert 3 * 80 * chosen.q_tiles > 2 * chosen.grid
    return host, given, chosen.variant


@pytest.mark.usefixtures("own_counters")
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_are_drawn_in_a_graph_after_a_call_that_draws_none(
    cupy: Any, rng: np.random.Generator, stream: Any, hopper: Device, causal: bool
) -> None:
    """The call may even be of another kernel, if that of the graph has been loaded."""
    host, given, variant = many_tiles(cupy, rng, hopper)
    out = poisoned_out(cupy, host[0], host[2])
    few = [x[:1, :2] for x in given]
    if causal:
        cufa.attention(*few, causal=True, kernel=variant)
    else:
        cufa.attention(*given, causal=True, kernel=variant)
        stream.synchronize()
        counters._of_device.clear()
        forget_calls()
        cufa.attention(*few, kernel="fa3_wgmma")
    stream.synchronize()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
    try:
        for _ in range(2):
            cufa.attention(*given, causal=True, out=out, kernel=variant)
    finally:
        graph = stream.end_capture()
    for _ in range(3):
        out.fill(np.nan)
        graph.launch(stream)
        cufa.attention(*given, causal=True, kernel=variant)
    stream.synchronize()
    assert_accepted(out, None, *host, causal=True)


@pytest.mark.usefixtures("own_counters")
def test_counters_in_turn(
    cupy: Any, rng: np.random.Generator, hopper: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_RING", 2)
    host, given, variant = many_tiles(cupy, rng, hopper)
    out, lse = cufa.attention(*given, causal=True, kernel=variant, return_lse=True)
    assert_accepted(out, lse, *host, causal=True)
    right = cupy.ones((), bool)
    for _ in range(50):
        again = cufa.attention(*given, causal=True, kernel=variant)
        right &= (again.view(np.uint16) == out.view(np.uint16)).all()
    assert bool(right)


def test_graph_of_torch(cupy: Any, rng: np.random.Generator, hopper: Device) -> None:
    """In its default mode, which lets no thread allocate."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA in PyTorch")
    host = random_inputs(rng, "float16", b=2, hq=80, sq=300, sk=250, d=64)
    tensors = [torch.from_numpy(x).cuda() for x in host]
    result = torch.full_like(tensors[0], float("nan"))
    given, out = [cupy.asarray(x) for x in tensors], cupy.asarray(result)
    assert out.data.ptr == result.data_ptr()

    def attend() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            cufa.attention(*given, causal=True, out=out)

    with torch.cuda.stream(torch.cuda.Stream()):
        attend()
    torch.cuda.synchronize()
    result.fill_(float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
        attend()
    torch.cuda.synchronize()
    assert bool(torch.isnan(result).all()), "it ran while it was captured"
    for inputs in (host, tuple(x[::-1].copy() for x in host)):
        for tensor, x in zip(tensors, inputs, strict=True):
            tensor.copy_(torch.from_numpy(x))
        graph.replay()
        torch.cuda.synchronize()
        assert_accepted(result.cpu().numpy(), None, *inputs, causal=True)
