"""A real model, scripts/data/adder: it adds numbers that it was never shown together."""

from __future__ import annotations

import json
from pathlib import Path

import adder
import numpy as np
import pytest
from llama import Llama, Prompt, Settings, Speed, Tokenizer, complete, generate

FOLDER = Path(__file__).resolve().parent.parent / "scripts" / "data" / "adder"

#: Sums of the held-out part, which training leaves out.
PAIRS = adder.draw(np.random.default_rng(20240607), 400, held_out=True).tolist()

TOKENS = 2 * (adder.DIGITS + 1) + 2  # of the longest answer: the sum twice, a space, an end


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


def answers(
    model: Llama, tokenizer: Tokenizer, pairs: list[list[int]], page_size: int | None = None
) -> list[str]:
    """Return what the model writes after each sum, all as one batch."""
    prompts = [Prompt(tokenizer.encode(adder.prompt(*pair)), TOKENS) for pair in pairs]
    texts = [""] * len(pairs)
    eos, speed = model.config.eos, Speed()
    for piece in complete(model, tokenizer, prompts, Settings(), eos, speed, page_size):
        texts[piece.prompt] += piece.text
    return texts


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_that_it_was_not_trained_on(device: str, tokenizer: Tokenizer, dtype: str) -> None:
    pairs = PAIRS if dtype == "float32" or device == "gpu" else PAIRS[:100]  # NumPy converts slowly
    found = answers(Llama(FOLDER, device, dtype), tokenizer, pairs)
    wrong = [pair for pair, text in zip(pairs, found, strict=True) if text != adder.answer(*pair)]
    assert wrong == []


@pytest.mark.parametrize(("page_size", "batch"), [(16, 400), (1, 64), (7, 30), (None, 16)])
def test_sums_in_pages_and_in_batches_that_fit_a_graph(
    device: str, tokenizer: Tokenizer, page_size: int | None, batch: int
) -> None:
    model = Llama(FOLDER, device)
    pairs = PAIRS if device == "gpu" else PAIRS[: 2 * batch + 1 if batch < 64 else batch]
    for start in range(0, len(pairs), batch):
        some = pairs[start : start + batch]
        found = answers(model, tokenizer, some, page_size)
        assert found == [adder.answer(*pair) for pair in some]


def test_alone_and_in_a_batch(device: str, tokenizer: Tokenizer) -> None:
    model = Llama(FOLDER, device)
    pairs = PAIRS[: 100 if device == "gpu" else 25]
    prompts = [Prompt(tokenizer.encode(adder.prompt(*pair)), TOKENS) for pair in pairs]
    together = np.stack(list(generate(model, prompts, Settings())), axis=1)
    for prompt, row in zip(prompts, together, strict=True):
        alone = np.concatenate(list(generate(model, [prompt], Settings())))
        assert np.array_equal(alone, row)


def test_sums_of_every_length_and_all_carries(tokenizer: Tokenizer) -> None:
    pairs = [[0, 0], [9, 1], [1, 9], [99, 1], [999, 1], [9999, 1], [1, 9999], [9999, 9999]]
    pairs += [[5000, 5000], [4321, 0], [0, 8765], [45, 55], [1234, 8766]]
    assert answers(Llama(FOLDER, "cpu"), tokenizer, pairs) == [adder.answer(*p) for p in pairs]


def test_training_leaves_out_what_is_tested() -> None:
    assert adder.is_held_out(*np.array(PAIRS).T).all()
    assert adder.is_held_out(*np.array(PAIRS)[:, ::-1].T).all()
    assert adder.is_held_out(np.array([47, 2748]), np.array([84, 6385])).all()  # README.md's
    trained = adder.draw(np.random.default_rng(0), 20000, held_out=False)
    assert not adder.is_held_out(*trained.T).any()
    assert trained.min() == 0
    assert trained.max() <= 9999
    a, b = np.divmod(np.arange(10**6), 1000)
    assert abs(adder.is_held_out(a, b).mean() - 1 / adder.HELD_OUT_EVERY) < 0.002
    # The split must stay what it was when the model was trained.
    held_out = np.flatnonzero(adder.is_held_out(np.full(100, 47), np.arange(100)))
    assert held_out.tolist() == [8, 21, 34, 47, 52, 79, 84]


def test_it_is_a_small_llama_with_what_larger_ones_have() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert 1 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]
