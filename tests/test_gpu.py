"""On a CUDA device: every kernel over the correctness grid, streams, threads, devices."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, Expected, assert_accepted, random_inputs, to_host

import cufa

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernel_runs_here")]

HEAD_DIMS = (1, 8, 24, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)

CASES = (
    ("fa1_fp32", "float32"),
    ("fa2_fp32", "float32"),
    ("fa2_mma", "float16"),
    ("fa2_mma", "bfloat16"),
    ("fa3_wgmma", "float16"),
    ("fa3_wgmma", "bfloat16"),
)

#: Batch, heads of q and of K/V, queries, keys: odd lengths, unequal both ways, 1 and 0; as many
#: heads, a group of 7 and one K/V head.
GRID = (
    (2, 3, 3, 129, 257),
    (1, 14, 2, 67, 193),
    (2, 5, 1, 191, 95),
    (1, 4, 4, 1, 333),
    (2, 8, 2, 333, 1),
    (3, 70, 10, 3, 65),
    (1, 2, 1, 515, 515),
    (1, 6, 2, 5, 0),
)

kernels = pytest.mark.parametrize(("kernel", "dtype"), CASES)


def poisoned_out(cupy: Any, q: np.ndarray, v: np.ndarray) -> Any:
    return cupy.asarray(np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are the same; on the host, where no kernels are compiled for that."""
    return to_host(a).tobytes() == to_host(b).tobytes()


def on_device(cupy: Any, *arrays: np.ndarray) -> list[Any]:
    """Rows in NaN: before and after every row of each array lie 16 bytes of it."""
    views = []
    for array in arrays:
        pad = 16 // array.itemsize
        # Rows stay aligned to 16 bytes, so that the kernels take them as they are.
        tail = pad - array.shape[-1] % pad
        widths = [(0, 0)] * 2 + [(1, 2), (pad, tail + pad)]
        buffer = np.pad(array, widths, constant_values=array.dtype.type(np.nan))
        views.append(cupy.asarray(buffer)[:, :, 1:-2, pad : pad + array.shape[-1]])
    return views


@kernels
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_grid(cupy: Any, rng: np.random.Generator, d: int, kernel: str, dtype: str) -> None:
    for b, hq, hk, sq, sk in GRID:
        if kernel == "fa3_wgmma" and sk == 0:
            continue  # it needs a key
        q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d)
        device = on_device(cupy, q, k, v)
        for causal in (False, True):
            out = poisoned_out(cupy, q, v)
            cupy.full(q.shape[:-1], np.nan, np.float32)  # freed at once: the LSE's memory
            options: dict[str, Any] = {"causal": causal, "kernel": kernel, "return_lse": True}
            _, lse = cufa.attention(*device, out=out, **options)
            what = f"{(b, hq, hk, sq, sk)} causal {causal}"
            assert_accepted(out, lse, q, k, v, causal=causal, what=what)
            again, lse_again = cufa.attention(*device, **options)
            assert same_bits(again, out), what
            assert same_bits(lse_again, lse), what


@kernels
@pytest.mark.parametrize(("d", "dv"), [(192, 128), (64, 128), (59, 111), (256, 8)])
def test_head_dim_of_v(
    cupy: Any, rng: np.random.Generator, d: int, dv: int, kernel: str, dtype: str
) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=6, hk=3, sq=131, sk=195, d=d, dv=dv)
    device = on_device(cupy, q, k, v)
    for causal in (False, True):
        out = poisoned_out(cupy, q, v)
        _, lse = cufa.attention(*device, causal=causal, out=out, return_lse=True, kernel=kernel)
        assert_accepted(out, lse, q, k, v, causal=causal)


@kernels
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_without_a_key_beside_values_that_are_not_finite(
    cupy: Any, rng: np.random.Generator, value: float, kernel: str, dtype: str
) -> None:
    for d in (8, 64, 128, 256):
        q, k, v = random_inputs(rng, dtype, b=2, hq=2, sq=150, sk=93, d=d)
        v[:] = value
        given = on_device(cupy, q, k, v)
        out, lse = map(to_host, cufa.attention(*given, causal=True, return_lse=True, kernel=kernel))
        blind = np.arange(150) < 150 - 93
        assert not out[:, :, blind].any()
        assert not np.isfinite(out[:, :, ~blind].astype(np.float32)).any()
        np.testing.assert_array_equal(lse == -np.inf, np.broadcast_to(blind, lse.shape))


@kernels
@pytest.mark.parametrize("scale", [0, -0.3, 3, 2.0**-30])
def test_scale(cupy: Any, rng: np.random.Generator, scale: float, kernel: str, dtype: str) -> None:
    for causal, d in ((False, 64), (True, 64), (True, 59)):
        q, k, v = random_inputs(rng, dtype, hq=2, sq=131, sk=195, d=d)
        device = on_device(cupy, q, k, v)
        options: dict[str, Any] = {"causal": causal, "scale": scale}
        out, lse = cufa.attention(*device, return_lse=True, kernel=kernel, **options)
        assert_accepted(out, lse, q, k, v, **options)


@kernels
def test_rows_that_are_not_aligned_are_copied(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str
) -> None:
    for d in (59, 64):
        q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=67, sk=93, d=d)
        expected = Expected(q, k, v)
        contiguous = [cupy.asarray(x) for x in (q, k, v)]
        one_in = [
            cupy.asarray(np.append(x[0, 0, 0, :1], x))[1:].reshape(x.shape) for x in (q, k, v)
        ]
        for arrays in (contiguous, one_in):
            for _ in range(2):  # the second time nothing is left to prepare
                out = cupy.asarray(np.append(q[0, 0, 0, :1], q))[1:].reshape(q.shape)
                _, lse = cufa.attention(*arrays, out=out, return_lse=True, kernel=kernel)
                expected.assert_accepts(out, lse, f"head_dim {d}")


@kernels
def test_long(cupy: Any, rng: np.random.Generator, kernel: str, dtype: str) -> None:
    """Many tiles both ways, and more blocks than run at once."""
    q, k, v = random_inputs(rng, dtype, b=3, hq=10, hk=5, sq=1155, sk=515, d=64)
    device = on_device(cupy, q, k, v)
    for causal in (False, True):
        out, lse = cufa.attention(*device, causal=causal, return_lse=True, kernel=kernel)
        assert_accepted(out, lse, q, k, v, causal=causal)


def test_more_rows_of_heads_than_a_grid_axis(cupy: Any, rng: np.random.Generator) -> None:
    """65,536 and more (batch, head) pairs: only the first axis of a grid takes as many."""
    q, k, v = random_inputs(rng, "float16", b=4100, hq=16, sq=3, sk=5, d=8)
    out, lse = cufa.attention(*on_device(cupy, q, k, v), return_lse=True)
    assert_accepted(out, lse, q, k, v)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("fa2_mma", "float32"),
        ("fa2_fp32", "float16"),
        ("fa1_fp32", "float16"),
        ("fa3_wgmma", "float32"),
    ],
)
def test_kernel_for_another_dtype(cupy: Any, kernel: str, dtype: str) -> None:
    x = cupy.zeros((1, 1, 8, 64), DTYPES[dtype])
    with pytest.raises((TypeError, ValueError), match=r"^kernel\b"):
        cufa.attention(x, x, x, kernel=kernel)


# --- memory ---


@kernels
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "seq"])
def test_strides_beyond_2_to_the_31(
    cupy: Any, rng: np.random.Generator, axis: int, kernel: str, dtype: str
) -> None:
    """Elements more than 2^31 apart, in q, k, v and the result."""
    shape = [1, 1, 33, 64]
    shape[axis] = 5 if axis == 2 else 2
    step = (2**31 // (shape[axis] - 1)) + 1024
    itemsize = DTYPES[dtype].itemsize
    place_elements = 33 * 64  # of one array next to the others
    elements = step * (shape[axis] - 1) + 4 * place_elements
    if cupy.cuda.runtime.memGetInfo()[0] < 1.1 * elements * itemsize:
        pytest.skip(f"{elements * itemsize / 2**30:.1f} GiB of device memory are needed")
    buffer = cupy.empty(elements * itemsize, np.uint8).view(DTYPES[dtype])
    strides = [33 * 64 * itemsize, 33 * 64 * itemsize, 64 * itemsize, itemsize]
    strides[axis] = step * itemsize
    views = [
        cupy.lib.stride_tricks.as_strided(buffer[i * place_elements :], shape, strides)
        for i in range(4)
    ]
    q, k, v = random_inputs(rng, dtype, b=shape[0], hq=shape[1], sq=shape[2], d=64)
    for view, array in zip(views, (q, k, v, np.full(q.shape, np.nan, q.dtype)), strict=True):
        view[...] = cupy.asarray(array)
    _, lse = cufa.attention(*views[:3], out=views[3], return_lse=True, kernel=kernel)
    assert_accepted(cupy.ascontiguousarray(views[3]), lse, q, k, v)
    del buffer, views, view
    cupy.get_default_memory_pool().free_all_blocks()


# --- streams ---


def occupy(cupy: Any) -> None:
    """Give the current stream work for some tenths of a second."""
    x = cupy.ones((4096, 4096), np.float32)
    for _ in range(100):
        x = x @ x
        x *= 1 / 4096


@kernels
def test_runs_in_order_on_the_current_stream(
    cupy: Any, rng: np.random.Generator, stream: Any, kernel: str, dtype: str
) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, sq=129, d=64)
    late = [cupy.asarray(x) for x in (q, k, v)]
    device = [cupy.asarray(np.full_like(x, np.nan)) for x in (q, k, v)]
    cufa.attention(*device, kernel=kernel)
    occupy(cupy)
    stream.synchronize()
    nothing = [there.copy() for there in device]
    for repeat in range(2):  # a first call of its kind with `out`, then one that is known
        for there, here in zip(device, nothing, strict=True):
            there[...] = here
        out = poisoned_out(cupy, q, v)
        stream.synchronize()
        occupy(cupy)
        for there, here in zip(device, late, strict=True):
            there[...] = here
        cufa.attention(*device, kernel=kernel, out=out)
        if repeat:
            assert not stream.done, "the call waited for the device"
        stream.synchronize()
        assert_accepted(out, None, q, k, v)


# --- threads, processes and devices ---

_FIRST_CALLS = """
import threading
import cupy
import numpy as np
import cufa

rng = np.random.default_rng(0)
host = [rng.standard_normal((1, 2, 65, 64), np.float32) for _ in range(3)]
s = host[0].astype(np.float64) @ host[1].swapaxes(2, 3) / 8
p = np.exp(s - s.max(-1, keepdims=True))
expected = p / p.sum(-1, keepdims=True) @ host[2]
barrier = threading.Barrier(6)
errors = []

def call(dtype, causal):
    try:
        arrays = [cupy.asarray(x, dtype) for x in host]
        barrier.wait()
        out = cufa.attention(*arrays, causal=causal)
        if not causal:
            np.testing.assert_allclose(out.get(), expected, atol=2e-2)
    except BaseException as error:
        errors.append(error)

calls = [(np.float16, False), (np.float32, False), (np.float16, True)] * 2
threads = [threading.Thread(target=call, args=c) for c in calls]
for t in threads:
    t.start()
for t in threads:
    t.join()
assert not errors, errors
print("fine")
"""


def test_first_calls_at_once_in_threads_and_processes(tmp_path: Path) -> None:
    """Two processes of six threads, which share an empty cache of compiled kernels."""
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path)}
    package_parent = str(Path(cufa.__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [package_parent, os.environ.get("PYTHONPATH")])
    )
    command = [sys.executable, "-c", _FIRST_CALLS]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()
        assert output.decode().split() == ["fine"]


@pytest.fixture
def two_devices(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one CUDA device only")


@pytest.mark.usefixtures("two_devices")
def test_arrays_on_another_device(cupy: Any) -> None:
    q, k, v, out = (cupy.zeros((1, 1, 8, 64), np.float16) for _ in range(4))
    with cupy.cuda.Device(1):
        elsewhere = cupy.zeros((1, 1, 8, 64), np.float16)
    call = {"q": q, "k": k, "v": v, "out": out}
    for _ in range(2):  # the second time a legal call of the same kind is known
        for name in call:
            with pytest.raises(ValueError, match=f"^{name} .* is on device 1"):
                cufa.attention(**{**call, name: elsewhere})
        with cupy.cuda.Device(1), pytest.raises(ValueError, match=r"^q .* is on device 0"):
            cufa.attention(**call)
        cufa.attention(**call)


@kernels
@pytest.mark.usefixtures("two_devices")
def test_each_device_has_its_own_kernels(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str
) -> None:
    q, k, v = random_inputs(rng, dtype, hq=2, sq=67, d=64)
    for device, causal in itertools.product((0, 1, 0, 1), (False, True)):
        with cupy.cuda.Device(device):
            out, lse = cufa.attention(
                *(cupy.asarray(x) for x in (q, k, v)),
                causal=causal,
                kernel=kernel,
                return_lse=True,
            )
            assert out.data.device_id == device
            assert_accepted(out, lse, q, k, v, causal=causal)
