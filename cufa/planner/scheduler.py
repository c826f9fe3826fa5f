"""In which order a kernel computes the tiles of a problem. Integers only, no CuPy."""

from __future__ import annotations

from cufa.device import Device
from cufa.kernel import ELEMENT_BYTES, KERNELS
from cufa.problem import Problem
from cufa.variant import Variant


def pack(problem: Problem, variant: Variant) -> int:
    """Query heads in a tile: those of a group where their queries together fill it better."""
    fits = problem.group > 1 and 64 % problem.group == 0  # a power of two, for TMA's boxes
    short = problem.seq_q < variant.bm
    return problem.group if KERNELS[variant.kernel].packs_heads and fits and short else 1


def packed_heads(problem: Problem, variant: Variant) -> int:
    """Heads of all batches; those whose rows are packed are one."""
    return problem.batch * problem.heads_q // pack(problem, variant)


def q_tiles(problem: Problem, variant: Variant) -> int:
    """Row tiles of a head, or of heads whose rows are packed."""
    return -(-problem.seq_q * pack(problem, variant) // variant.bm)


def sections(problem: Problem, variant: Variant, device: Device) -> tuple[int, int]:
    """Return how many heads have their tiles interleaved, and how many rows of each come last.

    These are ``section_heads`` and ``late_rows`` of ``kernels/scheduler_sm90.cuh``.
    """
    if not problem.causal or KERNELS[variant.kernel].takes_heads:
        return 1, 0  # all tiles are of one length: those of a head follow each other, or are one
    if KERNELS[variant.kernel].persistent:
        return _drawn_sections(problem, variant, device)
    # As many heads as have their K and V in half of L2 together.
    size = ELEMENT_BYTES[problem.dtype]
    kv_bytes = max(1, problem.seq_kv * (problem.head_dim + problem.head_dim_v) * size)
    kv_heads = max(1, device.l2_bytes // 2 // kv_bytes)
    return max(1, min(kv_heads * problem.group, packed_heads(problem, variant))), 0


def _drawn_sections(problem: Problem, variant: Variant, device: Device) -> tuple[int, int]:
    """Return the same for causal tiles that the blocks of a persistent kernel draw.

    Short tiles wait for memory and long ones do not, so both should run at the same time; and the
    K and V of a section should stay in L2: sections are small. The last one must be large enough
    for its own short tiles to fill the gaps that its long ones leave: all are of nearly the same
    size. Where heads have many tiles, the short ones of all heads fill the gaps instead, at the
    end, and sections are smaller still. The numbers come from trials, see docs/kernels.md.
    """
    heads = max(1, packed_heads(problem, variant))
    rows = max(1, q_tiles(problem, variant))
    wanted = min(4.0, rows / 4) * device.sm_count * variant.blocks_per_sm / rows  # heads
    if rows >= 12:
        late_rows = rows // (2 if rows >= 64 else 3 if rows >= 24 else 4)
        return max(1, min(round(wanted / 2), heads)), late_rows
    near = round(heads / max(1.0, wanted))  # sections

    def badness(count: int) -> tuple[bool, int]:
        size = -(-heads // count)
        last = (heads - 1) % size + 1
        return (4 * last < 3 * size, abs(count - near))

    counts = range(max(1, near // 2, near - 128), min(2 * near, near + 128) + 2)
    return -(-heads // min(counts, key=badness)), 0
