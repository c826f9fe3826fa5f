"""KVCache and PagedKVCache: what they hold, after any steps, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from eight_bits import exact, held_numbers
from reference import DTYPES, to_host

import cufa
from cufa import CacheFullError, KVCache, PagedKVCache
from cufa.caches.store import Store
from cufa.cpu import append as cpu_append

H, D, DV = 2, 8, 5


def pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


def drawn(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def held(cache: Any, sequence: int, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a sequence, (heads, tokens, head_dim), of a cache of layout bhsd."""
    n = int(cache.host_lengths[sequence])
    found = []
    for array in map(to_host, cache.layer(layer)):
        if cache.block_table is None:
            found.append(array[sequence, :, :n])
        else:
            page, slot = np.divmod(np.arange(n), array.shape[2])
            table = to_host(cache.block_table)
            found.append(array[table[sequence, page], :, slot].swapaxes(0, 1))
    return found[0], found[1]


@pytest.fixture(params=["contiguous", "paged"])
def empty(request: pytest.FixtureRequest) -> Any:
    """Make an empty cache of three sequences of up to 20 tokens."""

    def make(**options: Any) -> Any:
        options = {"head_dim_v": DV, "dtype": "float32", **options}
        if request.param == "contiguous":
            return KVCache(3, H, 20, D, **options)
        cache = PagedKVCache(18, 4, 3, H, D, pages_per_sequence=5, **options)
        for _ in range(3):
            cache.allocate()
        return cache

    return make


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_come_after_those_before(rng: np.random.Generator, empty: Any, dtype: str) -> None:
    cache = empty(dtype=dtype)
    k, v = drawn(rng, 3, H, 20, D, dtype=dtype), drawn(rng, 3, H, 20, DV, dtype=dtype)
    begin = 0
    for n in (3, 1, 0, 9, 7):
        cache.append(k[:, :, begin : begin + n], v[:, :, begin : begin + n])
        begin += n
        np.testing.assert_array_equal(cache.host_lengths, [begin] * 3)
        for i in range(3):
            np.testing.assert_array_equal(held(cache, i)[0], k[i, :, :begin])
            np.testing.assert_array_equal(held(cache, i)[1], v[i, :, :begin])


def test_unequally_many_new_tokens_are_the_last(rng: np.random.Generator, empty: Any) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 6, D), drawn(rng, 3, H, 6, DV)
    cache.append(k, v, counts=[6, 0, 2])
    cache.append(k[:, :, :3], v[:, :, :3], counts=np.array([1, 3, 0]))
    np.testing.assert_array_equal(cache.host_lengths, [7, 3, 2])
    np.testing.assert_array_equal(held(cache, 0)[0], np.append(k[0], k[0, :, 2:3], axis=1))
    np.testing.assert_array_equal(held(cache, 1)[0], k[1, :, :3])
    np.testing.assert_array_equal(held(cache, 2)[1], v[2, :, 4:])


def test_decode_is_attention_over_what_is_held(rng: np.random.Generator, empty: Any) -> None:
    rotary = cufa.Rotary.of_theta(100.0, 4, 20)
    cache = empty(rotary=rotary)
    k, v, q = drawn(rng, 3, H, 5, D), drawn(rng, 3, H, 5, DV), drawn(rng, 3, 2 * H, 5, D)
    cache.append(k, v, counts=[5, 0, 2])
    turned = cache.append(k, v, q=q, counts=5)
    out, lse = cache.decode(turned, return_lse=True)
    assert lse.shape == (3, 2 * H, 5)
    for i in range(3):
        keys, values = held(cache, i)
        expected = cufa.attention(turned[i : i + 1], keys[None], values[None], causal=True)
        np.testing.assert_allclose(out[i : i + 1], expected, atol=1e-6)


def test_layers_share_lengths(rng: np.random.Generator, empty: Any) -> None:
    cache = empty(layers=3)
    k, v = drawn(rng, 3, 3, H, 4, D), drawn(rng, 3, 3, H, 4, DV)
    with pytest.raises(ValueError, match="append is for a cache of one layer"):
        cache.append(k[0], v[0])
    cache.extend(4)
    for layer in (2, 0, 1):
        cache.write(k[layer], v[layer], layer=layer)
    np.testing.assert_array_equal(cache.host_lengths, [4, 4, 4])
    for layer in range(3):
        for i in range(3):
            np.testing.assert_array_equal(held(cache, i, layer)[0], k[layer, i])
            np.testing.assert_array_equal(held(cache, i, layer)[1], v[layer, i])


def test_a_layer_is_written_once_for_an_extend(rng: np.random.Generator, empty: Any) -> None:
    """Else the newest tokens would be replaced, as where a step forgets `extend`."""
    cache = empty(layers=2)
    k, v = drawn(rng, 3, H, 4, D), drawn(rng, 3, H, 4, DV)
    other = -k, -v
    with pytest.raises(ValueError, match="no token is new to layer 1: call extend before write"):
        cache.write(*other, layer=1)
    cache.extend([4, 0, 2])
    for layer in range(2):
        cache.write(k, v, layer=layer)
    for rows, number in ((slice(3), 0), (slice(1), 0), (slice(2, 3), 2)):
        with pytest.raises(ValueError, match=f"layer 1 has the newest .* sequence {number}, which"):
            cache[rows].write(*(x[rows] for x in other), layer=1)
    cache[1:2].write(*(x[1:2] for x in other))
    assert cache.host_lengths[1] == 0
    np.testing.assert_array_equal(held(cache, 0, 1)[0], k[0])
    np.testing.assert_array_equal(held(cache, 2, 1)[1], v[2, :, 2:])
    cache.truncate([3, 0, 2])
    with pytest.raises(ValueError, match="to replace them, truncate the sequences"):
        cache.write(*other)
    cache.truncate([0, 0, 2])
    cache.extend([4, 0, 0])
    cache.write(*other)
    np.testing.assert_array_equal(held(cache, 0)[0], -k[0])
    np.testing.assert_array_equal(held(cache, 2)[0], k[2, :, 2:])
    for nothing in (lambda: cache.extend(0), lambda: cache.truncate(0)):
        nothing()
        with pytest.raises(ValueError, match="no token is new to layer 0: call extend before"):
            cache.write(*other)
        cache.write(k[:, :, :0], v[:, :, :0])
        cache[3:].write(k[3:], v[3:])


def test_views_of_which_some_have_nothing_new(rng: np.random.Generator, empty: Any) -> None:
    cache = empty(layers=2)
    k, v = drawn(rng, 3, H, 4, D), drawn(rng, 3, H, 4, DV)
    cache.extend([4, 0, 4])
    cache[2:].truncate(0)
    for layer in range(2):
        for i in range(3):
            cache[i : i + 1].write(k[i : i + 1], v[i : i + 1], layer=layer)
        np.testing.assert_array_equal(held(cache, 0, layer)[0], k[0])
    cache.extend(0)
    for i in range(3):
        with pytest.raises(ValueError, match="no token is new to layer 0: call extend before"):
            cache[i : i + 1].write(k[i : i + 1], v[i : i + 1])


def test_views_are_written_one_by_one(rng: np.random.Generator, empty: Any) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 4, D), drawn(rng, 3, H, 4, DV)
    cache.extend(4)
    cache[1:].write(k[1:], v[1:])
    with pytest.raises(ValueError, match="layer 0 has the newest tokens of sequence 1"):
        cache.write(k, v)
    cache[:1].write(k[:1], v[:1])
    for i in range(3):
        np.testing.assert_array_equal(held(cache, i)[0], k[i])


def test_a_write_that_fails_may_come_again(
    rng: np.random.Generator, empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 4, D), drawn(rng, 3, H, 4, DV)
    cache.extend(4)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cpu_append, "append", fail)
        with pytest.raises(MemoryError):
            cache.write(k, v)
    cache.write(k, v)
    np.testing.assert_array_equal(held(cache, 1)[0], k[1])


def test_queries_are_given_by_name(rng: np.random.Generator, empty: Any) -> None:
    """With as many heads, q, k and v in the usual order would be taken for k, v and q."""
    cache = empty(head_dim_v=D)
    q, k, v = (drawn(rng, 3, H, 1, D) for _ in range(3))
    with pytest.raises(TypeError, match="positional arguments"):
        cache.append(q, k, v)
    cache.extend(1)
    with pytest.raises(TypeError, match="positional arguments"):
        cache.write(q, k, v)


def test_layout_bshd(rng: np.random.Generator, empty: Any) -> None:
    rotary = cufa.Rotary.of_theta(100.0, 8, 20)
    caches = [empty(rotary=rotary, layout=layout) for layout in ("bhsd", "bshd")]
    k, v, q = drawn(rng, 3, H, 5, D), drawn(rng, 3, H, 5, DV), drawn(rng, 3, 2 * H, 5, D)
    turned = caches[0].append(k, v, q=q)
    there = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v, q)]
    swapped = caches[1].append(*there[:2], q=there[2])
    np.testing.assert_array_equal(swapped.swapaxes(1, 2), turned)
    out = caches[1].decode(swapped)
    np.testing.assert_array_equal(out.swapaxes(1, 2), caches[0].decode(turned))


def test_views_are_of_some_sequences(rng: np.random.Generator, empty: Any) -> None:
    cache = empty()
    k, v = drawn(rng, 2, H, 3, D), drawn(rng, 2, H, 3, DV)
    cache[1:].append(k, v)
    cache[1:][1:].append(k[1:], v[1:])
    np.testing.assert_array_equal(cache.host_lengths, [0, 3, 6])
    np.testing.assert_array_equal(held(cache, 1)[0], k[0])
    np.testing.assert_array_equal(held(cache, 2)[0], np.append(k[1], k[1], axis=1))
    cache[2:].truncate(4)
    np.testing.assert_array_equal(cache.host_lengths, [0, 3, 4])
    q = drawn(rng, 3, H, 1, D)
    np.testing.assert_array_equal(cache[1:].decode(q[1:]), cache.decode(q)[1:])
    assert len(cache[5:]) == 0
    with pytest.raises(TypeError, match="cut by a slice"):
        cache[1]
    with pytest.raises(ValueError, match="step 1, not 2"):
        cache[::2]


def test_memory_stays_where_it_is(rng: np.random.Generator, empty: Any) -> None:
    """A captured graph has the addresses."""
    cache = empty()

    def addresses() -> list[int]:
        arrays = [*cache.layer(), cache.lengths, cache.block_table]
        return [x.ctypes.data for x in arrays if x is not None]

    before = addresses()
    k, v = drawn(rng, 3, H, 7, D), drawn(rng, 3, H, 7, DV)
    cache.append(k, v)
    cache.truncate(2)
    cache.append(k, v)
    assert addresses() == before


def test_rows_are_padded_with_zeros(empty: Any) -> None:
    """So that kernels read rows of odd head dims as they are."""
    for array in empty(dtype="float16").layer():
        assert all(step % 16 == 0 for step in array.strides[:3])


def test_truncate_then_append(rng: np.random.Generator, empty: Any) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 9, D), drawn(rng, 3, H, 9, DV)
    cache.append(k, v)
    cache.truncate([5, 9, 0])
    cache.append(k[:, :, :2], v[:, :, :2])
    np.testing.assert_array_equal(cache.host_lengths, [7, 11, 2])
    np.testing.assert_array_equal(held(cache, 0)[0], np.append(k[0, :, :5], k[0, :, :2], axis=1))
    np.testing.assert_array_equal(held(cache, 2)[0], k[2, :, :2])


def test_truncate_keeps_what_is_to_be_written(rng: np.random.Generator, empty: Any) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 3, D), drawn(rng, 3, H, 3, DV)
    cache.extend(3)
    cache.truncate([3, 2, 3])
    cache.write(k, v)
    np.testing.assert_array_equal(held(cache, 0)[0], k[0])


def test_an_append_that_fails_has_changed_nothing(
    rng: np.random.Generator, empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 9, D), drawn(rng, 3, H, 9, DV)
    cache.append(k, v)
    before = [held(cache, i) for i in range(3)]

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cpu_append, "append", fail)
        with pytest.raises(MemoryError):
            cache.append(k, v)
    np.testing.assert_array_equal(cache.host_lengths, [9, 9, 9])
    for i in range(3):
        np.testing.assert_array_equal(held(cache, i)[0], before[i][0])
    cache.append(k, v)
    np.testing.assert_array_equal(held(cache, 1)[0], np.append(k[1], k[1], axis=1))


def test_tokens_that_a_layer_misses_are_not_used(rng: np.random.Generator, empty: Any) -> None:
    """They would be zeros: a step has forgotten `write`, or called `extend` twice."""
    cache = empty(layers=2)
    k, v = drawn(rng, 3, H, 5, D), drawn(rng, 3, H, 5, DV)
    cache.extend([3, 0, 3])
    cache.write(k, v, layer=1)
    misses = "layer 0 holds 0 of the 3 tokens of sequence 2: write those that extend has made room"
    for use in (
        lambda: cache[1:].decode(k),
        lambda: cache.reorder([2, 1, 2]),
        lambda: cache.fork(2) if cache.block_table is None else cache.reorder([0, 2, 1]),
    ):
        with pytest.raises(ValueError, match=misses):
            use()
    assert cache.host_lengths.tolist() == [3, 0, 3]
    cache.extend(2)
    with pytest.raises(ValueError, match="layer 0 holds 0 tokens of sequence 0, which had 3 be"):
        cache.write(k, v)
    cache.write(k, v, layer=1)
    assert cache.decode(k, layer=1).shape == v.shape
    cache.truncate(0)
    cache.extend(5)
    for layer in range(2):
        cache.write(k, v, layer=layer)
        np.testing.assert_array_equal(held(cache, 2, layer)[0], k[2])
    cache = empty()
    cache.extend(2)
    with pytest.raises(ValueError, match="layer 0 holds 0 of the 2 tokens of sequence 0"):
        cache.append(k, v)
    assert cache.host_lengths.tolist() == [2, 2, 2]


def test_there_is_nothing_to_attend_to(rng: np.random.Generator, empty: Any) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 5, D), drawn(rng, 3, H, 5, DV)
    with pytest.raises(ValueError, match="no sequence has a token to attend to: append tokens"):
        cache.decode(k)
    with pytest.raises(ValueError, match="q has shape"):
        cache.decode(k[0])
    with pytest.raises(ValueError, match="no sequence has a token"):
        cache[:1].decode(k[:1])
    cache.append(k, v, counts=[0, 5, 0])
    assert not cache.decode(k)[::2].any()
    out, lse = cache[:1].decode(k[:1], return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert cache[1:1].decode(k[1:1]).shape == (0, H, 5, DV)


def test_integers_of_few_bits() -> None:
    """The largest number that they hold, to which 1 cannot be added."""
    cache = PagedKVCache(130, 4, 130, H, D, dtype="float32")
    for _ in range(128):
        cache.allocate()
    k = np.ones((130, H, 3, D), np.float32)
    cache.append(k, k)
    assert cache.fork(np.int8(127)) == 128  # type: ignore[arg-type]
    cache.free(np.int8(127))  # type: ignore[arg-type]
    assert cache.host_lengths.tolist() == [3] * 127 + [0, 3, 0]
    assert cache.allocate() == 127


def test_a_view_says_what_is_of_the_whole(empty: Any) -> None:
    cache = empty()
    is_paged = isinstance(cache, PagedKVCache)
    for name in ("fork", "allocate", "free", "free_pages"):
        for view, numbers in ((cache[1:], "sequences 1 to 2"), (cache[1:1], "no sequences")):
            message = rf"{name} is of the whole .*\({numbers}\)"
            if name != "fork" and not is_paged:
                message = f"'Cache' object has no attribute '{name}'"
            with pytest.raises(AttributeError, match=message):
                getattr(view, name)
        if not hasattr(type(cache), name):
            with pytest.raises(AttributeError, match=f"'KVCache' object has no attribute '{name}'"):
                getattr(cache, name)
    with pytest.raises(AttributeError, match="'Cache' object has no attribute 'lenght'"):
        cache[1:].lenght  # noqa: B018


def test_views_of_the_cache_are_not_taken(rng: np.random.Generator, empty: Any) -> None:
    """They would change while they are read."""
    cache = empty(head_dim_v=D)
    k = drawn(rng, 3, H, 3, D)
    cache.append(k, k)
    keys, values = (x[:3, :, :3] for x in cache.layer())
    for name, arrays in (
        ("k", {"k": keys, "v": k}),
        ("v", {"k": k, "v": values}),
        ("q", {"k": k, "v": k, "q": values[..., ::-1]}),
    ):
        with pytest.raises(ValueError, match=f"{name} .* shares memory with the cache"):
            cache.append(**arrays)
    np.testing.assert_array_equal(cache.host_lengths, [3, 3, 3])
    cache.append(keys.copy(), values.copy())
    np.testing.assert_array_equal(held(cache, 1)[0], np.append(k[1], k[1], axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_shares_nothing(
    rng: np.random.Generator, empty: Any, copied: Callable[[Any], Any], dtype: str
) -> None:
    rotary = cufa.Rotary.of_theta(100.0, 4, 20)
    cache = empty(rotary=rotary, dtype=dtype, layers=1)
    k, v = drawn(rng, 3, H, 9, D, dtype=dtype), drawn(rng, 3, H, 9, DV, dtype=dtype)
    q = drawn(rng, 3, H, 9, D, dtype=dtype)
    cache.append(k, v, counts=[9, 4, 0])
    other = copied(cache)
    assert type(other) is type(cache)
    assert repr(other) == repr(cache)
    before = [tuple(x.copy() for x in held(cache, i)) for i in range(3)]
    expected = cache.decode(q)
    np.testing.assert_array_equal(other.decode(q), expected)
    other.append(-k, -v, counts=[1, 9, 3])
    other[:1].truncate(0)
    other[:1].append(-k[:1], -v[:1])
    np.testing.assert_array_equal(cache.host_lengths, [9, 4, 0])
    for i in range(3):
        for a, b in zip(held(cache, i), before[i], strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(cache.decode(q), expected)
    for each in (cache, other):
        each.truncate(0)
        each.append(k, v)
    for i in range(3):
        for a, b in zip(held(cache, i), held(other, i), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_pickle_of_a_version_that_counted_no_tokens(
    rng: np.random.Generator, empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = empty(layers=2)
    k, v = drawn(rng, 3, H, 9, D), drawn(rng, 3, H, 9, DV)
    cache.extend([9, 4, 0])
    for layer in range(2):
        cache.write(k, v, layer=layer)
    state = cache._store.__getstate__()
    del state["written"], state["is_captured"]
    monkeypatch.setattr(type(cache._store), "__getstate__", lambda store: state)
    other = pickled(cache)
    np.testing.assert_array_equal(other.decode(k, layer=1), cache.decode(k, layer=1))
    other.extend(1)
    with pytest.raises(ValueError, match="layer 1 holds 9 of the 10 tokens of sequence 0"):
        other.decode(k, layer=1)


def test_views_are_copied_with_what_they_are_views_of(rng: np.random.Generator, empty: Any) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 9, D), drawn(rng, 3, H, 9, DV)
    cache.append(k, v)
    whole, part = copy.deepcopy((cache, cache[1:]))
    part.truncate(4)
    np.testing.assert_array_equal(whole.host_lengths, [9, 4, 4])
    np.testing.assert_array_equal(cache.host_lengths, [9, 9, 9])


def test_a_cache_says_what_it_is(rng: np.random.Generator, empty: Any) -> None:
    cache = empty(layers=2)
    cache.extend([3, 0, 11])
    is_paged = isinstance(cache, PagedKVCache)
    sizes = "4 of 18 pages of 4 tokens in use" if is_paged else "capacity 20"
    text = (
        f"{type(cache).__name__} of 3 sequences, {sizes}, heads_kv 2, head_dim 8 and 5, layers 2, "
        f"float32, bhsd, numpy, {'0.0184' if is_paged else '0.0154'} MB"
    )
    assert repr(cache) == f"{text}: lengths 3, 0, 11"
    assert repr(cache[1:]) == f"sequences 1 to 2 of {text}: lengths 0, 11"
    assert repr(cache[3:]) == f"no sequences of {text}: lengths none"
    many = PagedKVCache(5, 4, 100, H, D, dtype="float32")
    many.allocate()
    assert repr(many).endswith("lengths 0, -, -, -, -, -, -, -, ..., -, -, -, -, -, -, -, -")


def test_reset(rng: np.random.Generator, empty: Any) -> None:
    cache = empty()
    k, v = drawn(rng, 3, H, 9, D), drawn(rng, 3, H, 9, DV)
    cache.append(k, v)
    is_paged = isinstance(cache, PagedKVCache)
    cache[1:].reset()
    np.testing.assert_array_equal(cache.host_lengths, [9, 0, 0])
    if is_paged:
        assert cache.free_pages == 15
        assert (cache.allocate(), cache.allocate()) == (1, 2)
    cache.append(k, v)
    np.testing.assert_array_equal(held(cache, 0)[0], np.append(k[0], k[0], axis=1))
    np.testing.assert_array_equal(held(cache, 2)[0], k[2])
    cache.reset()
    np.testing.assert_array_equal(cache.host_lengths, [0, 0, 0])
    message = "none of the sequences" if is_paged else "no token is new"
    with pytest.raises(ValueError, match=message):
        cache.write(k, v)
    if is_paged:
        assert cache.free_pages == 18


def test_reorder(rng: np.random.Generator, empty: Any) -> None:
    """As beam search asks for: some go on twice, others not at all."""
    cache = empty(layers=2)
    k, v = drawn(rng, 2, 3, H, 9, D), drawn(rng, 2, 3, H, 9, DV)
    cache.extend([9, 6, 2])
    for layer in range(2):
        cache.write(k[layer], v[layer], layer=layer)
    before = copy.deepcopy(cache)
    tokens = [[held(before, i, layer) for i in range(3)] for layer in range(2)]
    n = cache.host_lengths.tolist()
    rows = [0, 1, 2]

    def reorder(part: slice, moved: list[int]) -> None:
        cache[part].reorder(moved)
        rows[part] = [rows[part][row] for row in moved]
        assert cache.host_lengths.tolist() == [n[row] for row in rows]
        for layer in range(2):
            for i, row in enumerate(rows):
                for a, b in zip(held(cache, i, layer), tokens[layer][row], strict=True):
                    np.testing.assert_array_equal(a, b)

    reorder(slice(3), [0, 1, 2])
    reorder(slice(3), [2, 0, 1])
    reorder(slice(1, 3), [1, 0])
    reorder(slice(3), [1, 1, 0])
    with pytest.raises(ValueError, match="no token is new to layer 0"):
        cache.write(k[0], v[0])
    if isinstance(cache, PagedKVCache):
        used = len({page for i in range(3) for page in pages_of(cache, i)})
        assert cache.free_pages == 18 - used
    cache.extend([1, 2, 1])  # each has its own from here on
    for layer in range(2):
        cache.write(k[layer], v[layer], layer=layer)
    for i, row in enumerate(rows):
        new = k[1, i, :, -2:] if i == 1 else k[1, i, :, -1:]
        grown = np.append(tokens[1][row][0], new, axis=1)
        np.testing.assert_array_equal(held(cache, i, 1)[0], grown)
    cache.truncate(0)
    cache.reorder([1, 2, 0])
    np.testing.assert_array_equal(cache.host_lengths, [0, 0, 0])
    for bad, error, message in (
        ([0, 1], ValueError, r"rows has shape \(2,\), but there are 3 sequences"),
        (1, ValueError, r"rows has shape \(\)"),
        ([0, 1, 3], ValueError, r"rows\[2\] is 3: it must be 0 to 2"),
        ([0, -1, 2], ValueError, r"rows\[1\] is -1"),
        ([0, 1, 2.0], TypeError, "rows must be integers, not float64"),
        ([True, False, True], TypeError, "rows must be integers, not bool"),
        ("012", TypeError, "rows must be integers"),
    ):
        with pytest.raises(error, match=message):
            cache.reorder(bad)


def pages_of(cache: Any, sequence: int) -> list[int]:
    n = -(-int(cache.host_lengths[sequence]) // 4)
    pages: list[int] = cache.block_table[sequence, :n].tolist()
    return pages


def test_refused_and_unchanged(rng: np.random.Generator, empty: Any) -> None:
    cache = empty(rotary=cufa.Rotary.of_theta(100.0, 8, 20))
    k, v, q = drawn(rng, 3, H, 9, D), drawn(rng, 3, H, 9, DV), drawn(rng, 3, 2 * H, 9, D)
    cache.append(k, v)
    before = [held(cache, i) for i in range(3)]
    f16 = k.astype(np.float16)
    for error, message, refused in (
        (ValueError, "counts must not be more than", lambda: cache.extend(2**64 - 1)),
        (ValueError, "lengths must not be more than", lambda: cache.truncate(2**63 - 1)),
        (TypeError, "k must be a NumPy", lambda: cache.append(k.tolist(), v)),
        (TypeError, "k has dtype float16", lambda: cache.append(f16, v)),
        (TypeError, "q has dtype float16", lambda: cache.append(k, v, q=f16)),
        (ValueError, "k has shape .* 4 axes", lambda: cache.append(k[0], v)),
        (ValueError, r"k has shape .* \(3, 2, 9, 8\)", lambda: cache.append(k[:2], v[:2])),
        (ValueError, "v has shape", lambda: cache.append(k, v[:, :, 1:])),
        (ValueError, "v has shape", lambda: cache.append(k, k)),
        (ValueError, "q has shape", lambda: cache.append(k, v, q=q[..., 1:])),
        (
            ValueError,
            "heads 3 is no multiple of the cache's 2",
            lambda: cache.append(k, v, q=q[:, :3]),
        ),
        (ValueError, "counts: 10 of 9 tokens", lambda: cache.append(k, v, counts=10)),
        (ValueError, "counts must not be negative", lambda: cache.extend(-1)),
        (ValueError, r"counts has shape \(2,\)", lambda: cache.extend([1, 2])),
        (TypeError, "counts must be integers", lambda: cache.extend(1.0)),
        (TypeError, "counts must be an integer or as many", lambda: cache.extend([1, [2], 3])),
        (TypeError, "counts is a masked array", lambda: cache.extend(np.ma.ones(3, int))),
        (TypeError, r"decode\(\) got .* 'layout'", lambda: cache.decode(q, layout="bhsd")),
        (CacheFullError, "sequence 1 would have 21 tokens", lambda: cache.extend([1, 12, 1])),
        (ValueError, "10 tokens of sequence 2 .* which has 9", lambda: cache.truncate([1, 9, 10])),
        (ValueError, "layer must be 0 to 0, not 1", lambda: cache.write(k, v, layer=1)),
        (TypeError, "layer must be an integer", lambda: cache.write(k, v, layer=0.0)),
        (
            ValueError,
            "k has shape .* 9 tokens are new",
            lambda: cache.write(k[:, :, 1:], v[:, :, 1:]),
        ),
    ):
        with pytest.raises(error, match=message):
            refused()  # type: ignore[no-untyped-call]
        np.testing.assert_array_equal(cache.host_lengths, [9, 9, 9])
        for i in range(3):
            for a, b in zip(held(cache, i), before[i], strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "capacity must be 1 to"),
        ({"capacity": 2**31 - 1}, ValueError, "capacity must be 1 to 2146435072"),
        ({"heads_kv": 2.0}, TypeError, "heads_kv must be an integer"),
        ({"sequences": True}, TypeError, "sequences must be an integer"),
        ({"head_dim": 257}, ValueError, "head_dim must be 1 to 256"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v must be 1 to 256"),
        ({"layers": 0}, ValueError, "layers must be 1 to"),
        ({"dtype": "int16"}, TypeError, "dtype must be one of .*, float32, fp8, int8, as"),
        ({"dtype": "nonsense"}, TypeError, "dtype must be one of"),
        ({"dtype": ">f4"}, TypeError, "dtype must be one of"),
        ({"dtype": "("}, TypeError, r"dtype must be one of .*, not '\('"),
        ({"dtype": None}, TypeError, "dtype must be one of .*, not None"),
        ({"dtype": np.zeros((3, 4), np.float32)}, TypeError, "dtype must be .*, not ndarray"),
        ({"layout": "sbhd"}, ValueError, "layout must be"),
        ({"xp": "cupy"}, TypeError, "xp must be the module numpy or cupy"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"sequences": 2, "heads_kv": 2, "capacity": 9, "head_dim": 8, "dtype": "float32"}
    with pytest.raises(error, match=message):
        KVCache(**{**arguments, **change})


def test_sizes_of_few_bits_do_not_wrap_around() -> None:
    n: Any = np.int8(100)
    many: Any = np.uint8(200)
    cache = KVCache(n, 3, many, many, dtype="float16", layers=2)
    assert (len(cache[50:]), cache.layer()[0].shape) == (50, (100, 3, 200, 200))
    paged = PagedKVCache(n, n, 2, 3, 5, dtype="float32")
    paged.allocate()
    paged.extend(np.array([101, 0], np.uint8))
    paged.extend(np.uint8(200))
    assert paged.layer()[0].shape == (100, 3, 100, 5)
    assert (paged.free_pages, *paged.host_lengths) == (96, 301, 0)


def test_a_table_of_more_keys_than_decode_takes() -> None:
    with pytest.raises(ValueError, match=r"per_sequence \* page_size must be 1 to 2146435072"):
        PagedKVCache(1, 2**19, 1, 1, 8, pages_per_sequence=4095, dtype="float16")


# --- pages ---


def test_sequences_come_and_go(rng: np.random.Generator) -> None:
    cache = PagedKVCache(6, 4, 2, H, D, head_dim_v=DV, dtype="float32")
    k, v = drawn(rng, 2, H, 9, D), drawn(rng, 2, H, 9, DV)
    with pytest.raises(ValueError, match=r"sequence 0 has not been allocated: allocate\(\)"):
        cache.append(k, v, counts=[9, 9])
    assert (cache.allocate(), cache.allocate()) == (0, 1)
    with pytest.raises(CacheFullError, match="all 2 sequences are in use"):
        cache.allocate()
    cache.append(k, v)
    assert cache.free_pages == 0
    cache.free(0)
    assert cache.free_pages == 3
    np.testing.assert_array_equal(cache.host_lengths, [0, 9])
    for bad, message in (
        (0, "sequence 0 has not been allocated"),
        (2, "sequence must be 0 to 1, not 2"),
        (-1, "sequence must be 0 to 1, not -1"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.free(bad)
        with pytest.raises(ValueError, match=message):
            cache.fork(bad)
    with pytest.raises(TypeError, match="sequence must be an integer"):
        cache.free(True)
    out = cache.decode(drawn(rng, 2, H, 1, D))
    assert not out[0].any()
    assert out[1].any()


def test_no_sequence_has_been_allocated(rng: np.random.Generator) -> None:
    """Tokens for no sequence are not dropped without a word."""
    cache = PagedKVCache(6, 4, 3, H, D, head_dim_v=DV, dtype="float32")
    k, v, q = drawn(rng, 3, H, 2, D), drawn(rng, 3, H, 2, DV), drawn(rng, 3, H, 1, D)
    message = r"none of the sequences 0 to 2 has been allocated: call allocate\(\) first"
    for refused in (
        lambda: cache.append(k, v),
        lambda: cache.extend(2),
        lambda: cache.write(k, v),
        lambda: cache.decode(q),
    ):
        with pytest.raises(ValueError, match=message):
            refused()  # type: ignore[no-untyped-call]
    cache.extend([0, 0, 0])  # as the caller has said
    cache.append(k, v, counts=[0, 0, 0])
    cache.append(k[:, :, :0], v[:, :, :0])
    cache.allocate()
    cache.append(k, v)
    cache.decode(q)
    with pytest.raises(ValueError, match="sequence 2 has not been allocated"):
        cache[2:].append(k[2:], v[2:])
    with pytest.raises(ValueError, match="none of the sequences 1 to 2 has been allocated"):
        cache[1:].decode(q[1:])
    assert cache[3:].decode(q[3:]).shape == (0, H, 1, DV)
    cache.free(0)
    with pytest.raises(ValueError, match=message):
        cache.decode(q)
    assert (cache.free_pages, *cache.host_lengths) == (6, 0, 0, 0)


def test_reorder_leaves_those_alone_that_nobody_has(rng: np.random.Generator) -> None:
    cache = PagedKVCache(6, 4, 3, H, D, head_dim_v=DV, dtype="float32")
    cache.allocate(), cache.allocate()
    k, v = drawn(rng, 3, H, 6, D), drawn(rng, 3, H, 6, DV)
    cache.append(k, v)
    cache.reorder([1, 1, 2])
    assert cache.free_pages == 4
    np.testing.assert_array_equal(held(cache, 0)[0], k[1])
    for rows, row in (([2, 1, 2], 0), ([0, 1, 0], 2)):
        with pytest.raises(ValueError, match=rf"rows\[{row}\] is .* 2 has not been allocated"):
            cache.reorder(rows)
    assert (cache.free_pages, *cache.host_lengths) == (4, 6, 6, 0)


def test_a_fork_of_a_contiguous_cache_is_a_copy(rng: np.random.Generator) -> None:
    cache = KVCache(3, H, 20, D, head_dim_v=DV, dtype="bfloat16", layers=2)
    k, v = drawn(rng, 3, H, 6, D, dtype="bfloat16"), drawn(rng, 3, H, 6, DV, dtype="bfloat16")
    cache.extend([0, 6, 0])
    for layer in range(2):
        cache.write(k, v, layer=layer)
    assert (cache.fork(1), cache.fork(1)) == (0, 2)
    np.testing.assert_array_equal(cache.host_lengths, [6, 6, 6])
    with pytest.raises(CacheFullError, match="all 3 sequences have tokens: truncate one to 0"):
        cache.fork(1)
    for layer in range(2):
        for i in range(3):
            np.testing.assert_array_equal(held(cache, i, layer)[0], k[1])
            np.testing.assert_array_equal(held(cache, i, layer)[1], v[1])
    for bad, error in ((3, ValueError), (-1, ValueError), (True, TypeError), (0.0, TypeError)):
        with pytest.raises(error, match="sequence must be"):
            cache.fork(bad)  # type: ignore[arg-type]


def test_out_of_pages(rng: np.random.Generator) -> None:
    cache = PagedKVCache(5, 4, 3, H, D, head_dim_v=DV, dtype="float32", pages_per_sequence=4)
    for _ in range(2):
        cache.allocate()
    k, v = drawn(rng, 3, H, 9, D), drawn(rng, 3, H, 9, DV)
    with pytest.raises(CacheFullError, match="out of pages: 6 more are needed, but 5 of 5"):
        cache.append(k, v)
    assert (cache.free_pages, *cache.host_lengths) == (5, 0, 0, 0)
    cache.append(k, v, counts=[9, 6, 0])
    with pytest.raises(CacheFullError, match="out of pages: 1 more are needed, but 0 of 5"):
        cache.append(k[:, :, :3], v[:, :, :3])
    cache.free(1)
    with pytest.raises(CacheFullError, match=r"sequence 0 would have 18 tokens, .* room for 16"):
        cache.append(k, v)
    np.testing.assert_array_equal(held(cache, 0)[0], k[0])


def test_a_shared_page_is_copied_by_all_that_write_but_one(rng: np.random.Generator) -> None:
    cache = PagedKVCache(6, 4, 3, H, D, head_dim_v=DV, dtype="float32", layers=2)
    k, v = drawn(rng, 2, 3, H, 6, D), drawn(rng, 2, 3, H, 6, DV)
    cache.allocate()
    cache.extend(6)
    for layer in range(2):
        cache.write(k[layer], v[layer], layer=layer)
    cache.fork(0)
    cache.fork(1)
    assert cache.free_pages == 4
    cache.extend(1)
    assert cache.free_pages == 2
    for layer in range(2):
        cache.write(k[layer, :, :, :1], v[layer, :, :, :1], layer=layer)
    for i in range(3):
        for layer in range(2):
            keys = np.append(k[layer, 0], k[layer, i, :, :1], axis=1)
            np.testing.assert_array_equal(held(cache, i, layer)[0], keys)
    cache.extend(1)
    assert cache.free_pages == 2


def test_a_fork_is_of_tokens_that_are_written(rng: np.random.Generator) -> None:
    cache = PagedKVCache(6, 4, 2, H, D, head_dim_v=DV, dtype="float32")
    k, v = drawn(rng, 2, H, 6, D), drawn(rng, 2, H, 6, DV)
    cache.allocate()
    cache.extend(6)
    with pytest.raises(ValueError, match="layer 0 holds 0 of the 6 tokens of sequence 0"):
        cache.fork(0)
    cache.write(k, v)
    cache.fork(0)
    for i in range(2):
        np.testing.assert_array_equal(held(cache, i)[0], k[0])
        np.testing.assert_array_equal(held(cache, i)[1], v[0])
    cache.append(k, v)
    assert cache.free_pages == 1
    for i in range(2):
        np.testing.assert_array_equal(held(cache, i)[0], np.append(k[0], k[i], axis=1))


@pytest.mark.parametrize("fails", ["copy_pages", "send", "append"])
def test_what_fails_under_way_has_changed_no_page(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A page that is shared, and would be copied, too."""
    cache = PagedKVCache(6, 4, 3, H, D, head_dim_v=DV, dtype="float32")
    k, v = drawn(rng, 3, H, 6, D), drawn(rng, 3, H, 6, DV)
    cache.allocate()
    cache.append(k, v)
    cache.fork(0)
    table = cache.block_table.copy()
    failed: list[bool] = []

    def fail(*_: Any) -> None:
        if not failed:
            failed.append(True)
            raise MemoryError

    owner = cpu_append if fails == "append" else Store
    with monkeypatch.context() as patch:
        patch.setattr(owner, fails, fail)
        with pytest.raises(MemoryError):
            cache.append(k, v)
    assert (cache.free_pages, *cache.host_lengths) == (4, 6, 6, 0)
    np.testing.assert_array_equal(cache.block_table[:, :2], table[:, :2])
    cache.append(k, v)
    assert cache.free_pages == 1
    for i in range(2):
        np.testing.assert_array_equal(held(cache, i)[0], np.append(k[0], k[i], axis=1))


@pytest.mark.parametrize("step", ["fork", "free", "truncate", "reset", "reorder"])
def test_what_cannot_be_sent_has_changed_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    cache = PagedKVCache(6, 4, 3, H, D, head_dim_v=DV, dtype="float32")
    k, v = drawn(rng, 3, H, 6, D), drawn(rng, 3, H, 6, DV)
    cache.allocate()
    cache.append(k, v)
    if step == "reorder":
        cache.allocate()
    steps = {
        "fork": lambda: cache.fork(0),
        "free": lambda: cache.free(0),
        "truncate": lambda: cache.truncate(1),
        "reset": lambda: cache.reset(),
        "reorder": lambda: cache.reorder([1, 0, 2]),
    }

    def fail(_: Store) -> None:
        patch.undo()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Store, "send", fail)
        with pytest.raises(MemoryError):
            steps[step]()
    assert (cache.free_pages, *cache.host_lengths) == (4, 6, 0, 0)
    np.testing.assert_array_equal(held(cache, 0)[0], k[0])
    new = cache.fork(0)
    cache.free(0)
    np.testing.assert_array_equal(held(cache, new)[0], k[0])
    cache.free(new)
    assert cache.free_pages == 6


@pytest.mark.parametrize("rows", [[2, 0, 1], [0, 0, 0]])
def test_a_reorder_that_cannot_be_sent_has_copied_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, rows: list[int]
) -> None:
    """Rows of a cache without pages are copied when their lengths are on their way."""
    cache = KVCache(3, H, 20, D, head_dim_v=DV, dtype="float32", layers=2)
    k, v = drawn(rng, 3, H, 6, D), drawn(rng, 3, H, 6, DV)
    cache.extend([6, 4, 2])
    for layer in range(2):
        cache.write(k, v, layer=layer)
    before = copy.deepcopy(cache)

    def fail(_: Store) -> None:
        patch.undo()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Store, "send", fail)
        with pytest.raises(MemoryError):
            cache.reorder(rows)
    for layer in range(2):
        for i in range(3):
            for got, expected in zip(held(cache, i, layer), held(before, i, layer), strict=True):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("page_size", "dtype"), [*((n, "float32") for n in (1, 4, 16)), (16, "fp8")]
)
def test_any_steps_are_those_of_a_plain_model(xp: ModuleType, page_size: int, dtype: str) -> None:
    """Allocate, free, fork, append, truncate and decode in any order, out of room now and then."""
    rng = np.random.default_rng(page_size)
    sequences, pages, width = 6, 72 // page_size, 40 // page_size
    sizes: dict[str, Any] = {"head_dim_v": DV, "dtype": dtype, "pages_per_sequence": width}
    cache = PagedKVCache(pages, page_size, sequences, H, D, xp=xp, **sizes)
    model: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    happened: dict[str, int] = defaultdict(int)
    nothing = np.empty((H, 0, D), np.float32), np.empty((H, 0, DV), np.float32)
    # On a GPU, q of caches of 8 bits has 16.
    of_q, atol, rounding = "float32", 1e-5, 0.0
    if dtype == "fp8" and xp is not np:  # weights and results are rounded to float16
        of_q, atol, rounding = "float16", 2e-3, 2.0**-10

    def table() -> np.ndarray:
        return to_host(cache.block_table)

    def users() -> dict[int, set[int]]:
        found: dict[int, set[int]] = defaultdict(set)
        for i, (k, _) in model.items():
            for page in table()[i, : -(-k.shape[1] // page_size)].tolist():
                found[page].add(i)
        return found

    def has_room(counts: np.ndarray) -> bool:
        found, writers, needed = users(), defaultdict(set), 0
        for i, (k, _) in model.items():
            n, count = k.shape[1], int(counts[i])
            if n + count > width * page_size:
                return False
            needed += -(-(n + count) // page_size) + n // -page_size
            if count and n % page_size:
                writers[int(table()[i, n // page_size])].add(i)
        for page, writing in writers.items():
            needed += len(writing) - (found[page] == writing)
        return needed <= pages - len(found)

    for number in range(10_000 // 3 + 1):
        step = rng.choice(
            ["append"] * 7 + ["decode", "allocate", "fork", "free", "truncate", "reorder"]
        )
        live = sorted(model)
        some = int(rng.choice(live)) if live else None
        if step == "allocate" or (step == "fork" and some is not None):
            if len(live) == sequences:
                with pytest.raises(CacheFullError):
                    cache.fork(some) if step == "fork" else cache.allocate()  # type: ignore[arg-type]
                step = "no sequence"
            elif step == "fork":
                assert some is not None
                model[cache.fork(some)] = model[some]
            else:
                model[cache.allocate()] = nothing
        elif some is None:
            continue
        elif step == "free":
            if rng.random() < 0.4:
                cache.free(some)
                del model[some]
        elif step == "reorder":
            moved = np.arange(sequences)
            moved[live] = rng.choice(live, len(live))
            cache.reorder(moved)
            model = {i: model[int(moved[i])] for i in live}
        elif step == "truncate":
            kept = cache.host_lengths
            kept[some] = rng.integers(0, kept[some] + 1)
            cache.truncate(kept)
            model[some] = tuple(x[:, : kept[some]] for x in model[some])  # type: ignore[assignment]
        elif step == "append":
            n = int(rng.choice([1, 1, 2, 5, 11]))
            rows = slice(*sorted(rng.choice(sequences + 1, 2, replace=False).tolist()))
            writing = [i for i in live if rows.start <= i < rows.stop]
            counts = np.zeros(sequences, int)
            counts[writing] = rng.integers(0, n + 1, len(writing))
            k, v = (exact(rng, dtype, sequences, H, n, dim) for dim in (D, DV))
            part, given = cache[rows], (xp.asarray(k[rows]), xp.asarray(v[rows]))
            if has_room(counts):
                part.append(*given, counts=counts[rows])
                for i in live:
                    new = slice(n - counts[i], n)
                    model[i] = (
                        np.append(model[i][0], k[i, :, new], axis=1),
                        np.append(model[i][1], v[i, :, new], axis=1),
                    )
            else:
                before = table().copy(), cache.free_pages
                with pytest.raises(CacheFullError):
                    part.append(*given, counts=counts[rows])
                np.testing.assert_array_equal(table(), before[0])
                assert cache.free_pages == before[1]
                step = "no room"
        elif not cache.host_lengths.any():
            with pytest.raises(ValueError, match=r"no sequence has a token|none of the sequences"):
                cache.decode(xp.asarray(drawn(rng, sequences, H, 2, D).astype(of_q)))
        else:
            q = drawn(rng, sequences, H, 2, D).astype(of_q)
            out = to_host(cache.decode(xp.asarray(q)))
            for i, (k, v) in model.items():
                its = q[i : i + 1].astype(np.float32), k[None]
                expected = cufa.attention(*its, v[None], causal=True)
                summed = cufa.attention(*its, np.abs(v[None]), causal=True)
                error = np.abs(out[i : i + 1].astype(np.float32) - expected)
                assert np.all(error <= atol + 1e-7 * np.abs(expected) + rounding * summed)
        happened[step] += 1
        lengths = [model[i][0].shape[1] if i in model else 0 for i in range(sequences)]
        assert cache.host_lengths.tolist() == lengths
        if xp is not np and number % 8:  # copies to the host take their time
            continue
        assert to_host(cache.lengths).tolist() == lengths
        assert cache.free_pages == pages - len(users())
        for i in model if number % 8 == 0 else [i for i in model if i == some]:
            for a, b in zip(held_numbers(cache, i), model[i], strict=True):
                assert np.array_equal(a, b)
    assert min(happened.values()) > 20, happened
    assert len(happened) == 9, happened


# --- on a GPU ---


def both(cupy: ModuleType, paged: bool, **options: Any) -> list[Any]:
    """Make the same cache on the host and on the device."""
    caches = []
    for xp in (np, cupy):
        rotary = cufa.Rotary.of_theta(100.0, options["dim"], 400, xp=xp)
        chosen = {"dtype": options["dtype"], "rotary": rotary, "layers": 2, "xp": xp}
        chosen["layout"] = options.get("layout", "bhsd")
        if paged:
            cache: Any = PagedKVCache(90, 16, 4, H, options["d"], pages_per_sequence=25, **chosen)
            for _ in range(3):
                cache.allocate()
        else:
            cache = KVCache(4, H, 400, options["d"], **chosen)
        caches.append(cache)
    return caches


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "dim"), [(64, 64), (128, 32), (40, 22), (59, 6)])
def test_gpu_holds_what_the_cpu_holds(
    cupy: ModuleType, rng: np.random.Generator, d: int, dim: int, dtype: str, paged: bool
) -> None:
    caches = both(cupy, paged, dtype=dtype, d=d, dim=dim)
    for step, n in enumerate((37, 1, 1, 5, 64, 1)):
        counts = np.minimum(n, [n, 1, 3, 0])
        arrays = [drawn(rng, 4, h, n, d, dtype=dtype) for h in (H, H, 2 * H)]
        turned = []
        for cache, xp in zip(caches, (np, cupy), strict=True):
            if paged and step == 3:
                cache.fork(0)
                cache.free(1)
            if paged and step >= 3:
                counts[1] = 0
            cache.extend(counts)
            for layer in range(2):
                given = [xp.asarray(array) for array in arrays]
                new = cache.write(*given[:2], q=given[2], layer=layer)
            turned.append(to_host(new).astype(np.float32))
        eps = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}[dtype]
        np.testing.assert_allclose(turned[1], turned[0], eps, eps)
        np.testing.assert_array_equal(to_host(caches[1].lengths), caches[0].host_lengths)
        for i in range(4):
            for layer in range(2):
                for a, b in zip(*(held(cache, i, layer) for cache in caches), strict=True):
                    np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), eps, eps)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gpu_moves_and_copies(
    cupy: ModuleType, rng: np.random.Generator, layout: str, dtype: str, paged: bool
) -> None:
    caches = both(cupy, paged, dtype=dtype, d=40, dim=22, layout=layout)
    arrays = [drawn(rng, 4, H, 37, 40, dtype=dtype) for _ in range(2)]
    if layout == "bshd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    for cache, xp in zip(caches, (np, cupy), strict=True):
        cache.extend([37, 20, 3, 0])
        for layer in range(2):
            cache.write(*map(xp.asarray, arrays), layer=layer)
        cache[:3].reorder([2, 0, 0])
        assert cache.fork(1) == 3
    there = caches[1]
    for i, copied in enumerate((copy.copy(there), copy.deepcopy(there), pickled(there))):
        copied.extend([i + 1, 0, 1, 0])
        copied.reorder([1, 1, 1, 1])
    eps = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}[dtype]
    np.testing.assert_array_equal(to_host(there.lengths), caches[0].host_lengths)
    for layer in range(2):
        for a, b in zip(*(cache.layer(layer) for cache in caches), strict=True):
            if paged:
                a, b = a[caches[0].block_table], to_host(b)[to_host(there.block_table)]
            a, b = a.astype(np.float32), to_host(b).astype(np.float32)
            np.testing.assert_allclose(b, a, eps, eps)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_gpu_replays_while_sequences_grow(
    cupy: ModuleType, rng: np.random.Generator, stream: Any, paged: bool
) -> None:
    host, there = both(cupy, paged, dtype="float16", d=64, dim=64)
    k, q = drawn(rng, 4, H, 1, 64, dtype="float16"), drawn(rng, 4, 8 * H, 1, 64, dtype="float16")
    given = [cupy.asarray(x) for x in (k, k, q)]

    def attend(cache: Any, k: Any, v: Any, q: Any) -> Any:
        return cache.decode(cache.write(k, v, q=q, layer=1), layer=1)

    for cache, arrays in ((host, (k, k, q)), (there, given)):
        cache.extend(1)
        attend(cache, *arrays)
    with pytest.raises(ValueError, match="layer 1 has the newest tokens of sequence 0"):
        attend(there, *given)
    stream.begin_capture()
    out = attend(there, *given)
    for name, refused in (
        ("extend", lambda: there.extend(1)),
        ("reorder", lambda: there.reorder([1, 0, 2, 3])),
        ("a copy of a cache", lambda: copy.copy(there)),
    ):
        with pytest.raises(RuntimeError, match=f"{name} cannot be captured"):
            refused()  # type: ignore[no-untyped-call]
    graph = stream.end_capture()
    for _ in range(40):
        for array, into in zip((k, q), (given[:2], given[2:]), strict=True):
            array[...] = drawn(rng, *array.shape, dtype="float16")
            for each in into:
                each.set(array, stream=stream)
        host.extend(1)
        there.extend(1)
        graph.launch(stream)
        expected = attend(host, k, k, q)
        np.testing.assert_allclose(to_host(out), expected, 2e-3, 2e-3)
