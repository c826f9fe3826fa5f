"""explorer/occupancy.py: CUDA's rules, against cases done by hand and against the driver."""

from __future__ import annotations

from typing import Any

import pytest

from cufa import device
from cufa.compiler import jit, nvrtc
from cufa.explorer.occupancy import register_bound, resident_blocks
from cufa.specs.variant import Variant

KIB = 1024


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "smem_bytes", "blocks"),
    [
        # 255 registers are 8192 a warp: two warps in each of four partitions.
        ("h200", 128, 255, 96 * KIB, 2),
        ("h200", 256, 255, 96 * KIB, 1),
        # 168: 5376 a warp, three a partition. One register more takes the next unit of 256.
        ("h200", 128, 168, 0, 3),
        ("h200", 128, 128, 0, 4),
        ("h200", 128, 129, 0, 3),
        # 85: 2816 a warp, five a partition and 20 in all, where all registers would give 23.
        ("h200", 224, 85, 0, 2),
        # Shared memory: 1 KiB more a block than it asks for, in units of 128 bytes.
        ("h200", 128, 32, 227 * KIB, 1),
        ("h200", 128, 32, 227 * KIB + 1, 0),
        ("h200", 128, 32, 113 * KIB, 2),
        ("h200", 128, 32, 113 * KIB + 1, 1),
        ("rtx3090", 128, 32, 49 * KIB, 2),
        ("rtx3090", 128, 32, 99 * KIB, 1),
        # Threads, and blocks.
        ("h200", 1024, 32, 0, 2),
        ("rtx3090", 1024, 32, 0, 1),
        ("h200", 1024, 65, 0, 0),
        ("h200", 32, 16, 0, 32),
        ("rtx3090", 32, 16, 0, 16),
        ("rtx4090", 32, 16, 0, 24),
        ("h200", 33, 16, 0, 32),
    ],
)
def test_resident_blocks(
    gpu: str, threads: int, registers: int, smem_bytes: int, blocks: int
) -> None:
    assert resident_blocks(device.named(gpu), threads, registers, smem_bytes) == blocks


@pytest.mark.parametrize(
    ("threads", "blocks", "registers"),
    [(128, 1, 255), (128, 2, 255), (128, 3, 168), (128, 4, 128), (256, 2, 128), (256, 3, 80)],
)
def test_register_bound_lets_the_blocks_fit(threads: int, blocks: int, registers: int) -> None:
    gpu = device.named("h200")
    assert register_bound(gpu, threads, blocks) == registers
    assert resident_blocks(gpu, threads, registers, 0) >= blocks
    if registers < 255:
        assert resident_blocks(gpu, threads, registers + 1, 0) < blocks


@pytest.mark.gpu
@pytest.mark.parametrize("bm_bn_warps", [(64, 32, 4), (64, 64, 4), (128, 64, 8), (192, 32, 6)])
@pytest.mark.parametrize("stages", [1, 2])
def test_as_the_driver_says(cupy: Any, bm_bn_warps: tuple[int, int, int], stages: int) -> None:
    gpu = device.of_id(cupy.cuda.runtime.getDevice())
    bm, bn, warps = bm_bn_warps
    variant = Variant("fa2_mma", "float16", 64, 64, bm, bn, stages, warps, 1)
    compiled = nvrtc.compile_variant(variant, gpu.arch)
    function = jit.load(compiled.cubin, variant.smem_bytes)
    for smem_bytes in range(0, variant.smem_bytes + 1, 1000):
        expected = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            function.ptr, variant.threads, smem_bytes
        )
        whole = smem_bytes + compiled.static_smem_bytes
        assert resident_blocks(gpu, variant.threads, compiled.registers, whole) == expected
