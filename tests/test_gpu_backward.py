"""Gradients on a GPU: each feature, draws of features together, the same bits, and graphs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import read_arrays
import score_arrays
import score_mods
from backward_combinations import checked
from reference import DTYPES, to_host
from reference_backward import ExpectedGradients
from test_backward import NAMES, READ, drawn, features, formula_options, wrt_of

import cufa

pytestmark = pytest.mark.gpu

SHAPES = (((2, 4, 2, 67, 131), (24, 24)), ((1, 6, 1, 333, 290), (128, 128)))
TOGETHER = 10

Arrays = list[np.ndarray]


def both_passes(cupy: Any, arrays: Arrays, wrt: tuple[str, ...], options: Any) -> dict[str, Any]:
    """Return gradients of a call on the GPU, by name."""
    there = {name: cupy.asarray(x) if hasattr(x, "dtype") else x for name, x in options.items()}
    dout, q, k, v = map(cupy.asarray, arrays)
    deterministic = there.pop("deterministic", False)
    out, lse = cufa.attention(q, k, v, return_lse=True, **there)
    found = cufa.attention_backward(
        dout, q, k, v, out, lse, wrt=wrt, deterministic=deterministic, **there
    )
    return dict(zip(wrt, found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_feature(cupy: Any, rng: np.random.Generator, dtype: str, name: str) -> None:
    for sizes, dims in SHAPES:
        arrays = drawn(rng, dtype, sizes, *dims)
        if name.startswith("function "):
            word = name.removeprefix("function ")
            options, given = score_mods.made(rng, word, sizes, cupy.asarray)
        else:
            given = options = features(rng, name, sizes)
        expected = ExpectedGradients(*arrays, **formula_options(options, sizes))
        found = both_passes(cupy, arrays, wrt_of(options), given)
        expected.assert_accepts({x: to_host(y) for x, y in found.items()}, f"{sizes}")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", itertools.product((False, True), repeat=4), ids=str)
def test_a_bias_of_each_shape(
    cupy: Any, rng: np.random.Generator, dtype: str, deterministic: bool, axes: tuple[bool, ...]
) -> None:
    """Along batch, heads, queries and keys; in a fixed order, two calls have the same bits."""
    sizes = (2, 4, 2, 300, 333)
    b, h, q, k = (n if has else 1 for n, has in zip((2, 4, 300, 333), axes, strict=True))
    options: dict[str, Any] = {
        **{
            "bias": score_arrays.bias(rng, (b, h, 1, q, k)),
            "sinks": score_arrays.sinks(rng, sizes),
        },
        **{"causal": True, "deterministic": deterministic},
    }
    arrays = drawn(rng, dtype, sizes, 64, 64)
    first, again = (both_passes(cupy, arrays, ("bias",), options)["bias"] for _ in range(2))
    del options["deterministic"]
    ExpectedGradients(*arrays, **options).assert_accepts({"bias": to_host(first)})
    assert not deterministic or to_host(first).tobytes() == to_host(again).tobytes()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", READ)
def test_arrays_that_a_function_reads(
    cupy: Any, rng: np.random.Generator, dtype: str, deterministic: bool, name: str
) -> None:
    sizes, wrt = (2, 4, 2, 140, 150), READ[name]
    draw, make = score_mods.FEATURES[name]
    read = {each: np.asarray(array) for each, array in draw(rng, sizes).items()}
    host, there = make(read), make({each: cupy.asarray(array) for each, array in read.items()})
    arrays = drawn(rng, dtype, sizes, 64, 64)
    out, lse = cufa.attention(*map(cupy.asarray, arrays[1:]), return_lse=True, **there)
    given = (*map(cupy.asarray, arrays), out, lse)
    bits = set()
    for _ in range(2 if deterministic else 1):
        gradients = cufa.attention_backward(*given, wrt=wrt, deterministic=deterministic, **there)
        found = {each: to_host(x) for each, x in zip(wrt, gradients, strict=True)}
        bits.add(tuple(x.tobytes() for x in found.values()))
        read_arrays.assert_accepts(found, (*arrays, to_host(out), to_host(lse)), name, host)
    assert len(bits) == 1


@pytest.mark.parametrize("dims", [(1, 256), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles(
    cupy: Any, rng: np.random.Generator, dtype: str, causal: bool, dims: tuple[int, int]
) -> None:
    """Rows resemble their neighbours, and keys the queries."""
    sizes = (2, 4, 2, 1061, 1173)
    arrays = []
    for x in drawn(rng, dtype, sizes, *dims):
        smooth = np.cumsum(x.astype(np.float32), axis=2) / 16 + x.astype(np.float32) / 4
        arrays.append(smooth.astype(x.dtype))
    expected = ExpectedGradients(*arrays, causal=causal)
    for deterministic in (False, True):
        options = {"causal": causal, "deterministic": deterministic}
        found = both_passes(cupy, arrays, (*"qkv",), options)
        expected.assert_accepts({x: to_host(y) for x, y in found.items()}, f"{options}")


@pytest.mark.parametrize("group", range(36))
def test_combinations(cupy: Any, group: int) -> None:
    for number in range(group * TOGETHER, (group + 1) * TOGETHER):
        try:
            checked(number, 400, cupy)
        except Exception as error:
            raise AssertionError(f"draw {number}: {error}") from error


@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_launches_have_the_same_bits(cupy: Any, rng: np.random.Generator, d: int) -> None:
    """All of 10,000, while another stream keeps some multiprocessors busy."""
    sizes, wrt = (1, 4, 2, 300, 400), (*"qkv",)
    dout, q, k, v = map(cupy.asarray, drawn(rng, "bfloat16", sizes, d, d))
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    other = cupy.cuda.Stream(non_blocking=True)
    noise = cupy.ones((1 << 20,), cupy.float32)
    first: tuple[Any, ...] | None = None
    differ = cupy.zeros((), cupy.int64)
    for i in range(10_000):
        found = cufa.attention_backward(
            dout, q, k, v, out, lse, causal=True, wrt=wrt, deterministic=True
        )
        if first is None:
            first = found
        if i % 10 == 0:
            with other:
                noise *= 1.0
        for x, y in zip(first, found, strict=True):
            differ += (x.view(cupy.int16) != y.view(cupy.int16)).any()
    assert int(differ) == 0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_graph(cupy: Any, rng: np.random.Generator, dtype: str, deterministic: bool) -> None:
    """Both passes of a captured graph follow what is in the arrays at each launch."""
    sizes = (2, 4, 2, 200, 300)
    arrays = drawn(rng, dtype, sizes, 64, 64)
    there = [cupy.asarray(x) for x in arrays]
    places = [cupy.empty_like(x) for x in there[1:]]

    def call() -> None:
        dout, q, k, v = there
        out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
        into = dict(zip(("dq", "dk", "dv"), places, strict=True))
        cufa.attention_backward(
            dout, q, k, v, out, lse, causal=True, deterministic=deterministic, **into
        )

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        for _ in range(3):
            arrays = drawn(rng, dtype, sizes, 64, 64)
            for x, y in zip(there, arrays, strict=True):
                x.set(y)
            graph.launch()
            stream.synchronize()
            expected = ExpectedGradients(*arrays, causal=True)
            expected.assert_accepts(dict(zip("qkv", map(to_host, places), strict=True)))
