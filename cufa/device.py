"""Device: what the planner must know of a GPU, as a plain value."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cufa.warned import warn


class Device(NamedTuple):
    """A GPU's limits; made without one by `named` and `of_arch`, from the hardware by `current`.

    Attributes
    ----------
    name : str
    compute_capability : int
        10 * major + minor, such as 90.
    sm_count : int
        Multiprocessors.
    smem_per_block, smem_per_sm : int
        Shared memory that a block can opt in to, and that a multiprocessor has, in bytes.
    l2_bytes : int
    threads_per_sm, registers_per_sm, max_blocks_per_sm : int
        Limits of a multiprocessor.
    compiles_sm90a : bool
        False where NVRTC does not compile for sm_90a through CuPy; it matters on sm_90 only.
    """

    name: str
    compute_capability: int
    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    l2_bytes: int
    threads_per_sm: int
    registers_per_sm: int
    max_blocks_per_sm: int
    compiles_sm90a: bool = True

    @property
    def arch(self) -> str:
        """The architecture that kernels are compiled for, such as ``sm_86``."""
        # wgmma, TMA and setmaxnreg are in sm_90a and not in sm_90.
        suffix = "a" if self.compute_capability == 90 and self.compiles_sm90a else ""
        return f"sm_{self.compute_capability}{suffix}"


# NVRTC before it refuses a second -arch after the one that CuPy gives.
_NVRTC_TAKES_TWO_ARCH = (12, 9)

_KIB, _MIB = 1 << 10, 1 << 20

# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability";
# multiprocessors and L2 from the vendor's architecture papers.
_NAMED = {
    "a100": Device("a100", 80, 108, 163 * _KIB, 164 * _KIB, 40 * _MIB, 2048, 65536, 32),
    "rtx3090": Device("rtx3090", 86, 82, 99 * _KIB, 100 * _KIB, 6 * _MIB, 1536, 65536, 16),
    "rtx4090": Device("rtx4090", 89, 128, 99 * _KIB, 100 * _KIB, 72 * _MIB, 1536, 65536, 24),
    "h100": Device("h100", 90, 132, 227 * _KIB, 228 * _KIB, 50 * _MIB, 2048, 65536, 32),
    "h200": Device("h200", 90, 132, 227 * _KIB, 228 * _KIB, 60 * _MIB, 2048, 65536, 32),
    "b200": Device("b200", 100, 148, 227 * _KIB, 228 * _KIB, 126 * _MIB, 2048, 65536, 32),
    "rtx5090": Device("rtx5090", 120, 170, 99 * _KIB, 100 * _KIB, 96 * _MIB, 1536, 65536, 24),
}
# The last one of an architecture is typical of it. Suffixes are NVRTC's: "a" since sm_90, "f" since
# sm_100.
_OF_ARCH = {
    f"sm_{device.compute_capability}{suffix}": device
    for device in _NAMED.values()
    for suffix, since in (("", 0), ("a", 90), ("f", 100))
    if device.compute_capability >= since
}


def named(name: str) -> Device:
    """Return a well-known GPU, such as ``"h200"``; ValueError for another name."""
    try:
        return _NAMED[name.lower()]
    except KeyError:
        raise ValueError(f"name must be one of {', '.join(_NAMED)}, not {name!r}") from None


def of_arch(arch: str) -> Device:
    """Return a typical GPU of an architecture, such as ``"sm_86"``; ValueError for another."""
    try:
        return _OF_ARCH[f"sm_{arch.removeprefix('sm_')}"]
    except KeyError:
        raise ValueError(f"arch must be one of {', '.join(_OF_ARCH)}, not {arch!r}") from None


def all_of_arch(arch: str) -> list[Device]:
    """Return the well-known GPUs of an architecture, the typical one first; errors as `of_arch`."""
    typical = of_arch(arch)
    alike = (device for device in _NAMED.values() if device.arch == typical.arch)
    return list(dict.fromkeys((typical, *alike)))


def current() -> Device:
    """Return the current GPU; `cupy.cuda.runtime.CUDARuntimeError` where there is none."""
    import cupy

    return of_id(cupy.cuda.runtime.getDevice())


@functools.cache
def of_id(device_id: int) -> Device:
    """Return the GPU with a CUDA device number; creates no context."""
    from cupy.cuda import nvrtc, runtime

    p = runtime.getDeviceProperties(device_id)
    device = Device(
        name=p["name"].decode(),
        compute_capability=10 * p["major"] + p["minor"],
        sm_count=p["multiProcessorCount"],
        smem_per_block=p["sharedMemPerBlockOptin"],
        smem_per_sm=p["sharedMemPerMultiprocessor"],
        l2_bytes=p["l2CacheSize"],
        threads_per_sm=p["maxThreadsPerMultiProcessor"],
        registers_per_sm=p["regsPerMultiprocessor"],
        max_blocks_per_sm=p["maxBlocksPerMultiProcessor"],
        compiles_sm90a=nvrtc.getVersion() >= _NVRTC_TAKES_TWO_ARCH,
    )
    if device.compute_capability == 90 and not device.compiles_sm90a:
        warn(
            f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))} does not compile for sm_90a after "
            "CuPy's own sm_90, from 12.9 on it does: the kernels for Hopper are not used"
        )
    return device
