"""compiler/dependent.py: what the driver is told of launches that overlap the kernel in front."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from played_gpu import Gpu, Stream, at, on_gpu

cupy = pytest.importorskip("cupy")

import cufa  # noqa: E402
from cufa.compiler import dependent, jit  # noqa: E402
from cufa.specs.variant import Variant  # noqa: E402


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("unused", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Driver:
    """Stands for the driver, and notes what it is told."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.error = 0
        self.stream: Any = Stream(ptr=0)  # the current one

    def __call__(self, config: int, function: int, parameters: int, extra: None) -> int:
        """Stand for ``cuLaunchKernelEx``."""
        told = Config.from_address(config)
        attributes = [told.attributes[i] for i in range(told.attribute_count)]
        address = ctypes.c_void_p.from_address(parameters).value
        self.launches.append(
            (
                *(tuple(told.grid), tuple(told.block), told.smem_bytes, told.stream),
                *([(each.id, each.value) for each in attributes], function, address),
            )
        )
        return self.error


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(dependent, "launch_kernel", lambda: driver)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: driver.stream)
    return driver


def buffer_of(parameter: int) -> Any:
    """Return what stands for the buffer of a launch."""
    return SimpleNamespace(passed=dependent.Passed(parameter))


def test_the_driver_is_told_all(driver: Driver) -> None:
    kernel = dependent.Dependent(SimpleNamespace(ptr=123))
    launch = kernel.launcher((5, 2, 1), (256, 1, 1), 1000)
    other = kernel.launcher((9, 1, 1), (64, 1, 1), 0)
    for each in (launch, other, launch):
        each(buffer_of(4096))
    overlaps = [(6, 1)]
    first = ((5, 2, 1), (256, 1, 1), 1000, None, overlaps, 123, 4096)
    assert driver.launches == [first, ((9, 1, 1), (64, 1, 1), 0, None, overlaps, 123, 4096), first]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_bytes_of_a_config(overlap: bool) -> None:
    """They are packed as the compiler of C would lay out its members."""
    packed = dependent.packed((5, 2, 1), (256, 3, 4), 1000, overlap=overlap)
    found = Config.from_buffer_copy(packed)
    assert (tuple(found.grid), tuple(found.block)) == ((5, 2, 1), (256, 3, 4))
    assert (found.smem_bytes, found.stream, found.attribute_count) == (1000, None, overlap)
    assert (found.attributes[0].id, found.attributes[0].value) == (6, 1)


def test_the_driver_is_told_of_attention(
    driver: Driver, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameter is there until the driver has it."""
    variant = Variant("fa3_wgmma", "float16", 64, 64, 128, 64, 2, 12, 1)
    layout = variant.parameter
    found = []

    def launched(*told: Any) -> int:
        error = driver(*told)
        parameter = at(driver.launches[-1][-1], (1,), (layout.itemsize,), layout)[0]
        maps, o = parameter["maps"], parameter["params"]["o"]
        found.append([*(int(maps[name][0]) for name in "qkvo"), int(o["data"])])
        return error

    kernel = dependent.Dependent(SimpleNamespace(ptr=123))
    monkeypatch.setattr(jit, "kernel", lambda *_: kernel)
    monkeypatch.setattr(dependent, "launch_kernel", lambda: launched)
    gpu.stream.ptr = 1
    q, k, v = (on_gpu(np.ones((1, 2, 300, 64), np.float16)) for _ in "qkv")
    for other in (k, v, k):
        out: Any = cufa.attention(q, other, v, kernel=variant)
        assert found.pop() == [x.data.ptr for x in (q, other, v, out, out)]
        *told, address = driver.launches.pop()
        assert told == [(6, 1, 1), (384, 1, 1), variant.smem_bytes, 1, [(6, 1)], 123]
        assert address % 64 == 0


@pytest.mark.parametrize("capturing", [False, True])
def test_a_stream_that_others_may_destroy(driver: Driver, capturing: bool) -> None:
    """A thread's default stream ends with it. Kernels of a graph do not run in the one captured."""
    launch = dependent.Dependent(SimpleNamespace(ptr=1)).launcher((1, 1, 1), (32, 1, 1), 0)
    for driver.stream in (Stream(ptr=78), Stream(ptr=2)):
        driver.stream.capturing = capturing
        launch(buffer_of(4096))
        overlaps = [(6, 1)] if capturing else []
        assert driver.launches.pop()[3:] == (driver.stream.ptr, overlaps, 1, 4096)


def test_an_error_of_the_driver(driver: Driver) -> None:
    driver.error = 1
    launch = dependent.Dependent(SimpleNamespace(ptr=1)).launcher((1, 1, 1), (32, 1, 1), 0)
    with pytest.raises(RuntimeError):  # without a driver, that it is not there
        launch(buffer_of(4096))


def test_a_thread_that_has_no_context_yet(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = dependent.Dependent(SimpleNamespace(ptr=1)).launcher((1, 1, 1), (32, 1, 1), 0)
    driver.error = dependent.driver.INVALID_CONTEXT
    made = []

    def make_current() -> None:
        made.append(threading.get_ident())
        driver.error = 0

    monkeypatch.setattr("cufa.compiler.driver.make_context_current", make_current)
    launch(buffer_of(4096))
    assert made == [threading.get_ident()]
    assert len(driver.launches) == 2
    assert driver.launches[0] == driver.launches[1]
    launch(buffer_of(4096))
    assert len(made) == 1


def test_buffers_do_not_share_what_they_pass() -> None:
    passed = [dependent.Passed(4096) for _ in range(2)]
    assert len({address for each in passed for address in (each.config, each.parameters)}) == 4


def test_the_structs_are_those_of_the_driver() -> None:
    """Sizes and places of cuda.h, the same from CUDA 12 on."""
    assert len(dependent.packed((1, 1, 1), (1, 1, 1), 0)) == ctypes.sizeof(Config) == 56
    assert Config.stream.offset == 8 * dependent._STREAM == 32
    assert Config.attributes.offset == 40
    assert ctypes.sizeof(dependent._ATTRIBUTE) == ctypes.sizeof(Attribute) == 72
    assert Attribute.value.offset == 8


def test_a_launch_keeps_the_module_loaded(driver: Driver) -> None:
    class Function:
        ptr = 123

    function = Function()
    gone = weakref.ref(function)
    launch = dependent.Dependent(function).launcher((1, 1, 1), (32, 1, 1), 0)
    del function
    gc.collect()
    assert gone() is not None
    del launch
    gc.collect()
    assert gone() is None
