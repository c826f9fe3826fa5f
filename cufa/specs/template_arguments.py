"""The template arguments of the kernels that compute attention, by name."""

from __future__ import annotations

from typing import NamedTuple

NUMBERS = ("head_dim", "head_dim_v", "bm", "bn", "stages", "warps", "blocks_per_sm")
"""The arguments of every kernel that are numbers, in order."""

SWITCHES = ("ping_pong", "unified", "whole")
"""The arguments of some kernels that are true or false."""


def equal_registers(threads: int) -> int:
    """Return a thread's part of the registers if these threads share a multiprocessor."""
    return 65536 // threads // 8 * 8


class TemplateArguments(NamedTuple):
    """One template instantiation; `cufa.specs.variant.Variant` says what each field is."""

    kernel: str
    dtype: str
    head_dim: int
    head_dim_v: int
    bm: int
    bn: int
    stages: int
    warps: int
    blocks_per_sm: int
    ping_pong: bool = False
    unified: bool = False
    whole: bool = False
    schedule: str = ""
    score: tuple[str, ...] = ()
    kv: str = "Dense"

    @property
    def causal(self) -> bool:
        """Whether the causal mask is compiled in."""
        return "Causal" in self.score

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps
