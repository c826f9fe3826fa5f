"""The kernel that decodes, on the GPU that the host plays: see `played_gpu`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import played_gpu
from played_gpu import at, elements, loaded
from reference import DTYPES, oracle

from cufa.launch.decode import PAGED, PARAMS
from cufa.variant import Variant

_INT32 = np.dtype(np.int32)


class DecodeKernel:
    """Stands for a compiled kernel: it finds its arrays from the words of its parameter alone."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    def __call__(self, grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
        """Stand for a launch."""
        variant, gpu = self.variant, played_gpu.GPU
        gpu.launches.append(variant)
        assert block == (variant.threads, 1, 1)
        assert smem_bytes == variant.smem_bytes
        (pointer,) = args
        paged = variant.kv != "Contiguous"
        layout = PAGED if paged else PARAMS
        parameter = at(pointer.ptr, (1,), (layout.itemsize,), layout)[0]
        p = parameter["params"] if paged else parameter
        assert variant.score == (("Causal",) if variant.causal else ())
        assert p["scale_log2"] > 0
        batch, heads, rows = (int(p[name]) for name in ("batch", "heads_q", "seq_q"))
        d, dv, capacity = (int(p[name]) for name in ("head_dim", "head_dim_v", "seq_kv"))
        assert p["group"]["divisor"] * p["heads_kv"] == heads
        gpu.scratch.append(self._use_scratch(p, grid[0]))
        lengths = np.full(batch, capacity)
        if p["lengths"]:
            lengths = at(int(p["lengths"]), (batch,), (4,), _INT32).clip(0, capacity)
        dtype = DTYPES[variant.dtype]
        q = loaded(p["q"], (batch, heads, rows, d), dtype)
        blocks, keys = batch, capacity
        if paged:
            blocks, keys = (
                int(parameter["kv"]["pages"]),
                int(parameter["kv"]["page_size"]["divisor"]),
            )
        k, v = (
            loaded(p[name], (blocks, int(p["heads_kv"]), keys, columns), dtype)
            for name, columns in (("k", d), ("v", dv))
        )
        out = elements(p["o"], (batch, heads, rows, dv), dtype)
        scale = float(p["scale_log2"]) * math.log(2)
        for i, length in enumerate(lengths):
            if paged:
                pages = self._pages(parameter["kv"], i, -(-length // keys))
                own = [
                    x[pages].swapaxes(0, 1).reshape(1, x.shape[1], len(pages) * keys, x.shape[3])
                    for x in (k, v)
                ]
            else:
                own = [x[i : i + 1] for x in (k, v)]
            own = [x[:, :, :length] for x in own]
            result, lse = oracle(q[i : i + 1], *own, causal=variant.causal, scale=scale)
            out[i] = result[0].astype(dtype)
            if p["lse"]:
                place = int(p["lse"]) + 4 * i * lse.size
                at(place, (lse.size,), (4,), np.dtype(np.float32))[...] = lse.ravel()

    def _use_scratch(self, p: np.void, blocks: int) -> int:
        """See that the numbers which blocks share are all ones; return where they are."""
        assert p["blocks"]["divisor"] == blocks
        if p["splits"] == 1:
            assert p["partial"] == 0
            return 0
        rows = min(self.variant.bm, int(p["group"]["divisor"]) * int(p["seq_q"]))
        floats = 2 * blocks * rows * (self.variant.head_dim_v + 4)
        assert (at(int(p["partial"]), (floats,), (4,), _INT32) == -1).all()
        return int(p["partial"])

    def _pages(self, kv: np.void, sequence: int, count: int) -> np.ndarray:
        row = int(kv["block_table"]) + 4 * sequence * int(kv["table_stride"])
        return at(row, (count,), (4,), _INT32)
