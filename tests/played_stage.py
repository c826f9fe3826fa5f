"""A GPU that the explorer's tests play: what a call does and takes is said in a few words."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from reference import oracle, random_inputs

from cufa.arrays import Operands
from cufa.explorer.inputs import Inputs
from cufa.explorer.oracle import Oracle
from cufa.explorer.subject import Subject
from cufa.specs.variant import Variant

CEILINGS = {"read_gbs": 4000.0, "copy_gbs": 4000.0, "gemm_tflops": 700.0}


class PlayedStage:
    """In place of `cufa.explorer.subject.Stage`.

    `said` decides the result of a variant: a word, such as "right" or "wrong", and perhaps the
    milliseconds of a call. By default its cubin says so.
    """

    xp = np
    errors = (RuntimeError, MemoryError)
    broken = False

    def __init__(self, subject: Subject) -> None:
        self.problem = p = subject.problem
        sizes = {"b": p.batch, "hq": p.heads_q, "hk": p.heads_kv, "sq": p.seq_q, "sk": p.seq_kv}
        inputs = random_inputs(
            np.random.default_rng(3), p.dtype, **sizes, d=p.head_dim, dv=p.head_dim_v
        )
        right = oracle(*inputs, causal=p.causal)[0].astype(inputs[0].dtype)
        self.inputs = (subject.inputs or Inputs())._replace(tensors=inputs)
        self.operands = Operands(*inputs, np.empty_like(right))
        self.results = self.repeated = (self.operands.out,)
        self.right = right
        self.rest_s: float | None = None
        self.runs = 0

    def judge(self) -> Any:
        """Return the judge of results."""
        return Oracle(np, self.problem, self.inputs).judge

    def said(self, variant: Variant, cubin: bytes) -> str:
        """Return what a variant does."""
        return cubin.decode()

    def ready(self, variant: Variant, cubin: bytes) -> Callable[[], float]:
        """Return a call that does what is said, and returns its milliseconds."""
        word, _, rest = self.said(variant, cubin).partition(" ")
        out = self.operands.out

        def call() -> float:
            self.runs += 1
            if self.broken:
                raise RuntimeError("an illegal memory access was encountered")
            if word == "illegal":
                raise ValueError("it is for float32")
            if word == "error":
                raise RuntimeError(rest)
            if word == "address":
                type(self).broken = True
            elif word == "late" and self.runs > 12:
                raise RuntimeError("unspecified launch failure")
            elif word == "random":
                out[...] = self.right
                out[0, 0, -1, 0] += self.runs % 2 * 1e-3
            elif word != "nothing":
                out[...] = self.right + (1 if word == "wrong" else 0)
            return float(rest or 1)

        return call

    def run(self, call: Callable[[], float]) -> None:
        """Make one call over a result full of NaN, and raise what a broken context raises."""
        self.operands.out.fill(np.nan)
        call()
        self.wait()

    def wait(self) -> None:
        """Raise what a broken context raises."""
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered\nmore")

    def ceilings(self) -> dict[str, float]:
        """Return ceilings."""
        return dict(CEILINGS)

    def clock(self, rest_s: float = 1) -> Any:
        """Return a clock that believes what calls return."""
        self.rest_s = rest_s

        def burst(call: Callable[[], float], calls: int) -> Callable[[], float]:
            ms = call()
            return lambda: ms

        return SimpleNamespace(burst=burst, rest=lambda: None)
