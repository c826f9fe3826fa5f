"""bench.py generate: speeds, bounds and rows, with a played model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import results
from test_bench import HEAD
from test_bench_tables import page_of

WEIGHT_BYTES = 16_000_000_000
READ_GBS = 4000.0


def played(seconds: float) -> Callable[[np.ndarray, int], list[float]]:
    """Return a run whose steps take so long, after slow ones."""

    def run(prompts: np.ndarray, new: int) -> list[float]:
        assert prompts.shape[1] == 512
        return [*(0.1 * i for i in range(4)), *(1 + seconds * i for i in range(new - 4))]

    return run


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what a run gives: a step of 5 ms, 0.4 ms of it attention, and one of 20 ms."""
    pytest.importorskip("cupy")
    from benchmarks import generate

    model = SimpleNamespace(
        config=SimpleNamespace(vocabulary=100, tied=False),
        matrices={
            "model.embed_tokens.weight": np.zeros(3),
            "lm_head.weight": SimpleNamespace(nbytes=WEIGHT_BYTES),
        },
    )

    def missing(*_: Any) -> Any:
        raise ImportError("no such package")

    peers = {"transformers": lambda *_: played(0.02), "other": missing}
    monkeypatch.setattr(generate, "random_model", lambda name: model)
    monkeypatch.setattr(generate, "ours", lambda _: played(0.005))
    monkeypatch.setattr(generate, "PEERS", peers)
    monkeypatch.setattr(generate, "attention_ms", lambda *_: 0.4)
    monkeypatch.setattr(generate, "free_memory", lambda: None)
    found = generate.rows("tiny", [1, 16], 512, 64, peers, 2, READ_GBS)
    return list(found)


def test_rows(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    one, sixteen = rows
    assert (one["batch"], one["prompt"], one["new"], one["unit"]) == (1, 512, 64, "tokens/s")
    assert (one["cufa"], one["peers"]) == (200.0, {"transformers": 50.0})
    assert (one["bound"], one["bound_share"]) == (250.0, 0.8)
    assert one["attention_share"] == sixteen["attention_share"] == 0.08
    assert (sixteen["cufa"], sixteen["bound"]) == (3200.0, 4000.0)
    assert sixteen["bound_share"] == 0.8
    results.validate({"bench": "generate", **HEAD, "rows": rows})
    del sixteen["bound"]
    with pytest.raises(ValueError, match=r"rows\[1\].bound is missing"):
        results.validate({"bench": "generate", **HEAD, "rows": rows})


def test_page(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    text = page_of(tmp_path, "generate", rows)
    assert text.startswith("# Generating text on NVIDIA H200\n")
    assert (
        "| tiny | bfloat16 | 16 | 512 | 64 | 3200.0 | 800.0 | 4.00 | 4000.0 | 80.0% | 8.0% |"
        in text
    )


@pytest.mark.gpu
def test_a_small_model_generates(cupy: Any) -> None:
    from benchmarks import generate

    (row,) = generate.rows("tiny", [2], 40, 20, [], 1, READ_GBS)
    assert row["peers"] == {}
    assert row["cufa"] > 0
    assert 0 < row["attention_share"] < 1


@pytest.mark.gpu
def test_transformers_computes_the_same(cupy: Any) -> None:
    from benchmarks import generate

    pytest.importorskip("transformers")
    model = generate.random_model("tiny")
    run = generate.transformers(model, "tiny")  # compares logits
    assert len(run(np.zeros((2, 5), np.int64), 7)) == 7
