"""attention(..., batch_invariant=True): a sequence's bits do not depend on the batch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, random_inputs

import cufa
from cufa.planner.decode import DecodePlan

#: dtype, head dim, and how many random batches: 200 in all on a GPU.
CASES = [
    ("bfloat16", 128, 60),
    ("bfloat16", 64, 40),
    ("bfloat16", 256, 25),
    ("float16", 128, 25),
    ("float16", 96, 25),
    ("float32", 64, 25),
]


def random_sizes(rng: np.random.Generator, longest: int) -> dict[str, int]:
    """Return a problem: self-attention, a part of a prompt, or a few queries with many keys."""
    hk, group = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 2, 4, 7]))
    sk = int(np.exp(rng.uniform(0, np.log(longest))))
    sq = {0: sk, 1: int(rng.integers(1, 9)), 2: int(rng.integers(1, sk + 1))}[int(rng.integers(3))]
    most = max(2, min(48, (1 << 18) // (hk * sk)))
    return {"b": int(rng.integers(2, most + 1)), "hq": hk * group, "hk": hk, "sq": sq, "sk": sk}


def bits(x: Any) -> Any:
    """Return an array as integers: NaN is equal to itself, and 0 is not -0."""
    return x.view({2: np.int16, 4: np.int32}[x.dtype.itemsize])


def drawn(xp: Any, seed: int, dtype: str, d: int, sizes: dict[str, int]) -> list[Any]:
    """Return q, k and v, made where they are used."""
    there = xp.random.default_rng(seed)
    b, hq, hk, sq, sk = (sizes[name] for name in ("b", "hq", "hk", "sq", "sk"))
    shapes = (b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, d)
    return [
        there.standard_normal(shape, dtype=xp.float32).astype(DTYPES[dtype]) for shape in shapes
    ]


@pytest.mark.parametrize(("dtype", "d", "batches"), CASES)
def test_any_batch(
    xp: ModuleType, rng: np.random.Generator, dtype: str, d: int, batches: int
) -> None:
    on_cpu = xp is np
    for _ in range(4 if on_cpu else batches):
        sizes = random_sizes(rng, 40 if on_cpu else 9000)
        arrays = drawn(xp, int(rng.integers(1 << 30)), dtype, d, sizes)
        options: dict[str, Any] = {"causal": bool(rng.integers(2)), "return_lse": True}
        out, lse = cufa.attention(*arrays, batch_invariant=True, **options)
        first = int(rng.integers(sizes["b"]))
        for part in (slice(first, first + 1), slice(first), slice(first, None)):
            if part.stop == 0:
                continue
            of_part = [x[part] for x in arrays]
            found, of_found = cufa.attention(*of_part, batch_invariant=True, **options)
            assert (bits(found) == bits(out[part])).all(), (sizes, options, part)
            assert (bits(of_found) == bits(lse[part])).all(), (sizes, options, part)


def test_it_is_a_flag_of_its_own(xp: ModuleType, rng: np.random.Generator) -> None:
    """A call with it is not taken for one without, which has been made ready."""
    q, k, v = (xp.asarray(x) for x in random_inputs(rng, "float16", b=2, hq=4, hk=2, sq=3, d=64))
    for flag in (False, True, False):
        cufa.attention(q, k, v, batch_invariant=flag)
        functions: Any = cufa.attention, cufa.explain
        for function in functions:
            with pytest.raises(TypeError, match=r"^batch_invariant must be"):
                function(q, k, v, batch_invariant=int(flag))


@pytest.mark.gpu
def test_gpu_in_a_capture_it_is_no_other_kernel(
    cupy: ModuleType, rng: np.random.Generator, stream: Any
) -> None:
    q, k, v = random_inputs(rng, "float16", b=3, hq=8, hk=2, sq=1, sk=7777, d=64)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    plan = cufa.explain(*arrays, batch_invariant=True)
    assert isinstance(plan, DecodePlan)
    assert plan.splits > 1
    expected = cufa.attention(*arrays, batch_invariant=True)
    stream.begin_capture()
    found = cufa.attention(*arrays, batch_invariant=True)
    graph = stream.end_capture()
    found.fill(np.nan)
    graph.launch(stream)
    assert (bits(found) == bits(expected)).all()
