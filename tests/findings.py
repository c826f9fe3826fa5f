"""Rows and explorations as the tests of the explorer's outputs need them."""

from __future__ import annotations

from typing import Any

from cufa import device
from cufa.explorer.exploration import Exploration
from cufa.explorer.result import Row
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

CEILINGS = {"read_gbs": 4000.0, "copy_gbs": 3900.0, "gemm_tflops": 700.0}


def compiled(variant: Variant, **figures: Any) -> Row:
    """Return the row of a variant that was compiled."""
    row = Row(
        variant,
        registers=100,
        spill_bytes=0,
        static_smem_bytes=0,
        dynamic_smem_bytes=variant.smem_bytes,
        blocks_per_sm=2,
        occupancy=0.125,
        code_bytes=20480,
        compile_s=0.31,
    )
    return row._replace(**figures)


def timed(variant: Variant, us: float, **figures: Any) -> Row:
    """Return the row of a variant that was compiled, checked and timed."""
    row = compiled(variant)._replace(
        correct=True,
        max_error=1e-3,
        median_us=us,
        spread=0.01,
        tflops=100.0,
        gbs=200.0,
        ceiling_fraction=0.5,
    )
    return row._replace(**figures)


def exploration(
    problem: Problem,
    rows: list[Row],
    planned: Variant,
    ceilings: dict[str, float] | None = None,
) -> Exploration:
    """Return what an exploration for an H200 found."""
    return Exploration(
        problem=problem,
        device=device.named("h200"),
        arch="sm_90a",
        rows=rows,
        planned=planned,
        compiler="NVRTC 13.0",
        ceilings=ceilings,
        seconds=1.25,
        date="2026-11-21",
    )
