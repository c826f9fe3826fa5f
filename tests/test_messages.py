"""Messages for those who come from another library: they say what takes its words' place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cufa
from cufa import cli

Q = np.ones((2, 4, 16, 8), np.float32)
PAGES = np.ones((10, 4, 16, 8), np.float32)
CALL: Any = cufa.attention
DECODE: Any = cufa.decode
EXPLAIN: Any = cufa.explain

NAMES = {
    "is_causal": '"top-left"',
    "attn_mask": "mask= if it is boolean, bias= if it is added",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "window_size": "window=, with None",
    "return_softmax_lse": "return_lse=",
    "enable_gqa": "heads are grouped by their numbers",
    "cache_seqlens": "lengths= of decode, which counts the new tokens, too",
    "k_descale": "k_scale= of decode, a scale for each key and K/V head",
    "v_descale": "v_scale= of decode",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_libraries(name: str) -> None:
    offsets = np.array([0, 16])
    ragged: Any = cufa.attention_varlen
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: CALL(Q, Q, Q, **{name: 1}),
        "decode": lambda: DECODE(Q, Q, Q, **{name: 1}),
        "attention_varlen": lambda: ragged(*[Q[0]] * 3, offsets, offsets, **{name: 1}),
    }
    backward: Any = cufa.attention_backward
    ragged_backward: Any = cufa.attention_varlen_backward
    explore: Any = cufa.explore
    calls |= {
        "attention_backward": lambda: backward(*[Q] * 5, Q[..., 0], **{name: 1}),
        "attention_varlen_backward": lambda: ragged_backward(Q[0], **{name: 1}),
        "explore": lambda: explore(Q, Q, Q, **{name: 1}),
    }
    cache: Any = cufa.KVCache(2, 4, 20, 8, dtype="float32")
    of_cache: tuple[str, Callable[[], Any]] = ("decode", lambda: cache.decode(Q, **{name: 1}))
    for function, call in (*calls.items(), of_cache):
        message = rf"^{function}\(\) got an unexpected keyword argument '{name}': here it is .*"
        with pytest.raises(TypeError, match=message + NAMES[name]):
            call()
    with pytest.raises(
        TypeError, match=rf"^explain\(\) got an unexpected .*: here .*{NAMES[name]}"
    ):
        EXPLAIN(Q, Q, Q, **{name: 1})


def test_names_of_none() -> None:
    for call in (CALL, DECODE, EXPLAIN):
        with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'causl'$"):
            call(Q, Q, Q, causl=True)
    for function in (cufa.attention, cufa.attention_varlen, cufa.decode):
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_arguments_that_are_missing() -> None:
    """Python's own message counts and names them; names that are not known come first."""
    message = r"^explain\(\) missing 2 required positional arguments: 'k' and 'v'$"
    for given in ({}, {"causal": True}):
        with pytest.raises(TypeError, match=message):
            EXPLAIN(Q, **given)
    with pytest.raises(TypeError, match=r"^explain\(\) takes 3 positional arguments but 4 were gi"):
        EXPLAIN(Q, Q, Q, Q)
    with pytest.raises(TypeError, match=r"^explain\(\) got an unexpected .*: here it is scale=$"):
        EXPLAIN(Q, softmax_scale=1)


def test_arguments_of_gradients_are_none_of_their_plan() -> None:
    """They are neither named as missing nor computed with."""
    explain: Any = cufa.explain_backward
    with pytest.raises(TypeError, match=r"^explain_backward\(\) missing 1 .* argument: 'v'$"):
        explain(Q, Q)
    _, lse = cufa.attention(Q, Q, Q, return_lse=True)
    with pytest.raises(TypeError, match=r"^explain_backward\(\) takes 3 .* but 6 were given$"):
        explain(Q, Q, Q, Q, Q, lse)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: CALL(*[Q.astype(float)] * 3),
            r"q has dtype float64.*; q\.astype\(numpy\.float32\)",
        ),
        (lambda: CALL(Q, Q, Q, mask=np.ones((16, 16), int)), "mask has dtype int64.* mask != 0"),
        (lambda: CALL(Q, Q, Q, mask=Q[0, 0]), "mask has dtype float32.* is a bias"),
        (lambda: CALL(Q, Q, Q, softcap=0.0), "softcap must be .* or None for none"),
        (lambda: DECODE(Q, Q, Q, num_splits=0), "num_splits must be at least 1, or None to choose"),
        (lambda: DECODE(Q, PAGES, PAGES), "batch 10 and 2 differ; pages need a block_table"),
        (
            lambda: DECODE(
                *(Q, PAGES, PAGES),
                lengths=np.array([40, 3]),
                block_table=np.array([[0, 1], [2, 3]]),
            ),
            r"lengths\[0\] is 40: it must be 0 to 32, the 2 pages of 16 tokens",
        ),
        (
            lambda: DECODE(Q, cufa.KVCache(2, 4, 20, 8, dtype="float32"), Q),
            r"k_cache must be .*, not KVCache: k_cache\.layer\(\) returns a cache's keys and "
            r"values; k_cache\.decode\(q\) reads",
        ),
        (lambda: CALL(Q, cufa.KVCache(2, 4, 20, 8, dtype="fp8"), Q), r"not KVCache: k\.layer\(\)"),
        (
            lambda: CALL(Q, *cufa.KVCache(2, 4, 20, 8, dtype="int8").layer()),
            r"k has dtype int8, but q has dtype float32; dequantize\(dtype=q\.dtype\) of a cache",
        ),
    ],
    ids=[
        *("float64", "integers", "added", "softcap", "num_splits", "pages", "table"),
        *("cache", "cache of 8 bits", "bytes"),
    ],
)
def test_the_way_out(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu a10", "for others, --arch names the architecture: sm_86"),
        ("--gpu h100 --window -1,-1", "window: left must be 0 or more, or None for no bound"),
        ("--gpu h100 --window=-1,-1", "window: left must be 0 or more, or None for no bound"),
        ("--gpu h100 --return-lse -1", "unrecognized arguments: -1"),
        ("--gpu h100 -- -1", " -1"),
    ],
)
def test_words_of_the_command_line(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert cli.main(["explain", "--q", "4,32,4096,128", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_times_of_another_gpu(capsys: pytest.CaptureFixture[str], gpu: str) -> None:
    assert cli.main(["explain", "--q", "4,32,4096,128", "--gpu", gpu]) == 0
    said = "us on an H200, whose costs stand for those of other GPUs"
    assert (said in capsys.readouterr().out) is (gpu == "h100")
