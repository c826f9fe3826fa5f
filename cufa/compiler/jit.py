"""Variant -> kernel that can be launched on the current device: compiled now, or ahead of time."""

from __future__ import annotations

import functools
import threading
from typing import Any

from cufa.compiler import cubins, dependent, elf, nvrtc, source
from cufa.compiler.nvrtc import CompileError
from cufa.device import Device
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant
from cufa.warned import warn


def _raw_module_options(device: Device) -> tuple[str, ...]:
    """Return the options for `cupy.RawModule`; the same for all variants on a device.

    CuPy compiles an empty file for each new tuple of options, so what differs between variants is
    in the name expression alone.
    """
    # CuPy names the plain architecture itself; sm_90a, with wgmma and TMA, it does not know.
    if device.arch[-1].isdigit():
        return nvrtc.common_options()
    return (*nvrtc.common_options(), f"-arch={device.arch}")


_lock = threading.Lock()


@functools.cache
def module(variant: Variant | Instance, device: Device) -> Any:
    """Return the `cupy.RawModule` of a variant, compiled."""
    import cupy

    options = _raw_module_options(device)
    made = cupy.RawModule(
        code=source.of(variant),
        options=options,
        name_expressions=(variant.name_expression,),
    )
    try:
        made.compile()
    except cupy.cuda.compiler.CompileException as e:
        raise CompileError(variant, options, e.get_message()) from e
    return made


def _allow_shared_memory(function: Any, smem_bytes: int) -> None:
    """Let launches on the current device use this much dynamic shared memory."""
    from cupy.cuda import driver

    attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.funcSetAttribute(function.ptr, attribute, smem_bytes)


def _most_shared_memory(variant: Variant | Instance, device: Device) -> int:
    """Return the shared memory that launches may ask for: to decode, more than the kernel uses.

    See ``kept_apart`` of cufa/planner/residency.py.
    """
    decodes = isinstance(variant, Variant) and variant.spec.decodes
    return device.smem_per_block if decodes else variant.smem_bytes


def _wrong_registers(function: Any, variant: Variant | Instance) -> str | None:
    """Say that a loaded kernel lacks the registers that its code counts on, or return None."""
    from cupy.cuda import driver

    registers = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr)
    return nvrtc.wrong_registers(variant, registers)


def load(cubin: bytes, smem_bytes: int) -> Any:
    """Make the one kernel of a cubin ready to launch on the current device.

    Parameters
    ----------
    cubin : bytes
    smem_bytes : int
        Dynamic shared memory that a launch may use.

    Returns
    -------
    cupy.cuda.Function

    Raises
    ------
    ValueError
        The cubin is damaged.
    cupy.cuda.driver.CUDADriverError
        It is for another architecture.
    """
    import cupy

    symbol = elf.symbol(cubin)
    module = cupy.cuda.Module()
    module.load(cubin)
    function = module.get_function(symbol)
    _allow_shared_memory(function, smem_bytes)
    return function


def _compiled_ahead(variant: Variant | Instance, device: Device) -> Any:
    """Return the kernel that the user compiled ahead of time, or None."""
    from cupy.cuda import driver

    key = variant, device.arch, nvrtc.version()
    cubin = cubins.find(*key)
    if cubin is None:
        return None
    try:
        function = load(cubin, _most_shared_memory(variant, device))
        complaint = _wrong_registers(function, variant)
    except (ValueError, driver.CUDADriverError) as e:
        complaint = str(e)
    if complaint is None:
        return function
    warn(
        f"{cubins.path(*key)} does not load and is ignored ({complaint}): delete it, or "
        "compile it again with python -m cufa compile"
    )
    return None


@functools.cache
def _kernel(variant: Variant | Instance, device: Device, device_id: int) -> Any:
    function = _compiled_ahead(variant, device)
    if function is None:
        # The function itself: calling it spares RawKernel's part of each launch.
        function = module(variant, device).get_function(variant.name_expression).kernel
        complaint = _wrong_registers(function, variant)
        if complaint is not None:
            raise CompileError(variant, _raw_module_options(device), complaint)
        _allow_shared_memory(function, _most_shared_memory(variant, device))
    return launchable(function, variant, device)


def launchable(function: Any, variant: Variant | Instance, device: Device) -> Any:
    """Return what launches a loaded kernel as it is launched on a device.

    Parameters
    ----------
    function : cupy.cuda.Function
    variant : Variant or Instance
    device : Device

    Returns
    -------
    cupy.cuda.Function or Dependent
    """
    if variant.is_dependent and device.compute_capability >= dependent.FIRST_CAPABILITY:
        return dependent.Dependent(function)
    return function


def kernel(variant: Variant | Instance, device: Device, device_id: int) -> Any:
    """Compile a variant for the current device, or find it in the cache; make it ready to launch.

    Safe to call from several threads, and from several processes that share a disk cache.

    Parameters
    ----------
    variant : Variant or Instance
    device : Device
    device_id : int
        The current device; the limit on shared memory is set for each.

    Returns
    -------
    cupy.cuda.Function or Dependent

    Raises
    ------
    CompileError
    """
    with _lock:
        return _kernel(variant, device, device_id)
