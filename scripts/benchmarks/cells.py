"""The cells of the tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from cufa.explorer.standard import SEQS, standard_problems
from cufa.problem.problem import Problem

PREFILL_HEAD_DIMS = (64, 128, 256)
FP32_HEAD_DIMS = (64, 128)
GQA_SEQS = (2048, 8192, 32768)
FP8_SEQS = (512, 2048, 8192, 16384)
VARLEN_LENGTHS = (
    *(1034, 898, 270, 1978, 2040, 1145, 373, 380, 1208, 1350, 1792, 46, 409, 222, 740, 2499),
)
"""Lengths of 16 sequences, 16384 tokens together."""

HEAD_DIMS = (
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (160, 160),
    (192, 128),
    (192, 192),
    (256, 256),
)
"""Head dims of Q and K, and of V, in their table."""

SCORES = ("normal", "sharp", "rising")
"""Data of a prefill, gqa or fp32 table: Q and K normal, with deviation 1; Q 8 times that, so
that few keys count; or scores that rise by 12 every 64 keys from the last to the first."""


class Cell(NamedTuple):
    """One problem of a table, in the words of a result row."""

    dtype: str
    b: int
    hq: int
    hk: int
    sq: int
    sk: int
    d: int
    dv: int
    causal: bool

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Shape of Q: (batch, heads, seq, head_dim)."""
        return self.b, self.hq, self.sq, self.d

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        """Shape of K."""
        return self.b, self.hk, self.sk, self.d

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """Shape of V."""
        return self.b, self.hk, self.sk, self.dv

    @property
    def scale(self) -> float:
        """The usual scale of the scores, 1 / sqrt(head_dim)."""
        return float(self.d**-0.5)

    @property
    def flops(self) -> float:
        """Floating-point operations of the two products, halved for a causal mask."""
        full = 2.0 * self.b * self.hq * self.sq * self.sk * (self.d + self.dv)
        return full / 2 if self.causal else full

    @property
    def problem(self) -> Problem:
        """The cell as cufa's problem."""
        shapes = self.q_shape, self.k_shape, self.v_shape
        return Problem.of_shapes(*shapes, dtype=self.dtype, causal=self.causal)

    def tflops(self, ms: float) -> float:
        """Speed in TFLOP/s of a call that takes `ms` milliseconds."""
        return self.flops / ms / 1e9

    def row(self) -> dict[str, Any]:
        """Return the cell's part of a result row."""
        return self._asdict()

    def __str__(self) -> str:
        """One short line."""
        mask = "causal" if self.causal else "full"
        heads = str(self.hq) if self.hq == self.hk else f"{self.hq}/{self.hk}"
        seq = str(self.sq) if self.sq == self.sk else f"{self.sq}x{self.sk}"
        dim = str(self.d) if self.d == self.dv else f"{self.d}/{self.dv}"
        return f"{self.dtype} d{dim} {mask} s{seq} b{self.b} h{heads}"


class Table(NamedTuple):
    """A standard table, and the kernel forced on cufa there; None leaves the choice to it."""

    dtype: str
    head_dims: tuple[int, ...]
    kernel: str | None

    def cells(
        self, head_dims: Iterable[int] | None = None, seqs: Iterable[int] = SEQS
    ) -> list[Cell]:
        """Return the cells, of all its head dims and lengths or of others; errors as below."""
        return standard_cells(self.dtype, head_dims or self.head_dims, seqs)


TABLES = {
    "prefill": Table("bfloat16", PREFILL_HEAD_DIMS, None),
    "fp16": Table("float16", PREFILL_HEAD_DIMS, None),
    "mma": Table("bfloat16", PREFILL_HEAD_DIMS, "fa2_mma"),
    "fp32": Table("float32", FP32_HEAD_DIMS, "fa2_fp32"),
}
"""The standard tables by the names of their result files."""

FAMILIES = (*TABLES, "models", "masks", "decode")
"""The cells that `refactor` races: the standard tables, and those of the benchmarks so named."""


def standard_cells(dtype: str, head_dims: Iterable[int], seqs: Iterable[int] = SEQS) -> list[Cell]:
    """Return the standard table of one dtype: hidden size 2048, 16384 tokens, causal and not.

    ValueError where a head dim does not divide the hidden size, or a length the tokens.
    """
    return [cell_of(problem) for problem in standard_problems((dtype,), head_dims, seqs=seqs)]


def fp8_cells(head_dims: Iterable[int] | None = None) -> list[Cell]:
    """Return the cells of the table of 8 bits, of all its head dims or of some; errors as below."""
    return standard_cells("bfloat16", head_dims or PREFILL_HEAD_DIMS, FP8_SEQS)


def gqa_cells(dtype: str, seqs: Iterable[int] = GQA_SEQS) -> list[Cell]:
    """Return the table of 64 query heads on 8 K/V heads: head dim 128, causal and not.

    ValueError where a length is not positive.
    """
    lengths = tuple(seqs)
    for s in lengths:
        if s < 1:
            raise ValueError(f"sequence length {s} is not positive")
    return [
        Cell(dtype, 1, 64, 8, s, s, 128, 128, causal) for causal in (False, True) for s in lengths
    ]


def headdim_cells(causal: bool) -> list[Cell]:
    """Return the table of head dims under one mask: all that differs is in `HEAD_DIMS`."""
    return [Cell("bfloat16", 2, 16, 16, 8192, 8192, d, dv, causal) for d, dv in HEAD_DIMS]


def cell_of(p: Problem) -> Cell:
    """Return a problem as a cell."""
    heads = p.heads_q, p.heads_kv
    return Cell(p.dtype, p.batch, *heads, p.seq_q, p.seq_kv, p.head_dim, p.head_dim_v, p.causal)
