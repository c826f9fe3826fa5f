"""Chunked attention: which keys queries see, on the CPU and on a GPU; what is refused."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_cases import KERNELS
from reference import Expected, assert_accepted, lse_slack, random_inputs, to_host
from test_varlen import assert_each_is_right, ragged

import cufa
from cufa import device
from cufa.cpu import attention as cpu
from cufa.explorer.work import flops
from cufa.planner.attention import Planner
from cufa.planner.decode import DecodePlan, plan_splits
from cufa.problem.problem import Problem

CHUNKS = (1, 7, 64, 100, 1000)
#: Batch, heads of q and of K/V, queries, keys.
SHAPES = ((2, 4, 2, 131, 257), (1, 2, 1, 300, 190), (1, 8, 2, 5, 400))
OTHERS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {},
    {"window": (20, 5)},
    {"window": (40, None), "causal": True, "softcap": 3.0},
    {"causal": "top-left"},
)


def same_chunk(seq_q: int, seq_kv: int, chunk: int) -> np.ndarray:
    """Bool (sq, sk): True where a key is of a query's chunk, told one by one."""
    found = np.zeros((seq_q, seq_kv), bool)
    for i in range(seq_q):
        stands = i + seq_kv - seq_q
        for j in range(seq_kv):
            found[i, j] = stands >= 0 and j // chunk == stands // chunk
    return found


def bound_of_few_keys(expected: Expected, arrays: Any, chunk: int, **options: Any) -> float:
    """Return the accepted error of chunks, which for one key a chunk is that of all keys.

    The naive P of one key is exactly 1, so that the rule accepts no error there. A kernel's P, and
    its sum, may differ from 1 by a unit in the last place.
    """
    return expected.bound if chunk > 1 else max(expected.bound, Expected(*arrays, **options).bound)


def test_what_is_seen() -> None:
    """Four keys, chunks of two; two queries stand in front of the first key."""
    eye = np.eye(4, dtype=np.float32)
    q = np.zeros((6, 4), np.float32)
    out = cufa.attention(q, eye, eye, attention_chunk=2)
    halves = [[0, 0, 0, 0]] * 2 + [[0.5, 0.5, 0, 0]] * 2 + [[0, 0, 0.5, 0.5]] * 2
    assert np.array_equal(out, np.array(halves, np.float32))
    assert cufa.attention(q[:3], eye, eye, attention_chunk=2, causal=True).tolist() == [
        [0.5, 0.5, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0.5, 0.5],
    ]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_the_cpu(rng: np.random.Generator, dtype: str, chunk: int) -> None:
    for b, hq, hk, sq, sk in SHAPES:
        q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=24)
        mask = same_chunk(sq, sk, chunk)
        expected = [Expected(q, k, v, mask=mask, **others) for others in OTHERS]
        bound = max(each.bound for each in expected)  # of few keys, it is a matter of chance
        for each, others in zip(expected, OTHERS, strict=True):
            out, lse = cufa.attention(q, k, v, return_lse=True, attention_chunk=chunk, **others)
            each.assert_accepts(out, lse, f"{sq} x {sk}, {others}", bound)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_on_the_gpu(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, chunk: int
) -> None:
    for (b, hq, hk, sq, sk), others, d in itertools.product(SHAPES, OTHERS[:4], (64, 128)):
        q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d)
        given = [cupy.asarray(x) for x in (q, k, v)]
        out, lse = cufa.attention(
            *given, kernel=kernel, return_lse=True, attention_chunk=chunk, **others
        )
        expected = Expected(q, k, v, mask=same_chunk(sq, sk, chunk), **others)
        slack = lse_slack(q, k, **others)
        bound = bound_of_few_keys(expected, (q, k, v), chunk, **others)
        expected.assert_accepts(out, lse, f"{sq} x {sk}, {d}, {others}", bound, slack)


def test_chunks_are_those_of_each_sequence(xp: ModuleType, rng: np.random.Generator) -> None:
    """Counted from its own first key, with the queries at its own last ones."""
    q, k, v = random_inputs(rng, "float16", b=3, hq=2, sq=40, sk=150, d=64)
    lengths = np.array([150, 37, 93], np.int32)
    given = [xp.asarray(x) for x in (q, k, v)]
    out = to_host(cufa.attention(*given, lengths_k=xp.asarray(lengths), attention_chunk=32))
    for i, n in enumerate(lengths):
        one = slice(i, i + 1)
        arrays = q[one], k[one, :, :n], v[one, :, :n]
        assert_accepted(out[one], None, *arrays, mask=same_chunk(40, int(n), 32))


def test_sequences_that_follow_each_other(xp: ModuleType, rng: np.random.Generator) -> None:
    arrays = ragged(rng, "float32", ((30, 70, 1, 0, 12), (70, 70, 5, 9, 90)))
    found = cufa.attention_varlen(
        *map(xp.asarray, arrays), attention_chunk=16, causal=True, return_lse=True
    )
    assert_each_is_right(found, arrays, attention_chunk=16, causal=True)


def test_tiles_of_other_chunks_are_skipped(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 16 tiles of queries looks at the two of keys that are its chunk's."""
    looked_at = []
    tiles = cpu.KV.tiles
    monkeypatch.setattr(cpu, "ROWS", 128)

    def counted(kv: cpu.KV, keys: slice) -> Any:
        looked_at.append(keys)
        return tiles(kv, keys)

    monkeypatch.setattr(cpu.KV, "tiles", counted)
    q, k, v = random_inputs(rng, "float32", sq=2048, d=8)
    cufa.attention(q, k, v, attention_chunk=512)
    assert len(looked_at) == 16 * 512 // cpu.KEYS
    shape = (1, 1, 2048, 8)
    problem = Problem.of_shapes(shape, shape, shape, attention_chunk=512)
    assert flops(problem) == 2 * 2048 * 512 * 16
    assert (problem.most_seen, problem.visited) == (512, 2048)


def test_a_plan_counts_the_keys_of_a_chunk() -> None:
    h200 = device.named("h200")
    shape = (1, 8, 16384, 128)
    problem = Problem.of_shapes(
        shape, shape, shape, dtype="bfloat16", attention_chunk=2048, causal=True
    )
    found = Planner(problem, h200)(problem)
    assert found.variant.kernel == "fa3_wgmma"
    assert found.variant.score == ("Causal", "AttentionChunk")
    cached = Problem.of_shapes((1, 8, 1, 128), shape, shape, dtype="bfloat16", attention_chunk=2048)
    assert cached.visited == 2048
    decoded = Planner(cached, h200)(cached)
    assert isinstance(decoded, DecodePlan)
    assert decoded.variant.score == ("AttentionChunk",)


def test_a_cache_of_one_chunk_needs_no_part() -> None:
    def score(keys: int, queries: int = 1) -> tuple[str, ...]:
        k = (1, 8, keys, 128)
        return Problem.of_shapes((1, 8, queries, 128), k, k, attention_chunk=100).in_cache.score

    assert score(100) == ()
    assert score(101) == score(100, 2) == ("AttentionChunk",)


@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [
        (0, ValueError, "attention_chunk must be 1 or more, or None for no chunks, not 0"),
        (-8, ValueError, "attention_chunk must be 1 or more, or None for no chunks, not -8"),
        (True, TypeError, "attention_chunk must be an integer or None, not bool"),
        (8.0, TypeError, "attention_chunk must be an integer or None, not float"),
        ("8", TypeError, "attention_chunk must be an integer or None, not str"),
    ],
)
def test_what_is_no_chunk(chunk: Any, error: type[Exception], message: str) -> None:
    x = np.ones((1, 1, 4, 8), np.float32)
    row, ends = x[0].swapaxes(0, 1), np.array([0, 4])
    for call in (
        lambda: cufa.attention(x, x, x, attention_chunk=chunk),
        lambda: cufa.attention_varlen(row, row, row, ends, ends, attention_chunk=chunk),
        lambda: cufa.decode(x, x, x, attention_chunk=chunk),
    ):
        with pytest.raises(error, match=f"^{message}$"):
            call()


def test_a_chunk_longer_than_all_sequences_hides_nothing() -> None:
    x = np.ones((1, 1, 4, 8), np.float32)
    many: Any = np.int64(2**40)
    for chunk in (4, 2**40, many):
        assert np.array_equal(cufa.attention(x, x, x, attention_chunk=chunk), x)


def test_lengths_beyond_which_chunks_are_not_for() -> None:
    shape = (1, 1, 2**30 + 1, 64)
    problem = Problem.of_shapes(shape, shape, shape, attention_chunk=8192)
    with pytest.raises(ValueError, match=r"^attention_chunk: q has seq 1073741825, more than"):
        Planner(problem, device.named("h200"))(problem)
    cached = problem.in_cache._replace(seq_q=1)
    with pytest.raises(ValueError, match=r"^attention_chunk: 1073741825 keys a sequence, or"):
        plan_splits(cached, device.named("h200"))


def test_fa1_has_no_chunks() -> None:
    shape = (1, 1, 64, 64)
    problem = Problem.of_shapes(shape, shape, shape, dtype="float32", attention_chunk=8)
    with pytest.raises(ValueError, match=r"^attention_chunk: fa1_fp32 has no such scores"):
        Planner(problem, device.named("h200"), "fa1_fp32")(problem)
