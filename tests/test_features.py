"""The list of features: what the public functions take, what keys of calls hold, what is hidden."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drawn_values import DRAWINGS
from played_gpu import on_gpu
from reference import assert_accepted, hidden_keys, random_inputs

import cufa
from cufa.features import FEATURES, VALUES, ordered, parse
from cufa.features.parts import ARRAYS, PARTS
from cufa.launch import calls
from cufa.problem.problem import Problem, checked

ALL = {kind.ARGUMENT for kind in FEATURES}
#: Arguments of `cufa.decode`.
DECODED = {kind.ARGUMENT for kind in FEATURES if any(part.decodes for part in kind.PARTS)}

values = pytest.mark.parametrize("name", VALUES)


class Asked(Exception):  # noqa: N818
    """The key by which a call looks itself up, and its extras."""


def looked_up(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], **options: Any) -> Any:
    """Return the options by which a call is looked up among those before it, and its extras."""

    def replayed(*args: Any) -> None:
        raise Asked(*args[6:8])

    number_of = calls.number_of
    monkeypatch.setattr(calls, "number_of", lambda *args, made: number_of(*args, made=True))
    monkeypatch.setattr(calls, "_run_known", replayed)
    with pytest.raises(Asked) as found:
        call(**options)
    return found.value.args


def key_of(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], **options: Any) -> Any:
    """Return the options by which a call is looked up among those before it."""
    return looked_up(monkeypatch, call, **options)[0]


def attention(**options: Any) -> Any:
    x = on_gpu(np.zeros((1, 1, 4, 8), np.float32))
    return cufa.attention(x, x, x, **options)


def attention_varlen(**options: Any) -> Any:
    x, ends = on_gpu(np.zeros((4, 1, 8), np.float32)), np.array([0, 4])
    return cufa.attention_varlen(x, x, x, ends, ends, **options)


def decode(**options: Any) -> Any:
    x = on_gpu(np.zeros((1, 1, 4, 8), np.float32))
    return cufa.decode(x, x, x, **options)


@pytest.mark.parametrize(
    ("function", "features"),
    [
        (cufa.attention, ALL),
        (cufa.attention_backward, ALL),
        (cufa.explain, ALL),
        (cufa.explore, ALL),
        (cufa.attention_varlen, ALL - {"block_mask"}),
        (cufa.attention_varlen_backward, ALL - {"block_mask"}),
        (cufa.explain_varlen, ALL - {"block_mask"}),
        (cufa.decode, DECODED),
        (cufa.KVCache.decode, DECODED),
    ],
    ids=lambda x: getattr(x, "__qualname__", ""),
)
def test_public_functions_take_the_features(
    function: Callable[..., Any], features: set[str]
) -> None:
    """By keyword, and documented; with none of them by default."""
    parameters = inspect.signature(function).parameters
    assert parameters.keys() & ALL == features
    for name in features:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert name in (function.__doc__ or "")
        if function is not cufa.explore:
            default = VALUES[name].DEFAULT if name in VALUES else None
            expected = True if name == "causal" and features is DECODED else default
            assert parameters[name].default == expected


@pytest.mark.parametrize("call", [attention, attention_varlen, decode])
@values
def test_calls_that_differ_in_a_feature_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, call: Callable[..., Any], name: str
) -> None:
    """And in the type of its argument, as True == 1."""
    if call is decode and name not in DECODED:
        pytest.skip("not for caches")
    given = DRAWINGS[name].draw(rng, 4, 4)
    drops = name == "dropout_p"
    seed = {"seed": 5} if drops else {}
    alike = () if drops else (1, True, 1.0)  # others are refused at once
    asked = ({}, *({name: value, **seed} for value in (given, *alike)))
    keys = [key_of(monkeypatch, call, **options) for options in asked]
    default = inspect.signature(cufa.decode if call is decode else cufa.attention)
    same = given == default.parameters[name].default
    assert (keys[0] == keys[1]) == same
    assert not any(a == b for i, a in enumerate(keys[2:]) for b in keys[3 + i :])


@pytest.mark.parametrize("call", [attention, attention_varlen, decode])
@pytest.mark.parametrize("name", ARRAYS)
def test_calls_pass_arrays_in_the_order_of_arrays(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], name: str
) -> None:
    """They pass a tuple by position, which kernels' parameters read by `ARRAYS`."""
    if name not in inspect.signature(getattr(cufa, call.__name__)).parameters:
        pytest.skip(f"{call.__name__} takes no {name}")
    given: Any = np.zeros(1, np.float32)
    if name == "block_mask":
        given = cufa.BlockMask.of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 4, 4)
    _, extras = looked_up(monkeypatch, call, **{name: given})
    assert len(extras.arrays) == len(ARRAYS)
    for each, array in zip(ARRAYS, extras.arrays, strict=True):
        assert array is (given if each == name else None), each


#: Arguments that are looked at apart: arrays, and what decides whether a call gets there.
APART = {
    *("q", "k", "v", "k_cache", "v_cache", "out", "seed", "out_dtype", "precision"),
    *("lengths", "block_table", "k_scale", "v_scale", "lengths_k", "lengths_q"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
}


@pytest.mark.parametrize("call", [attention, attention_varlen, decode])
def test_calls_that_differ_in_another_option_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    """Whatever is no feature: a known call must not leave it out."""
    parameters = inspect.signature(getattr(cufa, call.__name__)).parameters
    others = parameters.keys() - ALL - APART
    assert {"scale", "kernel", "return_lse"} <= others

    def ran(*args: Any) -> None:
        raise Asked(args[4])

    monkeypatch.setattr(calls, "run", ran)
    for name in others:
        given = object()
        with pytest.raises(Asked) as found:
            call(**{name: given})
        assert any(x is given for x in found.value.args[0]), name


@pytest.mark.parametrize("call", [attention, attention_varlen])
@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"out_dtype": np.float16}], ids=str)
def test_calls_in_8_bits_are_not_looked_up(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], options: dict[str, Any]
) -> None:
    key_of(monkeypatch, call)
    monkeypatch.setattr(
        f"cufa.api.{call.__name__.split('_')[-1]}.run_in_8_bits_or_on_cpu", lambda _: "elsewhere"
    )
    assert call(**options) == "elsewhere"


@values
def test_two_forms_of_a_mask_agree(rng: np.random.Generator, name: str) -> None:
    """The range of keys that queries see, and the formula of the oracles."""
    for _ in range(40):
        seq_q, seq_kv = (int(n) for n in rng.integers(1, 70, 2))
        given = DRAWINGS[name].draw(rng, seq_q, seq_kv)
        shapes = (1, 1, seq_q, 8), (1, 1, seq_kv, 8), (1, 1, seq_kv, 8)
        problem = Problem.of_shapes(*shapes, **{name: given})
        first, end = problem.sees(slice(0, seq_q))
        j = np.arange(seq_kv)
        hidden = (j < first[:, None]) | (j >= end[:, None])
        expected = hidden_keys(seq_q, seq_kv, **{"causal": False, name: given})
        assert np.array_equal(hidden, expected), given
        most = problem.most_seen
        assert most is None or (end - first).max(initial=0) <= most
        assert problem.visited >= seq_kv - max(0, first.min())


@values
def test_a_feature_alone_on_the_cpu(rng: np.random.Generator, name: str) -> None:
    if name == "dropout_p":
        pytest.skip("its own tests compare it")
    for sq, sk in ((40, 90), (90, 40), (5, 300)):
        q, k, v = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=sq, sk=sk, d=24)
        options = {name: DRAWINGS[name].draw(rng, sq, sk)}
        out, lse = cufa.attention(q, k, v, return_lse=True, **options)
        assert_accepted(out, lse, q, k, v, **options)


@values
def test_a_problem_is_what_it_was_made_of(rng: np.random.Generator, name: str) -> None:
    """Its features can be told as plain values, and made of them again."""
    shape = (1, 1, 60, 8)
    problem = Problem.of_shapes(shape, shape, shape, **{name: DRAWINGS[name].draw(rng, 60, 60)})
    assert checked(problem) == problem
    assert hash(checked(problem)) == hash(problem)
    assert set(problem.score) <= PARTS.keys()
    for part in problem.score:
        for parameter in PARTS[part].parameters:
            assert parameter.name in problem.numbers or parameter.name == "dropout_seed"
    for feature in problem.features:
        assert feature.words


def test_what_is_no_feature() -> None:
    with pytest.raises(TypeError, match="there is no windows among softcap, "):
        parse({"windows": (1, 2)})
    shape = (1, 1, 60, 8)
    with pytest.raises(TypeError, match="there is no bias among"):
        Problem.of_shapes(shape, shape, shape, bias=True)


def test_features_have_an_order() -> None:
    found = parse({"window": (5, None), "causal": True, "softcap": 3.0})
    assert [feature.ARGUMENT for feature in found] == ["softcap", "causal", "window"]
    assert ordered(reversed(found)) == found
