"""Calls of `decode`, and of `attention` that run so, on a GPU: streams, threads and graphs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, assert_accepted, random_inputs, to_host

import cufa
from cufa import device
from cufa.planner.decode import DecodePlan
from cufa.specs import default_kernel

pytestmark = pytest.mark.gpu


class Call:
    """A call of `decode` on data of its own, and the bits of its result."""

    def __init__(self, cupy: Any, rng: np.random.Generator, b: int = 1, page_size: int = 0) -> None:
        self._cupy = cupy
        q, k, v = random_inputs(rng, "bfloat16", b=b, hq=8, hk=2, sq=1, sk=4096, d=64)
        lengths = rng.integers(1, 4097, b).astype(np.int32)
        self.arrays = [cupy.asarray(x) for x in (q, k, v)]
        self.options: dict[str, Any] = {"lengths": cupy.asarray(lengths)}
        if page_size:
            pages = 4096 // page_size
            table = np.arange(b * pages, dtype=np.int32).reshape(b, pages)
            self.options["block_table"] = cupy.asarray(table)
            for i in (1, 2):
                parts = self.arrays[i].reshape(b, 2, pages, page_size, 64).swapaxes(1, 2)
                self.arrays[i] = cupy.ascontiguousarray(parts).reshape(-1, 2, page_size, 64)
        self.expected = to_host(self()).tobytes()

    def __call__(self) -> Any:
        """Make the call."""
        return cufa.decode(*self.arrays, **self.options)

    def check(self, results: list[Any]) -> None:
        """Assert that all have the bits of the first one."""
        assert {to_host(each).tobytes() for each in results} == {self.expected}


def calls(cupy: Any, rng: np.random.Generator) -> list[Call]:
    return [Call(cupy, rng, b, page_size) for b in (1, 5, 40) for page_size in (0, 16)]


def test_streams_at_once(cupy: Any, rng: np.random.Generator) -> None:
    """Each has pieces of its own."""
    given = calls(cupy, rng)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in given]
    cupy.cuda.Device().synchronize()
    results: list[list[Any]] = [[] for _ in given]
    for _ in range(100):
        for call, stream, found in zip(given, streams, results, strict=True):
            with stream:
                found.append(call())
    cupy.cuda.Device().synchronize()
    for call, found in zip(given, results, strict=True):
        call.check(found)


@pytest.mark.parametrize("per_thread", [False, True])
def test_threads_at_once(cupy: Any, rng: np.random.Generator, per_thread: bool) -> None:
    """On one stream, and on the default stream of each thread."""
    given = calls(cupy, rng)
    cupy.cuda.Device().synchronize()
    results: list[list[Any]] = [[] for _ in given]

    def work(number: int) -> None:
        with cupy.cuda.Stream.ptds if per_thread else cupy.cuda.Stream.null:
            results[number] += [given[number]() for _ in range(100)]
            cupy.cuda.get_current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for call, found in zip(given, results, strict=True):
        call.check(found)


def test_more_numbers_than_before(cupy: Any, rng: np.random.Generator, stream: Any) -> None:
    """The stream's memory goes back to the pool while launches wait for it."""
    given = [Call(cupy, rng, b) for b in (1, 3, 40)]
    results = [[call() for splits in range(50)] for call in given for _ in range(2)]
    many = [
        cufa.decode(*given[2].arrays, **given[2].options, num_splits=splits)
        for splits in (2, 64, 128, 2, 64)
    ]
    stream.synchronize()
    for call, found in zip([call for call in given for _ in range(2)], results, strict=True):
        call.check(found)
    assert to_host(many[0]).tobytes() == to_host(many[3]).tobytes()
    assert to_host(many[1]).tobytes() == to_host(many[4]).tobytes()


def test_integers_of_any_kind_and_strides(cupy: Any, rng: np.random.Generator, stream: Any) -> None:
    """As `cupy.array` makes them of a list; not in a capture, which could not convert them."""
    call = Call(cupy, rng, 5, 16)
    lengths, table = (call.options[name] for name in ("lengths", "block_table"))
    for change in (
        {"lengths": cupy.array(lengths.get().tolist())},
        {"lengths": cupy.repeat(lengths, 2)[::2]},
        {"block_table": table.astype(np.int64)},
        {"block_table": cupy.ascontiguousarray(table.T).T},
    ):
        for _ in range(2):
            call.check([cufa.decode(*call.arrays, **{**call.options, **change})])
        stream.begin_capture()
        with pytest.raises(ValueError, match=r"would be copied, .* contiguous int32"):
            cufa.decode(*call.arrays, **{**call.options, **change})
        stream.end_capture()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_few_queries(
    cupy: Any, rng: np.random.Generator, causal: bool, dtype: str
) -> None:
    for hq, hk, sq, d, dv in (
        (8, 2, 1, 64, 64),
        (7, 1, 3, 128, 128),
        (4, 4, 16, 59, 59),
        (6, 2, 5, 192, 128),
        (71, 1, 1, 80, 80),
    ):
        q, k, v = random_inputs(rng, dtype, b=2, hq=hq, hk=hk, sq=sq, sk=5001, d=d, dv=dv)
        arrays = [cupy.asarray(x) for x in (q, k, v)]
        chosen = cufa.explain(*arrays, causal=causal)
        assert isinstance(chosen, DecodePlan), chosen
        for _ in range(2):
            out = cupy.full((2, hq, sq, dv), np.nan, q.dtype)
            _, lse = cufa.attention(*arrays, causal=causal, out=out, return_lse=True)
            assert_accepted(out, lse, q, k, v, causal=causal)


def test_attention_of_few_queries_in_graphs(
    cupy: Any, rng: np.random.Generator, stream: Any
) -> None:
    """More of them than memory is set aside for."""
    q, k, v = random_inputs(rng, "float16", b=1, hq=8, hk=2, sq=1, sk=4000, d=64)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    assert isinstance(cufa.explain(*arrays), DecodePlan)
    cufa.attention(*arrays)
    cufa.attention(*arrays, kernel=default_kernel("float16", device.current()).name)
    graphs = []
    for _ in range(12):
        out = cupy.empty(q.shape, q.dtype)
        stream.begin_capture()
        cufa.attention(*arrays, out=out)
        cufa.attention(*arrays, out=out)
        graphs.append((stream.end_capture(), out))
    for _ in range(3):
        for graph, out in graphs:
            out.fill(np.nan)
            graph.launch(stream)
    stream.synchronize()
    for _, out in graphs:
        assert_accepted(out, None, q, k, v)
