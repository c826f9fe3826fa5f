"""The decoders of scripts/llama with keys and values of 8 bits."""

from __future__ import annotations

from pathlib import Path

import adder
import llama_folders
import numpy as np
import pytest
from exhaustive import exhaustive
from llama import Llama, Tokenizer
from models import ModelError
from test_adder import FOLDER, PAIRS, answers
from test_llama import RECORDED, TOKENS, logits

KINDS = ("fp8", "int8")

#: Bounds of the median, over all tokens, of the largest error of a logit. bfloat16 has 0.04.
ERROR = {"fp8": 0.2, "int8": 0.04}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", llama_folders.CONFIGS)
def test_logits(tmp_path: Path, name: str, kind: str) -> None:
    """Tokens that come one by one are as those of a prompt, but for the rounding of sums.

    That may lead a number of a later layer to the other of two of 8 bits, but seldom.
    """
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, "cpu", "float32", kind)
    whole = logits(model, TOKENS, [40])
    errors = np.abs(whole - RECORDED[name]).max(axis=-1)
    assert 1e-3 < np.median(errors) < ERROR[kind]
    for steps in ([1] * 40, [17, 1, 22]):
        differences = np.abs(logits(model, TOKENS, steps) - whole).max(axis=-1)
        assert np.median(differences) < 1e-5
        assert differences.max() < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [None, 7])
@pytest.mark.parametrize("count", [40, len(PAIRS)])
@exhaustive("others", "decode", but=lambda count: count < len(PAIRS))
def test_sums_are_as_right(count: int, page_size: int | None, kind: str) -> None:
    model, tokenizer = Llama(FOLDER, "cpu", "float32", kind), Tokenizer(FOLDER)
    pairs = PAIRS[:count]
    assert answers(model, tokenizer, pairs, page_size) == [adder.answer(*p) for p in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("page_size", "batch"), [(None, 400), (16, 64)])
def test_sums_are_as_right_on_a_gpu(
    page_size: int | None, batch: int, dtype: str, kind: str
) -> None:
    model, tokenizer = Llama(FOLDER, "gpu", dtype, kind), Tokenizer(FOLDER)
    for start in range(0, len(PAIRS), batch):
        some = PAIRS[start : start + batch]
        found = answers(model, tokenizer, some, page_size)
        assert found == [adder.answer(*pair) for pair in some]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "gemma2", "gpt-oss"])
def test_logits_on_a_gpu(tmp_path: Path, name: str, kind: str) -> None:
    """A prompt and single tokens are as far from each other as in 16 bits."""
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, "gpu", "bfloat16", kind)
    whole, singly = (logits(model, TOKENS, steps) for steps in ([40], [1] * 40))
    assert np.median(np.abs(whole - RECORDED[name]).max(axis=-1)) < ERROR[kind] + 0.05
    assert np.median(np.abs(whole - singly).max(axis=-1)) < 0.1


@pytest.mark.gpu
def test_a_gpu_needs_16_bits(tmp_path: Path) -> None:
    llama_folders.write(tmp_path, "llama3")
    with pytest.raises(ModelError, match="a cache of fp8 on a GPU needs a model of float16 or"):
        Llama(tmp_path, "gpu", "float32", "fp8")


def test_unknown_caches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache must be one of auto, fp8, int8, not 'fp4'"):
        Llama(tmp_path, cache="fp4")
