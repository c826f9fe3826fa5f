"""The decoders of scripts/llama by the kernels of a GPU, on the host: against recorded logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_folders
import numpy as np
import pytest
from emulated import needs_compiler
from llama import Llama, ops
from models import cuda, flat, rows
from script_kernels import ScriptKernels, script_kernels  # noqa: F401
from test_llama import RECORDED

pytestmark = needs_compiler


@pytest.fixture
def launches(
    monkeypatch: pytest.MonkeyPatch,
    script_kernels: ScriptKernels,  # noqa: F811
) -> list[Any]:
    """Let models of NumPy arrays run on the kernels; return what is launched."""
    launched = []

    def kernel(file: str, expression: str) -> Any:
        launched.append(expression)
        return script_kernels.kernel(file, expression)

    def rms_norm(x: Any, weight: Any, eps: float, dtype: Any) -> Any:
        y = np.empty(x.shape, dtype)
        rows.rms_norm(x, weight, y, eps)
        return y

    monkeypatch.setattr(cuda, "kernel", kernel)
    monkeypatch.setattr(cuda, "launch", script_kernels.launch)
    monkeypatch.setattr(cuda, "empty", script_kernels.empty)
    monkeypatch.setattr(flat, "takes", lambda weight, count: count <= flat.MOST_ROWS)
    monkeypatch.setattr(ops, "rms_norm", rms_norm)
    monkeypatch.setattr(
        ops, "rms_norm_inplace", lambda x, weight, eps: rows.rms_norm(x, weight, x, eps)
    )
    return launched


@pytest.mark.parametrize("name", ["llama-biased-linear", "qwen3", "gemma2", "gpt-oss"])
def test_logits(tmp_path: Path, launches: list[Any], name: str) -> None:
    llama_folders.write(tmp_path, name)
    model = Llama(tmp_path, "cpu")
    count, start, found = 2, 0, []
    cache = model.cache([40] * count, 16 if name == "qwen3" else None)
    for new in (5, 1):
        ids = llama_folders.TOKENS[:, start : start + new]
        states = model.extend(cache, ids)
        found.append(model.logits(states.reshape(count * new, -1)).reshape(count, new, -1))
        start += new
    assert np.abs(np.concatenate(found, axis=1) - RECORDED[name][:, :start]).max() < 3e-5
    layers, experts = model.config.layers, model.config.experts
    # A router in the place of a perceptron's two matrices.
    assert len([each for each in launches if "flat" in each]) == 2 * (
        (3 if experts else 4) * layers + 1
    )
    of_experts = [each for each in launches if each.startswith(("route", "expert", "add_shares"))]
    assert len(of_experts) == (2 * 4 * layers if experts else 0)
    norms = 2 * layers * (1 + model.config.post_norms) + 1 + layers * model.config.qk_norm
    assert len([each for each in launches if "rms" in each]) == 2 * norms
