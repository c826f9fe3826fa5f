"""decode: every computation on NumPy arrays, and what is refused."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, Expected, assert_accepted, random_inputs, to_host

import cufa

LENGTHS = (0, 1, 3, 97, 339)


def poisoned(cache: np.ndarray, lengths: Any, firsts: Any = None) -> np.ndarray:
    """Copy of a contiguous cache with NaN beyond each length, and before each first key."""
    cache = cache.copy()
    for i, length in enumerate(lengths):
        cache[i, :, length:] = np.nan
        if firsts is not None:
            cache[i, :, : firsts[i]] = np.nan
    return cache


def in_pages(
    rng: np.random.Generator, cache: np.ndarray, lengths: Any, page_size: int, firsts: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Put (b, hk, capacity, d) into shuffled pages; what is not in use is NaN, and no page.

    In use are the keys of each sequence up to its length, from its first on.
    """
    cache = poisoned(cache, lengths, firsts)
    b, hk, capacity, d = cache.shape
    per_sequence = -(-capacity // page_size)
    pages = b * per_sequence + 3
    order = rng.permutation(pages)
    paged = np.full((pages, hk, page_size, d), np.nan, cache.dtype)
    table = np.full((b, per_sequence), -7, np.int32)
    for i, length in enumerate(lengths):
        for j in range(firsts[i] // page_size if firsts else 0, -(-length // page_size)):
            page = table[i, j] = order[i * per_sequence + j]
            part = cache[i, :, j * page_size : min(length, (j + 1) * page_size)]
            paged[page, :, : part.shape[1]] = part
    return paged, table


def assert_each_accepted(
    out: Any, lse: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: Any, **options: Any
) -> None:
    """Assert that each sequence has what attention over its own keys gives."""
    out, lse = to_host(out), to_host(lse)
    for i, n in enumerate(lengths):
        one = slice(i, i + 1)
        arrays = q[one], k[one, :, :n], v[one, :, :n]
        own = options_of_sequence(options, i)
        assert_accepted(out[one], lse[one], *arrays, **own, what=f"length {n}")


def options_of_sequence(options: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the options of a call that is one sequence's."""
    slopes = options.get("alibi_slopes")
    if slopes is None or slopes.ndim == 1:
        return options
    return options | {"alibi_slopes": slopes[i : i + 1]}


def firsts_of(lengths: Any, sq: int, options: dict[str, Any]) -> list[int]:
    """Return the first key of each sequence that a window, or a chunk, lets a query see."""
    left, chunk = options.get("window", (None, None))[0], options.get("attention_chunk")
    found = []
    for n in map(int, lengths):
        of_window = 0 if left is None else min(max(0, n - sq - left), n)
        of_chunk = 0 if chunk is None else max(0, n - sq) // chunk * chunk
        found.append(max(of_window, of_chunk))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sq", [1, 5, 17])
@pytest.mark.parametrize("group", [1, 3, 7, 71])
def test_lengths_that_differ(rng: np.random.Generator, group: int, sq: int, dtype: str) -> None:
    """Alone, with NaN in all that is not in use; lengths of less than sq among them."""
    b, hk = len(LENGTHS), 2
    q, k, v = random_inputs(rng, dtype, b=b, hq=group * hk, hk=hk, sq=sq, sk=350, d=40, dv=24)
    lengths = np.array(LENGTHS)
    caches = poisoned(k, lengths), poisoned(v, lengths)
    out = np.full((*q.shape[:3], 24), np.nan, q.dtype)
    result, lse = cufa.decode(q, *caches, lengths=lengths, out=out, return_lse=True)
    assert result is out
    assert_each_accepted(out, lse, q, k, v, LENGTHS, causal=True)
    paged_k, table = in_pages(rng, caches[0], lengths, 16)
    paged_v = np.full((*paged_k.shape[:3], 24), np.nan, q.dtype)
    for i, row in enumerate(table):
        for j, page in enumerate(row[row >= 0]):
            part = caches[1][i, :, 16 * j : 16 * j + 16]
            paged_v[page, :, : part.shape[1]] = part
    paged = cufa.decode(q, paged_k, paged_v, lengths=lengths, block_table=table)
    np.testing.assert_array_equal(paged, out)


@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 64, 100, 256, 1000])
def test_any_page_size(rng: np.random.Generator, page_size: int) -> None:
    q, k, v = random_inputs(rng, "float32", b=5, hq=4, hk=2, sq=3, sk=700, d=8)
    lengths = np.array([0, 1, 699, 512, 300])
    expected = cufa.decode(q, k, v, lengths=lengths, return_lse=True)
    seed = int(rng.integers(1 << 30))
    (paged_k, table), (paged_v, _) = (
        in_pages(np.random.default_rng(seed), cache, lengths, page_size) for cache in (k, v)
    )
    got = cufa.decode(q, paged_k, paged_v, lengths=lengths, block_table=table, return_lse=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_without_lengths_all_is_in_use(rng: np.random.Generator, causal: bool) -> None:
    q, k, v = random_inputs(rng, "float32", b=3, hq=6, hk=3, sq=4, sk=9, d=8)
    out = cufa.decode(q, k, v, causal=causal)
    np.testing.assert_array_equal(out, cufa.attention(q, k, v, causal=causal))
    pages = (3, 3, 3, 3, 8)
    k, v = (x.reshape(pages).swapaxes(1, 2).reshape(9, 3, 3, 8) for x in (k, v))
    table = np.arange(9, dtype=np.int64).reshape(3, 3)
    np.testing.assert_array_equal(cufa.decode(q, k, v, block_table=table, causal=causal), out)


def test_not_causal_sees_all_in_use(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=4, hq=2, sq=6, sk=9, d=8)
    lengths = np.array([0, 2, 6, 9])
    out, lse = cufa.decode(q, k, v, lengths=lengths, causal=False, scale=-0.3, return_lse=True)
    assert_each_accepted(out, lse, q, k, v, lengths, scale=-0.3)


def test_pages_may_be_shared_and_tables_pick_sequences(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=4, hq=2, sq=1, sk=9, d=8)
    chosen = np.array([[2], [0], [2], [1]])
    out = cufa.decode(q, k, v, block_table=chosen, lengths=np.array([9, 5, 3, 9]))
    picked = chosen[:, 0]
    same = cufa.decode(q, k[picked], v[picked], lengths=np.array([9, 5, 3, 9]))
    np.testing.assert_array_equal(out, same)


def test_layout_bshd(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float16", b=3, hq=6, hk=3, sq=4, sk=9, d=8, dv=5)
    lengths = np.array([9, 2, 0], np.int32)
    expected, expected_lse = cufa.decode(q, k, v, lengths=lengths, return_lse=True)
    turned = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    out = np.empty((3, 4, 6, 5), np.float16)
    options: dict[str, Any] = {"lengths": lengths, "layout": "bshd", "return_lse": True}
    _, lse = cufa.decode(*turned, out=out, **options)
    np.testing.assert_array_equal(out.swapaxes(1, 2), expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize(
    "shape", [(0, 2, 1, 8), (2, 0, 1, 8), (2, 2, 0, 8)], ids=["batch", "heads", "queries"]
)
def test_empty(shape: tuple[int, ...]) -> None:
    b, h, _, d = shape
    q, cache = np.zeros(shape, np.float32), np.zeros((b, h, 5, d), np.float32)
    out, lse = cufa.decode(q, cache, cache, lengths=np.zeros(b, np.int32), return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:3]


def test_a_cache_of_no_capacity_and_no_pages() -> None:
    q = np.ones((2, 2, 1, 8), np.float32)
    cache = np.ones((2, 2, 0, 8), np.float32)
    assert not cufa.decode(q, cache, cache).any()
    pages = np.ones((0, 2, 16, 8), np.float32)
    table = np.zeros((2, 4), np.int32)
    out = cufa.decode(q, pages, pages, block_table=table, lengths=np.zeros(2, np.int32))
    assert not out.any()


def test_same_bits_alone_and_in_a_batch(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=9, hq=8, hk=2, sq=2, sk=600, d=16)
    lengths = rng.integers(0, 601, 9)
    out, lse = cufa.decode(q, k, v, lengths=lengths, return_lse=True, num_splits=3)
    for i in range(9):
        one = slice(i, i + 1)
        alone = cufa.decode(q[one], k[one], v[one], lengths=lengths[one], return_lse=True)
        np.testing.assert_array_equal(alone[0], out[one])
        np.testing.assert_array_equal(alone[1], lse[one])


# --- what is refused ---

Q = np.zeros((2, 4, 1, 8), np.float32)
CACHE = np.zeros((2, 2, 10, 8), np.float32)
PAGES = np.zeros((5, 2, 4, 8), np.float32)
TABLE = np.array([[0, 1, 2], [3, 4, 0]])

BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("list", {"q": [[1.0]]}, TypeError, "q must be a NumPy or a CuPy array"),
    ("dtype", {"q": Q.astype(np.float64)}, TypeError, "q has dtype float64"),
    ("mixed", {"v_cache": CACHE.astype(np.float16)}, TypeError, "v_cache has dtype float16"),
    ("rank of q", {"q": Q[0]}, ValueError, "q has shape"),
    ("rank", {"k_cache": CACHE[0]}, ValueError, "k_cache has shape"),
    ("batch", {"q": Q[:1]}, ValueError, "k_cache has shape .* batch 2 and 1 differ"),
    ("capacity", {"v_cache": CACHE[:, :, 1:]}, ValueError, "v_cache .* capacity 9 and 10 differ"),
    ("head dim", {"q": Q[..., :4]}, ValueError, "k_cache .* head_dim 8 and 4 differ"),
    ("heads", {"q": Q[:, :3]}, ValueError, "q .* heads 3 is no multiple of heads 2"),
    ("large", {"v_cache": np.zeros((2, 2, 10, 257), np.float32)}, ValueError, "v_cache .* 257"),
    ("layout", {"layout": "sbhd"}, ValueError, "layout must be"),
    ("layout type", {"layout": 1}, TypeError, "layout must be"),
    ("causal", {"causal": 1}, TypeError, "causal must be"),
    ("scale", {"scale": "1"}, TypeError, "scale must be"),
    ("lse", {"return_lse": 1}, TypeError, "return_lse must be"),
    ("splits", {"num_splits": 0}, ValueError, "num_splits must be at least 1"),
    ("splits type", {"num_splits": 2.0}, TypeError, "num_splits must be an integer"),
    ("kernel", {"kernel": "decode"}, ValueError, "kernel must be None"),
    ("out shape", {"out": np.zeros((2, 4, 1, 7), np.float32)}, ValueError, "out has shape"),
    ("out dtype", {"out": np.zeros((2, 4, 1, 8))}, TypeError, "out has dtype float64"),
    ("out shared", {"out": Q}, ValueError, "out .* shares memory with q"),
    ("lengths list", {"lengths": [1, 2]}, TypeError, "lengths must be a NumPy or a CuPy array"),
    ("lengths dtype", {"lengths": np.ones(2)}, TypeError, "lengths has dtype float64"),
    ("lengths shape", {"lengths": np.ones(3, int)}, ValueError, r"lengths has shape \(3,\)"),
    ("negative", {"lengths": np.array([3, -1])}, ValueError, r"lengths\[1\] is -1"),
    ("too long", {"lengths": np.array([11, 1])}, ValueError, r"lengths\[0\] is 11: .* 0 to 10"),
    ("64 bits", {"lengths": np.array([1, 1 << 32])}, ValueError, r"lengths\[1\] is 4294967296"),
]
BAD_PAGED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("list", {"block_table": TABLE.tolist()}, TypeError, "block_table must be a NumPy"),
    ("dtype", {"block_table": TABLE * 1.0}, TypeError, "block_table has dtype float64"),
    ("rank", {"block_table": TABLE[0]}, ValueError, r"block_table has shape \(3,\)"),
    ("batch", {"block_table": TABLE[:1]}, ValueError, r"block_table has shape \(1, 3\)"),
    ("page", {"block_table": TABLE + 1}, ValueError, r"block_table\[1, 1\] is 5, .* 5 pages"),
    ("negative", {"block_table": TABLE - 1}, ValueError, r"block_table\[0, 0\] is -1"),
    ("64 bits", {"block_table": TABLE + (1 << 32)}, ValueError, r"table\[0, 0\] is 4294967296"),
    ("too long", {"lengths": np.array([1, 13])}, ValueError, r"lengths\[1\] is 13: .* 0 to 12"),
    ("pages", {"v_cache": PAGES[1:]}, ValueError, "v_cache .* pages 4 and 5 differ"),
    ("empty", {"k_cache": PAGES[:, :, :0], "v_cache": PAGES[:, :, :0]}, ValueError, "no key"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    lengths = np.array([3, 4])
    arguments = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "lengths": lengths, **change}
    with pytest.raises(error, match=message):
        cufa.decode(**arguments)


@pytest.mark.parametrize("unified_max", [float("nan"), -1e7, 10**400])
def test_a_bad_unified_maximum(unified_max: float) -> None:
    q, cache = Q.astype(np.float16), CACHE.astype(np.float16)
    with pytest.raises(ValueError, match=r"unified_max must be 1000000\.0 at most"):
        cufa.decode(q, cache, cache, unified_max=unified_max)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [case[1:] for case in BAD_PAGED],
    ids=[case[0] for case in BAD_PAGED],
)
def test_bad_pages(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"q": Q, "k_cache": PAGES, "v_cache": PAGES, "block_table": TABLE, **change}
    with pytest.raises(error, match=message):
        cufa.decode(**arguments)


def test_entries_that_are_not_in_use_may_be_anything() -> None:
    table = np.array([[0, 99, -1], [3, 4, 2**63 - 1]])
    for dtype in (np.int64, np.uint64, np.int32, np.uint8):
        lengths = np.array([4, 5], dtype)
        cufa.decode(Q, PAGES, PAGES, block_table=table.astype(dtype), lengths=lengths)
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 99"):
        cufa.decode(Q, PAGES, PAGES, block_table=table, lengths=np.array([5, 5]))


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 96, 128])
def test_gpu_whole_units_of_many_rows(cupy: ModuleType, rng: np.random.Generator, d: int) -> None:
    """As many sequences as there are multiprocessors; and if one is much longer than others."""
    sm_count = cupy.cuda.Device().attributes["MultiProcessorCount"]
    q, k, v = random_inputs(rng, "bfloat16", b=sm_count, hq=4, hk=1, sq=16, sk=600, d=d)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    for lengths in ([600] * sm_count, [600] + [37] * (sm_count - 1)):
        out = cufa.decode(*arrays, lengths=cupy.asarray(np.array(lengths, np.int32)))
        for i in (0, 1, sm_count - 1):
            one, n = slice(i, i + 1), lengths[i]
            expected = Expected(q[one], k[one, :, :n], v[one, :, :n], causal=True)
            expected.assert_accepts(out[one], None)


@pytest.mark.gpu
@pytest.mark.parametrize("dv", [1, 37, 38, 128, 129])
@pytest.mark.parametrize("sq", [1, 5, 9])
def test_gpu_writes_nothing_beside_rows_of_any_width(
    cupy: ModuleType, rng: np.random.Generator, sq: int, dv: int
) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=3, hq=8, hk=2, sq=sq, sk=700, d=64, dv=dv)
    lengths = np.array([700, 0, 33], np.int32)
    options: dict[str, Any] = {"lengths": cupy.asarray(lengths), "return_lse": True}
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    for before, behind in ((1, 1), (0, 44 - dv % 44), (4, 4)):
        out = cupy.asarray(np.full((*q.shape[:3], before + dv + behind), 7, q.dtype))
        _, lse = cufa.decode(*arrays, out=out[..., before : before + dv], **options)
        found = out.get()
        assert_each_accepted(
            found[..., before : before + dv], lse.get(), q, k, v, lengths, causal=True
        )
        assert (found[..., :before] == 7).all()
        assert (found[..., before + dv :] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("sq", "d"), [(1, 256), (9, 96), (17, 128)])
def test_gpu_units_in_few_pieces(
    cupy: ModuleType, rng: np.random.Generator, sq: int, d: int
) -> None:
    """Merged in ways of their own."""
    q, k, v = random_inputs(rng, "bfloat16", b=3, hq=8, hk=2, sq=sq, sk=1500, d=d)
    lengths = np.array([1500, 0, 70], np.int32)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    for splits in (2, 3, 4, 5):
        for _ in range(2):
            out, lse = cufa.decode(
                *arrays, lengths=cupy.asarray(lengths), num_splits=splits, return_lse=True
            )
            assert_each_accepted(out.get(), lse.get(), q, k, v, lengths, causal=True)


@pytest.mark.gpu
def test_gpu_replays_while_lengths_grow(
    cupy: ModuleType, rng: np.random.Generator, stream: Any
) -> None:
    q, k, v = random_inputs(rng, "float16", b=2, hq=8, hk=2, sq=1, sk=3000, d=64)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    lengths = cupy.asarray(np.array([1, 5], np.int32))
    cufa.decode(*arrays, lengths=lengths)
    stream.begin_capture()
    out = cufa.decode(*arrays, lengths=lengths)
    graph = stream.end_capture()
    for now in ((1, 5), (70, 0), (3000, 1025)):
        lengths.set(np.array(now, np.int32))
        graph.launch(stream)
        for i, n in enumerate(now):
            one = slice(i, i + 1)
            Expected(q[one], k[one, :, :n], v[one, :, :n]).assert_accepts(out[one], None)
