"""Type checkers know the results of the public functions, and the words that arguments take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mypy import api

import cufa
from cufa.api import keywords

ROOT = Path(__file__).resolve().parents[1]
CACHE = ".mypy_cache"

RIGHT = """
from typing import Any
from typing_extensions import assert_type

import cupy
import ml_dtypes
import numpy as np

import cufa

Arrays = tuple[np.ndarray, np.ndarray]
q = np.ones((2, 4, 10, 64), np.float32)
k = np.ones((2, 2, 20, 64)).astype(ml_dtypes.bfloat16)
rows, offsets, flag = np.ones((2, 4, 64)), np.array([0, 2]), bool(q.size)

out, lse = cufa.attention(q, k, k, return_lse=True)
assert_type((out, lse), Arrays)
assert_type(cufa.attention(q, k, k), np.ndarray)
assert_type(cufa.attention(q, k, k, causal="top-left", layout="bshd", out=out), np.ndarray)
assert_type(cufa.attention(q, k, k, return_lse=flag), np.ndarray | Arrays)
assert_type(cufa.attention_varlen(rows, rows, rows, offsets, offsets, causal=True), np.ndarray)
assert_type(cufa.attention_varlen(rows, rows, rows, offsets, offsets, return_lse=True), Arrays)
assert_type(cufa.decode(q, k, k, lengths=offsets, layout="bshd"), np.ndarray)
assert_type(cufa.decode(q, k, k, return_lse=True), Arrays)
assert_type(cufa.merge([out, out], [lse, lse], layout="bshd"), Arrays)
assert_type(cufa.merge(np.stack([out, out]), np.stack([lse, lse])), Arrays)
both = cufa.attention_backward(q, q, q, q, out, lse, wrt=["q", "k"], causal="top-left", dq=out)
assert_type(both, tuple[np.ndarray, ...])
assert_type(cufa.Rotary.of_theta(1e4, 64, 100).apply(q, 3, layout="bshd"), np.ndarray)

cache = cufa.KVCache(2, 2, 20, 64, dtype=np.float32, layout="bshd")
cache.append(k, k, q=None)
cache.write(k, k, layer=0)
assert_type(cache.append(k, k, q=q, counts=[1, 2]), np.ndarray)
assert_type(cache[:1].write(k, k, q=q), np.ndarray)
assert_type(cache.decode(q, layer=0, window=(3, None)), np.ndarray)
assert_type(cache.decode(q, return_lse=True), Arrays)

x8 = cufa.quantize(q, layout="bshd")
assert_type(cufa.attention(x8, x8, x8, out_dtype=np.float16, layout="bshd"), Any)
assert_type(cufa.attention(x8, x8, x8, out_dtype="float32", return_lse=True), tuple[Any, Any])
assert_type(cufa.attention(q, k, k, precision="fp8"), np.ndarray)

there = cupy.asarray(q)  # without types
assert_type(cufa.attention(there, there, there), Any)
assert_type(cufa.attention(there, there, there, return_lse=True), tuple[Any, Any])
"""

WRONG = """
import numpy as np
import cufa
x = np.ones((1, 1, 4, 8), np.float32)
"""

CALLS = {
    "cufa.attention([1.0], x, x)",
    "cufa.attention(x, x, [1.0])",
    "cufa.attention(x, x, x, bias=[1.0])",
    'cufa.attention(x, x, x, causal="left")',
    'cufa.attention(x, x, x, layout="bsdh")',
    "cufa.attention(x, x, x, is_causal=True)",
    "cufa.attention(x, x, x, return_lse=1)",
    "cufa.attention(x, x, x, return_lse=True).shape",
    'cufa.explain(x, x, x, causal="left")',
    'cufa.attention(x, x, x, precision="fp4")',
    'cufa.quantize(x, granularity="row")',
    "cufa.attention(cufa.quantize(x), x, x)",
    "cufa.attention_varlen(x[0], x[0], x[0], [0, 4], [0, 4])",
    'cufa.decode(x, x, x, causal="top-left")',
    'cufa.merge([x], [x], layout="bhs")',
    'cufa.KVCache(1, 1, 4, 8, dtype=x.dtype, layout="bhds")',
    "cufa.KVCache(1, 1, 4, 8, dtype=x.dtype).append(x, x).shape",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the lines of code in which mypy finds errors, by file."""
    folder = tmp_path_factory.mktemp("types")
    texts = {"right.py": RIGHT, "wrong.py": "\n".join([WRONG, *sorted(CALLS)])}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    # The settings of the project's own run, so that its cache serves.
    command = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / CACHE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT))
        told, failure, _ = api.run([*command, *(str(folder / name) for name in texts)])
    assert not failure
    found: dict[str, set[str]] = {name: set() for name in texts}
    for line in told.splitlines():
        place, of, _ = line.partition(": error: ")
        if of:
            name, number = place.rsplit(":", 1)
            found[Path(name).name].add(texts[Path(name).name].splitlines()[int(number) - 1])
    return found


def test_results_have_the_type_of_the_arrays(errors: dict[str, set[str]]) -> None:
    assert not errors["right.py"]


def test_wrong_arguments_are_found(errors: dict[str, set[str]]) -> None:
    assert errors["wrong.py"] == CALLS


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (cufa.attention, keywords.AttentionOptions),
        (cufa.attention_varlen, keywords.VarlenOptions),
        (cufa.decode, keywords.DecodeOptions),
        (cufa.KVCache.decode, keywords.CacheOptions),
    ],
    ids=lambda x: getattr(x, "__qualname__", ""),
)
def test_overloads_have_every_keyword(function: Callable[..., Any], known: Any) -> None:
    """And its type, but for arrays, which are `Array` inside the package."""
    runs = {
        p.name: p.annotation.replace("Array", "AnyArray")
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name != "return_lse"
    }
    assert not known.__required_keys__
    found = {name: ref.__forward_arg__ for name, ref in known.__annotations__.items()}
    found.pop("return_lse", None)
    assert found == runs
