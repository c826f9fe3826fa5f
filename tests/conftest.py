"""Markers, a cache folder for each test, and fixtures for NumPy and CuPy alike."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import played_gpu
import pytest
from exhaustive import chosen, families_of

from cufa import device, tuned
from cufa.device import Device
from cufa.launch import params
from cufa.specs import KERNELS

_numbers = itertools.count()


@cache
def why_no_gpu() -> str | None:
    """Return why no CUDA device can be used, or None if one can."""
    try:
        import cupy
    except ImportError as error:
        return f"no CuPy: {error}"
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "families of kernels, with commas, or all: run their exhaustive tests, too"
    parser.addoption("--exhaustive", default="", metavar="FAMILIES", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what is exhaustive, but for what is asked for by family or by node id."""
    families = chosen(config.getoption("exhaustive"))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        of = families_of(item)
        runs = not of or of & families or item.nodeid in config.args
        (kept if runs else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say why tests were skipped: a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{reason}: {count} skipped")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        reason = why_no_gpu()
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def own_cache_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Keep the user's kernels and tuned tables out of the tests, and the tests' out of theirs."""
    folder = tmp_path_factory.getbasetemp() / "cufa" / str(next(_numbers))
    monkeypatch.setenv("CUFA_CACHE_DIR", str(folder))
    monkeypatch.delenv("CUFA_TUNED", raising=False)
    tuned.forget()
    yield
    tuned.forget()


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """Array module under test: NumPy everywhere, and CuPy where there is a device."""
    return pytest.importorskip(request.param)


@pytest.fixture
def hopper(cupy: Any) -> Device:
    """Return the current GPU, for tests marked `gpu` that need one with wgmma and TMA."""
    gpu = device.of_id(cupy.cuda.runtime.getDevice())
    if gpu.arch != "sm_90a":
        pytest.skip(f"{gpu.name} is {gpu.arch}, sm_90a is needed")
    return gpu


@pytest.fixture
def kernel_runs_here(request: pytest.FixtureRequest, cupy: Any) -> None:
    """Skip a test marked `gpu` of a kernel that is not for this GPU."""
    kernel = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kernel")
    gpu = device.of_id(cupy.cuda.runtime.getDevice())
    if kernel and not KERNELS[kernel].runs_on(gpu):
        pytest.skip(f"{kernel} is not for {gpu.arch}")


@pytest.fixture
def stream(cupy: Any) -> Iterator[Any]:
    """Make a stream the current one, for tests marked `gpu`."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[played_gpu.Gpu]:
    """Give a GPU that the host plays."""
    yield played_gpu.play(monkeypatch)
    params.free_buffers.clear()  # they are for its kernels


@pytest.fixture
def rng() -> np.random.Generator:
    """Return random numbers that are the same in every run."""
    return np.random.default_rng(20240607)


@pytest.fixture
def cupy() -> Any:
    """Return the CuPy module for tests that are marked `gpu`, or that need only its types."""
    return pytest.importorskip("cupy")
