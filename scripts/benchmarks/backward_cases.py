"""The cells of the benchmark of gradients, by family, and the operations of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks.cells import (
    PREFILL_HEAD_DIMS,
    VARLEN_LENGTHS,
    Cell,
    gqa_cells,
    standard_cells,
)
from benchmarks.model_shapes import SHAPES

WINDOW = 1024
"""Keys that a query sees in the family of that name."""

_DTYPE = "bfloat16"
_HIDDEN = 2048
_TOKENS = 16384
_DIMS = (64, 128)
_FP32_SEQS = (2048, 8192)
_MODELS = (
    ("llama3-8b", 1, 8192),
    ("llama3-8b batch", 8, 1024),
    ("llama3-70b", 1, 4096),
    ("qwen2.5-7b", 1, 3000),
    ("phi-2", 1, 2048),
    ("gemma2-9b", 1, 4096),
    ("deepseek-v3, 1 of 8 cards", 1, 4096),
    ("gpt2", 8, 1024),
    ("bert-base", 32, 512),
    ("flux", 1, 4608),
)
"""Models, batches and lengths that are among the shapes of `bench.py models`."""


class Case(NamedTuple):
    """Gradients of Q, K and V in a cell.

    Attributes
    ----------
    feature : str
        A key of `FAMILIES`.
    cell : Cell
    deterministic : bool
    window : int or None
        Keys that a query sees, its own the last.
    lengths : tuple of int
        Lengths of packed sequences; none where all are as long as the cell says.
    model : str
        Forward pass and gradients in one call, in a shape of this model.
    """

    feature: str
    cell: Cell
    deterministic: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = ()
    model: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `cufa.attention` after Q, K and V."""
        window = {} if self.window is None else {"window": (self.window - 1, None)}
        return {"causal": self.cell.causal, **window}

    @property
    def flops(self) -> float:
        """Operations of the five products, and of a forward pass that is in the call."""
        c = self.cell
        if self.window is not None:
            rows = min(self.window, c.sq)
            pairs: float = c.b * (rows * (rows + 1) // 2 + (c.sq - rows) * self.window)
        else:
            squares = sum(n * n for n in self.lengths) or c.b * c.sq * c.sk
            pairs = squares / 2 if c.causal else squares
        forward = 2.0 * (c.d + c.dv) if self.model else 0.0
        return c.hq * pairs * (2.0 * (3 * c.d + 2 * c.dv) + forward)

    def row(self) -> dict[str, Any]:
        """Return what tells its row from others."""
        model = {"model": self.model} if self.model else {}
        return {"feature": self.feature, **model, "deterministic": self.deterministic}

    def __str__(self) -> str:
        """One short line."""
        return " ".join(filter(None, (self.feature, self.model, str(self.cell))))


def _table() -> Iterable[Case]:
    return (Case("table", cell) for cell in standard_cells(_DTYPE, PREFILL_HEAD_DIMS))


def _deterministic() -> Iterable[Case]:
    return (case._replace(feature="deterministic", deterministic=True) for case in _table())


def _gqa() -> Iterable[Case]:
    return (Case("gqa", cell) for cell in gqa_cells(_DTYPE))


def _models() -> Iterable[Case]:
    found = {(shape.model, shape.cell.b, shape.cell.sq, shape.cell.sk): shape for shape in SHAPES}
    shapes = (found[model, b, s, s] for model, b, s in _MODELS)
    return (Case("models", shape.cell, model=shape.model) for shape in shapes)


def _cell(d: int, s: int) -> Cell:
    heads = _HIDDEN // d
    return Cell(_DTYPE, _TOKENS // s, heads, heads, s, s, d, d, causal=True)


def _window() -> Iterable[Case]:
    return (Case("window", _cell(d, _TOKENS), window=WINDOW) for d in _DIMS)


def _varlen() -> Iterable[Case]:
    return (Case("varlen", _cell(d, _TOKENS), lengths=VARLEN_LENGTHS) for d in _DIMS)


def _fp32() -> Iterable[Case]:
    return (Case("fp32", cell) for cell in standard_cells("float32", _DIMS, _FP32_SEQS))


FAMILIES: dict[str, Callable[[], Iterable[Case]]] = {
    "table": _table,
    "deterministic": _deterministic,
    "gqa": _gqa,
    "models": _models,
    "window": _window,
    "varlen": _varlen,
    "fp32": _fp32,
}
"""Families of cases, by the words of ``--only``."""


def cases(families: Iterable[str], head_dims: Iterable[int] | None = None) -> list[Case]:
    """Return the cases of some families, of all head dims or of some.

    ValueError where there is none.
    """
    of_families = [case for name in families for case in FAMILIES[name]()]
    wanted = None if head_dims is None else set(head_dims)
    found = [case for case in of_families if wanted is None or case.cell.d in wanted]
    if not found:
        raise ValueError(f"--head-dim: --only has {sorted({case.cell.d for case in of_families})}")
    return found
