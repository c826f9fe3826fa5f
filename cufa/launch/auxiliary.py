"""Launches of kernels that are an `Instance`, and what such a kernel is given of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cufa import device as devices
from cufa.arrays import ALIGNMENT, Array, Ints
from cufa.compiler import jit
from cufa.launch.launch import Launch, Memory, launcher, prepared_launch
from cufa.launch.signature import AddressSlot
from cufa.specs import AUXILIARY_KERNELS
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant


def address(array: Array | None) -> int:
    """Return the address of an array; 0 if there is none."""
    return 0 if array is None else int(array.data.ptr)


def tensor(array: Array | None) -> Ints:
    """Return what ``Tensor`` of ``kernels/params.cuh`` holds: the address, and steps in elements.

    Kernels read as many steps as an array has axes in front of its last one.
    """
    if array is None:
        return 0, 0, 0, 0
    return (array.data.ptr, *(step // array.itemsize for step in array.strides[:3]))


def are_aligned(*arrays: Array) -> bool:
    """Whether rows of 4-D arrays begin at multiples of `ALIGNMENT` bytes."""
    steps = [array.data.ptr for array in arrays]
    for array in arrays:
        axes = zip(array.shape[:3], array.strides[:3], strict=True)
        steps += (step for n, step in axes if n > 1)
    return not any(step % ALIGNMENT for step in steps)


def prepared(
    instance: Variant | Instance,
    grid: int | tuple[int, int],
    parameter: Any,
    places: Sequence[AddressSlot] = (),
    threads: int = 0,
    memory: Memory | None = None,
) -> Launch:
    """Return a launch on the current device; the kernel is compiled if need be.

    Parameters
    ----------
    instance : Variant or Instance
    grid : int or tuple of int
        Blocks, along one axis or two.
    parameter, places, memory
        As in `prepared_launch`.
    threads : int
        Threads of a block, if the kernel's spec does not say them.
    """
    import cupy

    device_id = cupy.cuda.runtime.getDevice()
    function = jit.kernel(instance, devices.of_id(device_id), device_id)
    blocks, rows = (grid, 1) if isinstance(grid, int) else grid
    threads = threads or AUXILIARY_KERNELS[instance.kernel].threads
    launch = launcher(function, (blocks, rows, 1), threads, instance.smem_bytes)
    return prepared_launch(launch, parameter, tuple(places), memory)
