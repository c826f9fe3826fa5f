"""How many blocks a multiprocessor holds, and how each comes to hold as many."""

from __future__ import annotations

from cufa.device import Device
from cufa.specs.variant import Variant

_SYSTEM_SMEM = 1024  # bytes of a block
_SMEM_UNIT = 128  # bytes, in which shared memory comes


def resident(variant: Variant, device: Device) -> int:
    """Return how many blocks of a variant a multiprocessor is planned to hold."""
    fit = device.smem_per_sm // (variant.smem_bytes + _SYSTEM_SMEM)
    return max(1, min(variant.blocks_per_sm, fit))


def kept_apart(grid: int, variant: Variant, device: Device) -> int:
    """Return the bytes of shared memory with which each multiprocessor has as many blocks.

    Where all blocks run at once, they begin while the blocks of the kernel in front end. Some
    multiprocessors would have more blocks otherwise, and others fewer: with `decode`, 32 sequences
    of 4096 keys with 8 heads of 64 columns, a block each, took 1.34 times as long.
    """
    each = -(-grid // device.sm_count)
    if each > resident(variant, device):
        return 0
    least = device.smem_per_sm // (each + 1) - _SYSTEM_SMEM  # and a bit more
    return min(_SMEM_UNIT * (least // _SMEM_UNIT + 1), device.smem_per_block)
