"""How many blocks of a kernel a multiprocessor holds: CUDA's rules, in integers."""

from __future__ import annotations

from cufa.device import Device

_WARP = 32
_PARTITIONS = 4  # of a multiprocessor, each with its own registers, from sm_50 on
_REGISTER_UNIT = 256  # registers are given to a warp in such units
_MAX_REGISTERS = 255  # that an instruction can name
_SMEM_UNIT = 128
_SMEM_RESERVED = 1024  # bytes of a block that CUDA itself uses, from sm_80 on


def _rounded(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def register_bound(device: Device, threads: int, blocks: int) -> int:
    """Return the registers of a thread that let `blocks` blocks of `threads` threads fit."""
    warps = blocks * _rounded(threads, _WARP) // _WARP
    a_warp = device.registers_per_sm // warps // _REGISTER_UNIT * _REGISTER_UNIT
    return min(_MAX_REGISTERS, a_warp // _WARP)


def resident_blocks(device: Device, threads: int, registers: int, smem_bytes: int) -> int:
    """Return how many blocks of a kernel fit on a multiprocessor together; 0 if not even one.

    `threads` and `smem_bytes`, static and dynamic together, are a block's, `registers` a thread's.
    """
    if smem_bytes > device.smem_per_block:
        return 0
    warps = _rounded(threads, _WARP) // _WARP
    a_warp = _rounded(max(1, registers) * _WARP, _REGISTER_UNIT)
    warps_by_registers = device.registers_per_sm // _PARTITIONS // a_warp * _PARTITIONS
    return min(
        device.max_blocks_per_sm,
        device.threads_per_sm // _WARP // warps,
        warps_by_registers // warps,
        device.smem_per_sm // _rounded(smem_bytes + _SMEM_RESERVED, _SMEM_UNIT),
    )
