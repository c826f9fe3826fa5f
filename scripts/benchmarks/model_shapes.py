"""Shapes of attention in published models: heads and head dims from their configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.cells import Cell

_Heads = tuple[int, int]  # of queries, and of keys and values


class Shape(NamedTuple):
    """A cell, and the model that has it."""

    model: str
    cell: Cell

    def __str__(self) -> str:
        """One short line."""
        return f"{self.model}: {self.cell}"


def _shape(
    model: str, b: int, heads: _Heads, seqs: tuple[int, int], dim: int, dv: int, causal: bool
) -> Shape:
    return Shape(model, Cell("bfloat16", b, *heads, *seqs, dim, dv, causal))


def _prompt(
    model: str, heads: _Heads, dim: int, *sizes: tuple[int, int], dv: int = 0
) -> list[Shape]:
    """Return causal self-attention for each (batch, length)."""
    return [_shape(model, b, heads, (s, s), dim, dv or dim, True) for b, s in sizes]


def _cached(
    model: str, heads: _Heads, dim: int, *sizes: tuple[int, int, int], dv: int = 0
) -> list[Shape]:
    """Return queries that are the last tokens of a cache, for each (batch, queries, keys)."""
    return [_shape(model, b, heads, (sq, sk), dim, dv or dim, True) for b, sq, sk in sizes]


def _full(model: str, heads: int, dim: int, *sizes: tuple[int, int]) -> list[Shape]:
    """Return self-attention without a mask for each (batch, length)."""
    return [_shape(model, b, (heads, heads), (s, s), dim, dim, False) for b, s in sizes]


def _cross(model: str, heads: int, dim: int, *sizes: tuple[int, int, int]) -> list[Shape]:
    """Return attention to other tokens for each (batch, queries, keys)."""
    return [_shape(model, b, (heads, heads), (sq, sk), dim, dim, False) for b, sq, sk in sizes]


SHAPES: tuple[Shape, ...] = (
    # prompts
    *_prompt("llama3-8b", (32, 8), 128, (1, 512), (1, 1024), (1, 2048), (1, 8192)),
    *_prompt("llama3-8b", (32, 8), 128, (1, 333), (1, 4096), (1, 16384), (4, 700)),
    *_prompt("llama3-8b batch", (32, 8), 128, (8, 1024)),
    *_prompt("llama3-70b", (64, 8), 128, (1, 1024), (1, 512), (1, 4096)),
    *_prompt("llama3-70b, 1 of 8 cards", (8, 1), 128, (1, 2048), (4, 4096)),
    *_prompt("llama3.2-1b", (32, 8), 64, (1, 1024), (1, 4096)),
    *_prompt("mistral-small-24b", (32, 8), 128, (2, 3000)),
    *_prompt("qwen2.5-0.5b", (14, 2), 64, (1, 1024), (8, 512)),
    *_prompt("qwen2.5-7b", (28, 4), 128, (1, 1024), (1, 3000)),
    *_prompt("qwen2.5-32b", (40, 8), 128, (1, 2048)),
    *_prompt("qwen3-0.6b", (16, 8), 128, (1, 768)),
    *_prompt("qwen3-30b-a3b", (32, 4), 128, (1, 2048)),
    *_prompt("glm4-9b", (32, 2), 128, (1, 1500)),
    *_prompt("starcoder2-15b", (48, 4), 128, (1, 2048)),
    *_prompt("phi-2", (32, 32), 80, (1, 2048)),
    *_prompt("phi3-mini", (32, 32), 96, (1, 1024), (1, 4096)),
    *_prompt("phi4", (40, 10), 128, (1, 1024)),
    *_prompt("falcon-7b", (71, 1), 64, (1, 2048)),
    *_prompt("gpt2", (12, 12), 64, (1, 1024), (8, 1024)),
    *_prompt("gpt2-xl", (25, 25), 64, (1, 1024)),
    *_prompt("gpt-oss", (64, 8), 64, (1, 2048)),
    *_prompt("gemma-2b", (8, 1), 256, (1, 2048)),
    *_prompt("gemma2-9b", (16, 8), 256, (1, 777), (1, 4096)),
    *_prompt("gemma3-4b", (8, 4), 256, (1, 1024)),
    *_prompt("gemma3-27b", (32, 16), 128, (1, 2048)),
    *_prompt("deepseek-v3", (128, 128), 192, (1, 2048), (1, 4096), dv=128),
    *_prompt("deepseek-v3, 1 of 8 cards", (16, 16), 192, (1, 1024), (1, 4096), dv=128),
    *_prompt("whisper dec", (20, 20), 64, (8, 448)),
    # prompts in chunks, and drafts to verify, behind what is in the cache
    *_cached("chunk", (32, 8), 128, (1, 512, 8704)),
    *_cached("spec", (32, 8), 128, (16, 5, 8192)),
    *_cached("llama3-8b", (32, 8), 128, (1, 1024, 5120), (1, 2048, 32768), (4, 512, 2560)),
    *_cached("llama3-70b", (64, 8), 128, (1, 512, 8704), (1, 2048, 10240)),
    *_cached("qwen2.5-7b", (28, 4), 128, (1, 512, 16896)),
    *_cached("gemma3-4b", (8, 4), 256, (1, 512, 4608)),
    *_cached("deepseek-v3, 1 of 8 cards", (16, 16), 192, (1, 1024, 9216), dv=128),
    *_cached("llama3-8b, draft", (32, 8), 128, (1, 8, 4096), (32, 4, 2048)),
    # encoders of text, images and sound
    *_full("bert-base", 12, 64, (32, 128), (32, 512), (1, 128)),
    *_full("bert-large", 16, 64, (8, 384)),
    *_full("modernbert-base", 12, 64, (1, 8192)),
    *_full("minilm", 12, 32, (64, 128), (1, 256), (256, 64)),
    *_full("t5-xxl enc", 64, 64, (1, 512)),
    *_full("vit-b", 12, 64, (64, 197), (1, 197)),
    *_full("vit-l", 16, 64, (16, 577)),
    *_full("vit-h", 16, 80, (16, 257)),
    *_full("siglip-so400m", 16, 72, (4, 729)),
    *_full("dinov2-g", 24, 64, (4, 1370)),
    *_full("whisper enc", 20, 64, (8, 1500), (1, 1500)),
    *_cross("whisper dec", 20, 64, (8, 448, 1500)),
    # pictures, two of them for guidance, and films
    *_full("sd1.5", 8, 40, (2, 4096)),
    *_full("sd1.5", 8, 80, (2, 1024)),
    *_full("sd1.5", 8, 160, (2, 256)),
    *_cross("sd1.5", 8, 40, (2, 4096, 77)),
    *_full("sdxl", 10, 64, (2, 4096)),
    *_full("sdxl", 20, 64, (2, 1024)),
    *_cross("sdxl", 10, 64, (2, 4096, 77)),
    *_cross("sdxl", 20, 64, (2, 1024, 77)),
    *_full("sd3.5-large", 38, 64, (2, 4250)),
    *_full("flux", 24, 128, (1, 4608), (1, 1536)),
    *_full("wan2.1-1.3b", 12, 128, (1, 32760)),
)
"""Shapes that `bench.py models` times."""


def chosen(models: Iterable[str] | None) -> list[Shape]:
    """Return the shapes of some models, or of all; ValueError where one is unknown."""
    known = list(dict.fromkeys(shape.model for shape in SHAPES))
    wanted = known if models is None else list(models)
    unknown = [model for model in wanted if model not in known]
    if unknown:
        raise ValueError(f"--models: unknown {', '.join(unknown)}; known are {'; '.join(known)}")
    return [shape for shape in SHAPES if shape.model in wanted]


def kind_of(row: Mapping[str, Any]) -> str:
    """Return what the queries and keys of a row, in the words of a cell, are."""
    square = row["sq"] == row["sk"]
    if row["causal"]:
        return "prompt" if square else "cache"
    return "full" if square else "cross"
