"""decode on K and V of 8 bits on a GPU: long caches, pages, features, captures."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from eight_bits import Cache, assert_every_byte, in_pages8, poisoned8, quantized8
from reference import Expected, random_inputs, to_host
from score_arrays import DECODE_FEATURES, options_of
from test_decode import assert_each_accepted, firsts_of

import cufa

pytestmark = pytest.mark.gpu

KINDS = ("uint8", "int8")
#: Options that the oracle is to know.
SCORE = ("scale", "window", "attention_chunk", "softcap", "alibi_slopes", "sinks")


def decode8(cupy: Any, q: Any, k: Cache, v: Cache, **options: Any) -> Any:
    """Decode on caches of 8 bits, brought to the GPU."""
    arrays = [cupy.asarray(x) for x in (q, k.values, v.values)]
    options |= {"k_scale": k.scales, "v_scale": v.scales}
    there = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    return cufa.decode(*arrays, **there)


def checked(
    cupy: Any,
    rng: np.random.Generator,
    lengths: list[int],
    *,
    kind: str,
    dtype: str,
    hq: int = 8,
    hk: int = 2,
    sq: int = 1,
    d: int = 64,
    dv: int = 64,
    page_size: int = 0,
    causal: bool = True,
    **options: Any,
) -> None:
    b, capacity = len(lengths), max(lengths)
    q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=capacity, d=d, dv=dv)
    k8, v8 = quantized8(k, kind), quantized8(v, kind)
    k, v = k8.numbers, v8.numbers
    firsts = firsts_of(lengths, sq, options)
    given: dict[str, Any] = {"lengths": np.array(lengths, np.int32), **options}
    if page_size:
        seed = int(rng.integers(1 << 30))
        (k8, given["block_table"]), (v8, _) = (
            in_pages8(np.random.default_rng(seed), x, lengths, page_size, firsts) for x in (k8, v8)
        )
    else:
        k8, v8 = (poisoned8(x, lengths, firsts) for x in (k8, v8))
    out, lse = decode8(cupy, q, k8, v8, causal=causal, return_lse=True, **given)
    again = decode8(cupy, q, k8, v8, causal=causal, return_lse=True, **given)
    np.testing.assert_array_equal(to_host(out), to_host(again[0]))
    score = {name: options[name] for name in SCORE if name in options}
    assert_each_accepted(out, lse, q, k, v, lengths, causal=causal, **score)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        *({"d": n, "dv": n} for n in (32, 96, 128, 192, 256)),
        {"d": 40, "dv": 72},
        *({"page_size": n, "d": 128, "dv": 128} for n in (1, 7, 16, 48, 64)),
        *({"sq": 5}, {"sq": 9, "d": 128, "dv": 128}, {"hq": 71, "hk": 1, "page_size": 16}),
        *({"num_splits": n} for n in (1, 3)),
    ],
    ids=str,
)
def test_ways(
    cupy: Any, rng: np.random.Generator, options: dict[str, Any], dtype: str, kind: str
) -> None:
    for lengths in ([1500, 0, 1, 333], [9999], [700] * 150):
        checked(cupy, rng, lengths, kind=kind, dtype=dtype, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [0, 16, 100])
@pytest.mark.parametrize("name", DECODE_FEATURES)
def test_scores(cupy: Any, rng: np.random.Generator, name: str, page_size: int, kind: str) -> None:
    lengths = [3000, 0, 77, 1, 1200]
    options = options_of(rng, name, (len(lengths), 8, 2, 2, max(lengths)), DECODE_FEATURES)
    for dtype in ("float16", "bfloat16"):
        checked(*(cupy, rng, lengths), kind=kind, dtype=dtype, sq=2, page_size=page_size, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_v_that_differ(cupy: Any, rng: np.random.Generator, kind: str) -> None:
    """By a thousand, rising and falling: float16 would not hold their products with P."""
    q, k, v = random_inputs(rng, "float16", b=1, hq=8, hk=2, sq=1, sk=4000, d=128)
    for exponents in (np.linspace(0, 1, 4000), np.linspace(1, 0, 4000)):
        by = (5 * 1000.0**exponents).astype(np.float32)
        k8, v8 = quantized8(k, kind), quantized8(v.astype(np.float32) * by[:, None], kind)
        out, lse = decode8(cupy, q, k8, v8, return_lse=True)
        Expected(q, k8.numbers, v8.numbers, causal=True).assert_accepts(out, lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_byte(cupy: Any, dtype: str, kind: str) -> None:
    assert_every_byte(partial(decode8, cupy), dtype, kind)


def test_a_graph_follows_lengths_and_scales(cupy: Any, rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=3, hq=8, hk=2, sq=1, sk=2000, d=128)
    k8, v8 = quantized8(k, "int8"), quantized8(v, "int8")
    arrays = [cupy.asarray(x) for x in (q, k8.values, v8.values)]
    scales = {"k_scale": cupy.asarray(k8.scales), "v_scale": cupy.asarray(v8.scales)}
    lengths = cupy.asarray(np.array([2000, 5, 800], np.int32))
    cufa.decode(*arrays, **scales, lengths=lengths)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out = cufa.decode(*arrays, **scales, lengths=lengths)
        graph = stream.end_capture()
    for changed in ([2000, 5, 800], [1, 1999, 0]):
        lengths.set(np.array(changed, np.int32))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        again = cufa.decode(*arrays, **scales, lengths=lengths)
        np.testing.assert_array_equal(to_host(out), to_host(again))
    scales["v_scale"] *= 2
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(
        to_host(out), to_host(cufa.decode(*arrays, **scales, lengths=lengths))
    )
