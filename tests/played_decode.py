"""The kernel that decodes, on the GPU that the host plays: see `played_gpu`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import played_gpu
import pytest
from played_gpu import at, elements, loaded
from reference import DTYPES, oracle

from cufa import device
from cufa.features.parts import PARTS
from cufa.specs.variant import Variant

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def arrays_beside(variant: Variant, parameter: np.void) -> dict[str, np.ndarray]:
    """Return the arrays that parts of the score read, by argument, from their words."""
    sizes = {"b": int(parameter["params"]["batch"]), "h": int(parameter["params"]["heads_q"])}
    found = {}
    for part in (PARTS[name] for name in variant.score):
        if part.axes:
            words, argument = parameter[part.name], part.argument
            strides = [4 * int(words[f"{argument}_stride_{axis}"]) for axis in part.axes]
            shape = [sizes[axis] for axis in part.axes]
            found[argument] = at(int(words[f"{argument}_data"]), shape, strides, _FLOAT32)
    return found


def score_of(variant: Variant, parameter: np.void) -> dict[str, Any]:
    """Return what the oracle is to be told of the score, from the words of a parameter."""
    window: list[int | None] = [None, None]
    found: dict[str, Any] = {"causal": variant.causal, **arrays_beside(variant, parameter)}
    for name in variant.score:
        if PARTS[name].argument == "window":
            window[name == "WindowRight"] = int(parameter[name].item()[0])
        if PARTS[name].argument == "attention_chunk":
            found["attention_chunk"] = int(parameter[name].item()[0])
        if PARTS[name].argument == "softcap":
            softcap_log2, inverse, *_ = parameter[name].item()
            assert softcap_log2 * inverse == pytest.approx(1)
            found["softcap"] = softcap_log2 * math.log(2)
    return found | {"window": tuple(window)}


class DecodeKernel:
    """Stands for a compiled kernel: it finds its arrays from the words of its parameter alone."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    def __call__(self, grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
        """Stand for a launch."""
        variant, gpu = self.variant, played_gpu.GPU
        gpu.launches.append(variant)
        assert block == (variant.threads, 1, 1)
        assert variant.smem_bytes <= smem_bytes <= device.of_id(0).smem_per_block
        (pointer,) = args
        paged = variant.kv != "Contiguous"
        layout = variant.parameter
        parameter = at(pointer.ptr, (1,), (layout.itemsize,), layout)[0]
        p, score = parameter["params"], score_of(variant, parameter)
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
            # No key is read that no query's window reaches, or that is in front of all chunks.
            left, chunk = score["window"][0], score.get("attention_chunk", capacity + 1)
            stands = int(length) - rows
            first = max(0 if left is None else stands - left, stands // chunk * chunk)
            own = [x[:, :, :length].copy() for x in own]
            for x in own:
                x[:, :, : max(0, first)] = 0
            own_score = {n: x[i : i + 1] if n == "alibi_slopes" else x for n, x in score.items()}
            result, lse = oracle(q[i : i + 1], *own, scale=scale, **own_score)
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
