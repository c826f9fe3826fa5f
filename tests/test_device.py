"""device.py: GPUs as plain values."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from typing import Any

import pytest

from cufa import device
from cufa.device import Device

NAMES = ("a100", "rtx3090", "rtx4090", "h100", "h200", "b200", "rtx5090")
ARCHS = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90": 90, "sm_100": 100, "sm_120": 120}


@pytest.mark.parametrize("name", NAMES)
def test_named(name: str) -> None:
    d = device.named(name)
    assert d.name == name
    assert device.named(name.upper()) == d
    assert hash(d) == hash(device.named(name))
    assert d.compute_capability in ARCHS.values()
    # The hardware keeps 1 KiB of shared memory for itself.
    assert d.smem_per_block + 1024 == d.smem_per_sm
    assert d.threads_per_sm % 32 == 0
    assert d.registers_per_sm == 65536
    assert d.max_blocks_per_sm in (16, 24, 32)
    assert d.sm_count > 0
    assert d.l2_bytes > 0


@pytest.mark.parametrize(("arch", "capability"), ARCHS.items())
def test_of_arch(arch: str, capability: int) -> None:
    d = device.of_arch(arch)
    assert d.compute_capability == capability
    assert device.of_arch(d.arch) == d
    assert device.of_arch(arch.removeprefix("sm_")) == d


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_100f", "sm_120a", "sm_120f"])
def test_of_arch_with_features_of_its_own(arch: str) -> None:
    """They are of the same GPU."""
    assert device.of_arch(arch) == device.of_arch(arch[:-1])


def test_all_of_an_arch() -> None:
    for arch in ("sm_90", "sm_90a", "90"):
        assert [d.name for d in device.all_of_arch(arch)] == ["h200", "h100"]
    assert [d.name for d in device.all_of_arch("sm_86")] == ["rtx3090"]
    assert {d for arch in ARCHS for d in device.all_of_arch(arch)} == set(map(device.named, NAMES))
    with pytest.raises(ValueError, match=r"^arch must be one of"):
        device.all_of_arch("sm_75")


@pytest.mark.parametrize(
    ("name", "arch"),
    [("h100", "sm_90a"), ("h200", "sm_90a"), ("a100", "sm_80"), ("b200", "sm_100")],
)
def test_arch_that_kernels_are_compiled_for(name: str, arch: str) -> None:
    gpu = device.named(name)
    assert gpu.arch == arch
    assert gpu.compiles_sm90a
    assert gpu._replace(compiles_sm90a=False).arch == arch.removesuffix("a")


@pytest.mark.parametrize("name", ["", "v100", "sm_90"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^name must be one of a100, .*, not '{name}'"):
        device.named(name)


@pytest.mark.parametrize(
    "arch",
    [
        *("", "sm_75", "sm_", "h200", "90.0", "compute_90", "SM_90", "sm_sm_90", "sm_103", "a"),
        *("sm_90aaa", "90aaa", "sm_90af", "sm_90f", "sm_80a", "sm_100fa", "sm_a", "sm_90b"),
        *("sm_ 90", " sm_90", "sm_90 ", "sm_+90", "sm_9_0", "sm_090", "sm_-90"),
    ],
)
def test_unknown_arch(arch: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^arch must be one of sm_80, .*, not '{re.escape(arch)}'"
    ):
        device.of_arch(arch)


PROPERTIES = {
    "name": b"GPU of tomorrow",
    "major": 12,
    "minor": 1,
    "multiProcessorCount": 48,
    "sharedMemPerBlockOptin": 101376,
    "sharedMemPerMultiprocessor": 102400,
    "l2CacheSize": 25165824,
    "maxThreadsPerMultiProcessor": 1536,
    "regsPerMultiprocessor": 65536,
    "maxBlocksPerMultiProcessor": 24,
    "warpSize": 32,
}


def test_of_id_reads_the_properties_of_the_driver(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def properties(device_id: int) -> dict[str, Any]:
        asked.append(device_id)
        return PROPERTIES

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", properties)
    d = device.of_id.__wrapped__(3)
    assert asked == [3]
    assert d == Device("GPU of tomorrow", 121, 48, 101376, 102400, 25165824, 1536, 65536, 24)
    assert d.arch == "sm_121"


@pytest.mark.parametrize(
    ("version", "major", "arch"),
    [
        ((12, 8), 9, "sm_90"),
        ((12, 9), 9, "sm_90a"),
        ((13, 0), 9, "sm_90a"),
        ((12, 8), 8, "sm_80"),
        ((12, 8), 10, "sm_100"),
    ],
)
def test_compiler_that_does_not_know_sm_90a(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], major: int, arch: str
) -> None:
    """One warning on Hopper, which then runs the kernels of other GPUs; none elsewhere."""
    properties = {**PROPERTIES, "major": major, "minor": 0}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda device_id: properties)
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: version)
    device.of_id.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [device.of_id(0) for _ in range(3)]
    finally:
        device.of_id.cache_clear()
    assert {d.arch for d in found} == {arch}
    assert found[0].compiles_sm90a == (version >= (12, 9))
    messages = [str(w.message) for w in caught]
    assert len(messages) == (arch == "sm_90")
    for message in messages:
        assert "NVRTC 12.8" in message
        assert "12.9" in message


@pytest.mark.gpu
def test_of_id() -> None:
    d = device.of_id(0)
    known = device.of_arch(d.arch)
    assert d.registers_per_sm == known.registers_per_sm
    assert d.max_blocks_per_sm == known.max_blocks_per_sm
    assert d.threads_per_sm == known.threads_per_sm
    assert d.smem_per_sm == known.smem_per_sm


def test_cupy_is_not_imported() -> None:
    code = (
        "import sys; from cufa import device\n"
        "device.named('h200')\n"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
