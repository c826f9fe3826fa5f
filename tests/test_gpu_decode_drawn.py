"""`decode` on a GPU where blocks draw pieces of long units."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import Expected, random_inputs
from test_decode import assert_each_accepted, poisoned

import cufa
from cufa import device
from cufa.decode_problem import parse_decode
from cufa.planner import decode_units, decode_variants
from cufa.planner.decode import plan

pytestmark = pytest.mark.gpu

LENGTHS = (
    *((4096,) * 9, (4000, 4096, 1, 2111, 3333, 4095, 33, 2049, 4096)),
    *((1,) * 9, (4096,) + (5,) * 8),  # of few tiles; one long one
)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw pieces of fewer keys than are worth it."""
    monkeypatch.setattr(decode_variants, "_MUCH", 0)
    monkeypatch.setattr(decode_variants, "_SHORT_UNIT", 0)
    monkeypatch.setattr(decode_units, "_PIECE", 1 << 15)
    monkeypatch.setattr(decode_units, "_LEAST_DRAWN", 0)
    monkeypatch.setattr(decode_units, "_DRAWN_DTYPES", ("float16", "bfloat16", "float32"))


def drawing(arrays: list[Any], lengths: Any, **options: Any) -> dict[str, Any]:
    """Return the options of a call in which blocks draw."""
    causal, unified_max = options.get("causal", True), options.get("unified_max")
    beside: dict[str, Any] = {"scale": None, "layout": "bhsd", "out": None, "block_table": None}
    problem, _, _ = parse_decode(
        *arrays, lengths=lengths, causal=causal, unified_max=unified_max, **beside
    )
    assert plan(problem, device.current()).variant.draws
    return {"lengths": lengths, **options}


@pytest.mark.parametrize(
    ("d", "hq", "sq", "dtype", "options"),
    [
        (128, 4, 1, "bfloat16", {}),
        (128, 8, 1, "float16", {"unified_max": 0.0}),
        (128, 2, 2, "float16", {}),
        (256, 4, 1, "bfloat16", {}),
        (100, 2, 1, "bfloat16", {"causal": False}),
        (256, 2, 1, "float32", {}),
    ],
)
def test_lengths(
    cupy: Any, rng: np.random.Generator, d: int, hq: int, sq: int, dtype: str, options: Any
) -> None:
    """Each twice: what a launch leaves behind is what the next begins with."""
    q, k, v = random_inputs(rng, dtype, b=9, hq=hq, hk=2, sq=sq, sk=4096, d=d)
    for lengths in LENGTHS:
        caches = [poisoned(x, lengths, [0] * 9) for x in (k, v)]
        arrays = [cupy.asarray(x) for x in (q, *caches)]
        given = drawing(arrays, cupy.asarray(np.array(lengths, np.int32)), **options)
        found = [cufa.decode(*arrays, return_lse=True, **given) for _ in range(2)]
        causal = options.get("causal", True)
        for out, lse in found:
            assert_each_accepted(out.get(), lse.get(), q, k, v, lengths, causal=causal)
        assert found[0][0].get().tobytes() == found[1][0].get().tobytes()


@pytest.mark.parametrize(("b", "d", "dtype"), [(70, 128, "bfloat16"), (30, 256, "float16")])
def test_more_units_than_blocks(
    cupy: Any, rng: np.random.Generator, b: int, d: int, dtype: str
) -> None:
    """Short ones are taken in a fixed turn, others drawn."""
    heads = 5  # of which there are more than two units a multiprocessor, or one
    q, k, v = random_inputs(rng, dtype, b=b, hq=heads, hk=heads, sq=1, sk=1300, d=d)
    some = [int(n) for n in rng.integers(0, 1301, b)]
    for lengths in ([20] * b, [250] * b, [300, 1] * (b // 2), [1] * (b - 1) + [1300], some):
        caches = [poisoned(x, lengths, [0] * b) for x in (k, v)]
        arrays = [cupy.asarray(x) for x in (q, *caches)]
        given = drawing(arrays, cupy.asarray(np.array(lengths, np.int32)))
        found = [cufa.decode(*arrays, return_lse=True, **given) for _ in range(2)]
        for out, lse in found:
            assert_each_accepted(out.get(), lse.get(), q, k, v, lengths)
        assert found[0][0].get().tobytes() == found[1][0].get().tobytes()


def test_streams_and_graphs_while_lengths_grow(cupy: Any, rng: np.random.Generator) -> None:
    """Who draws what is chance, results are not."""
    q, k, v = random_inputs(rng, "bfloat16", b=9, hq=8, hk=2, sq=1, sk=4096, d=128)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    lengths = [cupy.zeros(9, np.int32) for _ in range(3)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in lengths]
    graphs, outs = [], []
    for stream, own in zip(streams, lengths, strict=True):
        with stream:
            cufa.decode(*arrays, **drawing(arrays, own))
            stream.begin_capture()
            for _ in range(20):
                out = cufa.decode(*arrays, lengths=own)
            graphs.append(stream.end_capture())
            outs.append(out)
    for now in ((4096,) * 9, (5,) * 9, LENGTHS[1], (4095,) * 9):
        for own in lengths:
            own.set(np.array(now, np.int32))
        cupy.cuda.Device().synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
        cupy.cuda.Device().synchronize()
        assert len({out.get().tobytes() for out in outs}) == 1
        for i, n in enumerate(now):
            one = slice(i, i + 1)
            Expected(q[one], k[one, :, :n], v[one, :, :n]).assert_accepts(outs[0][one], None)
