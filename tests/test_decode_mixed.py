"""decode over caches of which little is in use: any lengths, pages, queries and groups together.

Memory that is not in use is NaN, and no page; on a GPU, so is the memory around the arrays.
"""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from reference import DTYPES, Expected, random_inputs, to_host

import cufa
from cufa import device

LENGTHS = (0, 1, 3, 97, 339, 1024, 20000, 131072)
PAGE_SIZES = (0, 1, 7, 16, 64, 100, 128, 256)
GROUPS = (1, 3, 4, 7, 8, 64, 71)

#: Keys and values of a sequence, (heads, tokens, head_dim).
Tokens = tuple[np.ndarray, np.ndarray]


def drawn(
    rng: np.random.Generator, dtype: str, lengths: Any, *, hk: int, d: int, dv: int
) -> list[Tokens]:
    """Draw keys and values of sequences."""
    return [
        tuple(
            rng.standard_normal((hk, n, dim), np.float32).astype(DTYPES[dtype]) for dim in (d, dv)
        )  # type: ignore[misc]
        for n in lengths
    ]


def stored(
    xp: ModuleType, rng: np.random.Generator, sequences: list[Tokens], capacity: int, page_size: int
) -> dict[str, Any]:
    """Put sequences into caches of NaN: shuffled pages, or contiguous if `page_size` is 0."""
    lengths = [k.shape[1] for k, _ in sequences]
    made: dict[str, Any] = {"lengths": xp.asarray(np.array(lengths, np.int32))}
    used = [-(-n // page_size) if page_size else 0 for n in lengths]
    width = -(-capacity // page_size) if page_size else 0
    order = rng.permutation(sum(used) + 3)
    table = np.full((len(sequences), width), 2**31 - 1, np.int32)
    for i, (n, end) in enumerate(zip(used, np.cumsum(used), strict=True)):
        table[i, :n] = order[end - n : end]
    if page_size:
        made["block_table"] = xp.asarray(table)
    blocks, keys = (len(order), page_size) if page_size else (len(sequences), capacity)
    for name, each in (("k_cache", 0), ("v_cache", 1)):
        heads, _, dim = sequences[0][each].shape
        cache = np.full((blocks, heads, keys, dim), np.nan, sequences[0][each].dtype)
        for i, n in enumerate(lengths):
            rows = sequences[i][each]
            if page_size:
                page, slot = np.divmod(np.arange(n), page_size)
                cache[table[i, page], :, slot] = rows.swapaxes(0, 1)
            else:
                cache[i, :, :n] = rows
        made[name] = xp.asarray(cache)
    return made


def decoded(
    xp: ModuleType, q: np.ndarray, caches: dict[str, Any], dv: int, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Decode into memory of NaN."""
    out = xp.asarray(np.full((*q.shape[:3], dv), np.nan, q.dtype))
    _, lse = cufa.decode(xp.asarray(q), **caches, out=out, return_lse=True, **options)
    return to_host(out), to_host(lse)


class Long(NamedTuple):
    """Sequences of all lengths, and what queries of theirs are to give."""

    q: np.ndarray
    sequences: list[Tokens]
    expected: list[Expected]


@functools.lru_cache(maxsize=1)
def long(dtype: str, d: int, dv: int) -> Long:
    rng = np.random.default_rng(7)
    sequences = drawn(rng, dtype, LENGTHS, hk=1, d=d, dv=dv)
    q = rng.standard_normal((len(LENGTHS), 4, 3, d), np.float32).astype(DTYPES[dtype])
    expected = [
        Expected(q[i : i + 1], k[None], v[None], causal=True) for i, (k, v) in enumerate(sequences)
    ]
    return Long(q, sequences, expected)


@pytest.mark.parametrize(
    ("module", "dtype", "page_size"),
    [
        *(("numpy", *each) for each in zip(itertools.cycle(DTYPES), PAGE_SIZES)),
        *(
            pytest.param("cupy", *each, marks=pytest.mark.gpu)
            for each in itertools.product(DTYPES, PAGE_SIZES)
        ),
    ],
)
def test_all_lengths_together(
    rng: np.random.Generator, module: str, dtype: str, page_size: int
) -> None:
    xp = pytest.importorskip(module)
    d, dv = (16, 8) if xp is np else (64, 32)
    q, sequences, expected = long(dtype, d, dv)
    caches = stored(xp, rng, sequences, LENGTHS[-1], page_size)
    out, lse = decoded(xp, q, caches, dv)
    for i, each in enumerate(expected):
        one = slice(i, i + 1)
        each.assert_accepts(out[one], lse[one], f"length {LENGTHS[i]}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_all_numbers_of_queries(
    xp: ModuleType, rng: np.random.Generator, group: int, dtype: str
) -> None:
    """Shorter sequences too, each in another cache."""
    lengths = (0, 1, 3, 97, 130)
    d, dv = (16, 16) if xp is np else (64, 64)
    sequences = drawn(rng, dtype, lengths, hk=1, d=d, dv=dv)
    results = []
    for sq in range(1, 18):
        q = rng.standard_normal((len(lengths), group, sq, d), np.float32).astype(DTYPES[dtype])
        page_size = PAGE_SIZES[sq % len(PAGE_SIZES)]
        out, lse = decoded(xp, q, stored(xp, rng, sequences, 140, page_size), dv)
        for i, (k, v) in enumerate(sequences):
            one = slice(i, i + 1)
            expected = Expected(q[one], k[None], v[None], causal=True)
            what = f"{sq} queries, pages of {page_size}, length {lengths[i]}"
            results.append((i, expected, out[one], lse[one], what))
    bounds = [max(each[1].bound for each in results if each[0] == i) for i in range(len(lengths))]
    for i, expected, each_out, each_lse, what in results:
        expected.assert_accepts(each_out, each_lse, what, bounds[i])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [0, 16, 7])
def test_is_the_row_of_attention(
    xp: ModuleType, rng: np.random.Generator, page_size: int, dtype: str
) -> None:
    d = 16 if xp is np else 128
    q, k, v = random_inputs(rng, dtype, hq=4, hk=2, sq=300, d=d)
    whole = to_host(cufa.attention(*map(xp.asarray, (q, k, v)), causal=True)).astype(np.float32)
    eps = {"float16": 2**-9, "bfloat16": 2**-6, "float32": 4e-6}[dtype]
    for n, sq in ((1, 1), (7, 1), (7, 5), (300, 1), (300, 17)):
        caches = stored(xp, rng, [(k[0, :, :n], v[0, :, :n])], 300, page_size)
        rows = slice(n - sq, n)
        out, _ = decoded(xp, q[:, :, rows], caches, d)
        np.testing.assert_allclose(out.astype(np.float32), whole[:, :, rows], eps, eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sq", "page_size"), [(1, 0), (1, 16), (3, 0), (3, 7), (17, 64)])
def test_fixed_splits_give_the_same_bits_in_any_batch(
    xp: ModuleType, rng: np.random.Generator, sq: int, page_size: int, dtype: str
) -> None:
    """Alone, in another order, and in a cache of another capacity."""
    lengths = (0, 1, 900, 2000, 33, 1999, 97)
    d = 16 if xp is np else 64
    sequences = drawn(rng, dtype, lengths, hk=2, d=d, dv=d)
    q = rng.standard_normal((len(lengths), 6, sq, d), np.float32).astype(DTYPES[dtype])

    def bits(chosen: Any, capacity: int, splits: int) -> list[bytes]:
        caches = stored(xp, rng, [sequences[i] for i in chosen], capacity, page_size)
        out, lse = decoded(xp, q[list(chosen)], caches, d, num_splits=splits)
        return [out[i].tobytes() + lse[i].tobytes() for i in range(len(chosen))]

    for splits in (1, 3, 16):
        together = bits(range(len(lengths)), 2000, splits)
        backwards = bits(range(len(lengths))[::-1], 2345, splits)
        assert backwards[::-1] == together
        for i, n in enumerate(lengths):
            assert bits([i], max(n, 1), splits) == [together[i]], f"length {n}, {splits} splits"


# --- on a GPU ---


def amid_nan(cupy: Any, array: np.ndarray) -> Any:
    """Return the array on the GPU, with 64 KiB of NaN before and behind it."""
    guard = (1 << 16) // array.itemsize
    memory = np.full(array.size + 2 * guard, np.nan, array.dtype)
    memory[guard : guard + array.size] = array.ravel()
    return cupy.asarray(memory)[guard : guard + array.size].reshape(array.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [0, 1, 7, 16, 64])
def test_gpu_reads_nothing_outside_whatever_lengths_and_tables_say(
    cupy: Any, rng: np.random.Generator, page_size: int, dtype: str
) -> None:
    """Results mean nothing, but are numbers: all that is read lies in the caches."""
    far = [-1, -(2**31), 2**31 - 1, 2**30, 10**6]
    b, capacity, d = 6, 448, 64
    lengths = np.array([*far, 100], np.int32)
    q = rng.standard_normal((b, 6, 3, d), np.float32).astype(DTYPES[dtype])
    options: dict[str, Any] = {"lengths": cupy.asarray(lengths)}
    blocks, keys = b, capacity
    if page_size:
        width = capacity // page_size
        table = rng.integers(-(2**31), 2**31, (b, width)).astype(np.int32)
        table[:, ::2] = rng.choice([-1, 0, 9, 10, 11], table[:, ::2].shape)
        options["block_table"] = cupy.asarray(table)
        blocks, keys = 10, page_size
    k, v = (
        amid_nan(cupy, rng.standard_normal((blocks, 2, keys, d), np.float32).astype(q.dtype))
        for _ in range(2)
    )
    for causal in (False, True):
        for splits in (None, 5):
            out, lse = cufa.decode(
                amid_nan(cupy, q),
                *(k, v),
                causal=causal,
                num_splits=splits,
                return_lse=True,
                **options,
            )
            assert np.isfinite(to_host(out).astype(np.float32)).all()
            assert not to_host(out)[:2].any()  # negative lengths are none
            assert np.isfinite(to_host(lse)[2:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("page_size", [0, 16, 64, 100])
def test_gpu_a_block_for_each_short_sequence(
    cupy: Any, rng: np.random.Generator, page_size: int, dtype: str
) -> None:
    """Two or four at a time on a multiprocessor, and once more where others have ended."""
    hk, d, multiprocessors = 8, 128, cupy.cuda.Device().attributes["MultiProcessorCount"]
    for b in (4 * multiprocessors // hk, 12 * multiprocessors // hk + 1):
        lengths = [0, 512, 1, *rng.integers(1, 513, b - 3).tolist()]
        sequences = drawn(rng, dtype, lengths, hk=hk, d=d, dv=d)
        q = rng.standard_normal((b, 4 * hk, 1, d), np.float32).astype(DTYPES[dtype])
        out, lse = decoded(cupy, q, stored(cupy, rng, sequences, 512, page_size), d)
        for i in (0, 1, 2, *rng.integers(3, b, 9)):
            one, (k, v) = slice(i, i + 1), sequences[i]
            expected = Expected(q[one], k[None], v[None], causal=True)
            expected.assert_accepts(out[one], lse[one], f"sequence {i} of {lengths[i]}")


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    ("of_each", "keys", "dim"),
    [
        *((1.94, 700, 128), (3.9, 300, 128), (15.5, 100, 128)),
        *((1.94, 900, 64), (2.95, 500, 64), (3.5, 300, 64), (18, 90, 64), (9, 80, 64)),
        *((2.9, 600, 96), (0.3, 900, 32), (2, 900, 32), (1.9, 300, 256)),
    ],
)
def test_units_for_each_multiprocessor(
    cupy: Any, rng: np.random.Generator, of_each: float, keys: int, dim: int, page_size: int
) -> None:
    """As many sequences as have blocks of other sizes planned; of any lengths, and twice."""
    batch, dtype = round(of_each * device.current().sm_count / 8), "bfloat16"
    lengths = rng.integers(0, keys + 1, batch)
    lengths[: batch // 3] = keys
    lengths[batch // 2 :: 7] = 0
    sequences = drawn(rng, dtype, lengths, hk=8, d=dim, dv=dim)
    q = rng.standard_normal((batch, 24, 1, dim), np.float32).astype(DTYPES[dtype])
    caches = stored(cupy, rng, sequences, keys, page_size)
    out, lse = decoded(cupy, q, caches, dim)
    again, _ = decoded(cupy, q, caches, dim)
    assert again.tobytes() == out.tobytes()
    for i in {0, batch // 2, batch - 1, *rng.integers(0, batch, 20).tolist()}:
        one, (k, v) = slice(i, i + 1), sequences[i]
        expected = Expected(q[one], k[None], v[None], causal=True)
        expected.assert_accepts(out[one], lse[one], f"length {lengths[i]}")
