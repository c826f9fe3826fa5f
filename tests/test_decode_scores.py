"""decode with windows, softcap, ALiBi slopes and sinks: on the CPU and on a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from played_gpu import Array, Gpu, on_gpu
from reference import DTYPES, Expected, random_inputs, same_without_lse, to_host
from score_arrays import DECODE_FEATURES, options_of
from test_decode import (
    CACHE,
    PAGES,
    Q,
    assert_each_accepted,
    firsts_of,
    in_pages,
    options_of_sequence,
    poisoned,
)

import cufa
from cufa.api.options import Layout

LENGTHS = (0, 1, 3, 97, 339)
features = pytest.mark.parametrize("name", DECODE_FEATURES)


class Case:
    """Caches in which nothing but the keys that some query may see is a number.

    Parameters
    ----------
    rng : numpy.random.Generator
    name : str
        A name in `DECODE_FEATURES`.
    page_size : int
        0 for contiguous caches.
    lengths : sequence of int
    dtype : str
    **sizes
        As in `random_inputs`.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        name: str,
        page_size: int = 0,
        lengths: Any = LENGTHS,
        dtype: str = "bfloat16",
        **sizes: int,
    ) -> None:
        shape = {"hq": 6, "hk": 2, "sq": 2, "sk": max(lengths), "d": 24, **sizes}
        self.host = q, k, v = random_inputs(rng, dtype, b=len(lengths), **shape)
        self.lengths = np.array(lengths, np.int32)
        of_arrays = len(lengths), shape["hq"], shape["hk"], shape["sq"], shape["sk"]
        options = options_of(rng, name, of_arrays, DECODE_FEATURES)
        self.options: dict[str, Any] = {"causal": True, **options}
        firsts = firsts_of(lengths, shape["sq"], options)
        self.call: dict[str, Any] = {"q": q, "lengths": self.lengths, **self.options}
        if page_size:
            seed = int(rng.integers(1 << 30))
            (k, table), (v, _) = (
                in_pages(np.random.default_rng(seed), x, lengths, page_size, firsts) for x in (k, v)
            )
            self.call |= {"k_cache": k, "v_cache": v, "block_table": table}
        else:
            self.call |= {
                f"{n}_cache": poisoned(x, lengths, firsts) for n, x in (("k", k), ("v", v))
            }

    def assert_accepts(self, out: Any, lse: Any) -> None:
        """Assert it of each sequence: of few numbers, the largest error is a matter of chance."""
        q, k, v = self.host
        expected = []
        for i, n in enumerate(self.lengths):
            one, own = slice(i, i + 1), options_of_sequence(self.options, i)
            expected.append(Expected(q[one], k[one, :, :n], v[one, :, :n], **own))
        bound = max(each.bound for each in expected)
        for i, each in enumerate(expected):
            what = f"length {self.lengths[i]}"
            its_lse = None if lse is None else lse[i : i + 1]
            each.assert_accepts(out[i : i + 1], its_lse, what, bound)

    def there(self, xp: Any) -> dict[str, Any]:
        """Return the call's arguments as arrays of a module."""
        return {n: xp.asarray(x) if hasattr(x, "dtype") else x for n, x in self.call.items()}

    def checked(self, xp: Any, **options: Any) -> Any:
        """Make the call on arrays of a module, and return the result that is accepted."""
        out, lse = cufa.decode(**self.there(xp), return_lse=True, **options)
        self.assert_accepts(out, lse)
        if not same_without_lse(self.host[0].dtype.name, self.options):
            self.assert_accepts(cufa.decode(**self.there(xp), **options), None)
        return out


@features
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_cpu(rng: np.random.Generator, dtype: str, name: str) -> None:
    """The table may say anything of pages in front of a window."""
    for page_size in (0, 7, 16):
        for hq, sq in ((6, 1), (6, 5), (6, 17)):
            Case(rng, name, page_size, dtype=dtype, hq=hq, sq=sq).checked(np)


@pytest.mark.gpu
@features
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_gpu(cupy: Any, rng: np.random.Generator, dtype: str, name: str) -> None:
    lengths = (0, 1, 3, 97, 339, 5001)
    for page_size in (0, 1, 48, 64):
        for hq, hk, sq, d in ((8, 2, 1, 128), (28, 4, 3, 64), (16, 2, 4, 96), (8, 2, 16, 128)):
            sizes: dict[str, Any] = {"hq": hq, "hk": hk, "sq": sq, "d": d, "dtype": dtype}
            case = Case(rng, name, page_size, lengths, **sizes)
            out = case.checked(cupy)
            assert to_host(case.checked(cupy)).tobytes() == to_host(out).tobytes()
            case.checked(cupy, num_splits=3)
            if dtype != "float32":
                case.checked(cupy, unified_max=2.0)


@pytest.mark.gpu
@features
def test_on_the_gpu_as_attention(cupy: Any, rng: np.random.Generator, name: str) -> None:
    """A few queries with as many keys run so, and alone as in any batch."""
    case = Case(rng, name, 0, (5001, 5001), hq=8, d=64)
    q, k, v = (cupy.asarray(x) for x in case.host)
    options = {n: cupy.asarray(x) if hasattr(x, "dtype") else x for n, x in case.options.items()}
    for batch_invariant in (False, True):
        options["batch_invariant"] = batch_invariant
        out, lse = cufa.attention(q, k, v, return_lse=True, **options)
        case.assert_accepts(out, lse)


def test_same_bits_alone_and_in_a_batch(xp: ModuleType, rng: np.random.Generator) -> None:
    case = Case(rng, "all", 16, hq=8, d=64)
    given = case.there(xp)
    out = to_host(cufa.decode(**given, num_splits=3))
    for i in range(len(LENGTHS)):
        one = slice(i, i + 1)
        own = {n: given[n][one] for n in ("q", "lengths", "block_table", "alibi_slopes")}
        alone = cufa.decode(**{**given, **own}, num_splits=3)
        assert to_host(alone).tobytes() == out[one].tobytes()


def test_rows_that_see_no_key(xp: ModuleType, rng: np.random.Generator) -> None:
    """They are 0; their log-sum-exp is the sink's, if there is one."""
    sinks = np.array([0.5, -3.0, -np.inf, np.inf], np.float32)
    for dtype in ("bfloat16", "float32"):
        arrays = random_inputs(rng, dtype, b=3, hq=4, hk=2, sq=5, sk=90, d=64)
        q, k, v = (xp.asarray(x) for x in arrays)
        lengths = xp.asarray(np.array([90, 3, 0], np.int32))
        for window, blind in (((99, 1), (0, 1, 5)), ((4, 0), (0, 2, 5))):
            call = {"lengths": lengths, "window": window, "causal": False, "return_lse": True}
            out, lse = (to_host(x) for x in cufa.decode(q, k, v, **call))
            of_sinks = cufa.decode(q, k, v, **call, sinks=xp.asarray(sinks))
            sunk, sunk_lse = (to_host(x) for x in of_sinks)
            for i, count in enumerate(blind):
                none = np.arange(5) < count
                assert not out[i][:, none].astype(np.float32).any()
                assert not sunk[i][:, none].astype(np.float32).any()
                np.testing.assert_array_equal(lse[i] == -np.inf, np.tile(none, (4, 1)))
                expected = np.tile(sinks[:, None], (1, count))
                np.testing.assert_array_equal(sunk_lse[i][:, none], expected)


def test_a_cache_of_no_capacity(xp: ModuleType) -> None:
    q, cache = xp.ones((2, 2, 1, 8), np.float32), xp.ones((2, 2, 0, 8), np.float32)
    sinks = xp.asarray(np.array([1.5, -2.0], np.float32))
    out, lse = cufa.decode(q, cache, cache, sinks=sinks, window=(3, 0), return_lse=True)
    assert not to_host(out).any()
    assert to_host(lse).tolist() == [[[1.5], [-2.0]]] * 2


def test_a_window_that_hides_nothing(xp: ModuleType, rng: np.random.Generator) -> None:
    arrays = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=3, sk=50, d=64)
    q, k, v = (xp.asarray(x) for x in arrays)
    expected = to_host(cufa.decode(q, k, v))
    for window in ((49, None), (None, 0), (10**9, 5)):
        assert to_host(cufa.decode(q, k, v, window=window)).tobytes() == expected.tobytes()
    expected = to_host(cufa.decode(q, k, v, causal=False))
    out = to_host(cufa.decode(q, k, v, window=(49, 2), causal=False))
    assert out.tobytes() == expected.tobytes()


def test_caches_pass_it_on(xp: ModuleType, rng: np.random.Generator) -> None:
    sizes: dict[str, Any] = {"dtype": "float32", "xp": xp}
    paged = cufa.PagedKVCache(9, 4, 2, 2, 8, **sizes)
    paged.allocate(), paged.allocate()
    q, k, v = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=11, d=8)
    options = options_of(rng, "all", (2, 4, 2, 11, 11), DECODE_FEATURES) | {"window": (3, 0)}
    given = {n: xp.asarray(x) if hasattr(x, "dtype") else x for n, x in options.items()}
    for cache in (cufa.KVCache(2, 2, 20, 8, **sizes), paged):
        cache.append(xp.asarray(k), xp.asarray(v))
        out, lse = cache.decode(xp.asarray(q), return_lse=True, **given)
        assert_each_accepted(out, lse, q, k, v, (11, 11), causal=True, **options)


# --- what is refused ---

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window": 5}, TypeError, "window must be a tuple"),
    ({"window": (1.0, 2)}, TypeError, "window: left must be an integer"),
    ({"window": (-1, 0)}, ValueError, r"window: left must be 0 or more, or None for no bound"),
    ({"window": (2, -1), "causal": False}, ValueError, r"window: right must be 0 or more, or None"),
    ({"causal": "top-left"}, TypeError, "causal must be True or False"),
    ({"softcap": 0}, ValueError, "softcap must be 1e-06 to 10000"),
    ({"softcap": "5"}, TypeError, "softcap must be a real number"),
    ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes must be a NumPy or a CuPy array"),
    ({"alibi_slopes": np.ones(3, np.float32)}, ValueError, r"alibi_slopes has shape \(3,\)"),
    ({"alibi_slopes": np.ones((1, 4), np.float32)}, ValueError, "alibi_slopes has shape"),
    ({"alibi_slopes": np.ones(4)}, TypeError, "alibi_slopes has dtype float64"),
    ({"sinks": np.ones((2, 4), np.float32)}, ValueError, "sinks has shape"),
    ({"sinks": np.ones(4, np.float16)}, TypeError, "sinks has dtype float16"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=str)
def test_bad_input(
    xp: ModuleType, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Also where a call like it has been made."""
    given = {n: xp.asarray(x) if hasattr(x, "dtype") else x for n, x in change.items()}
    q, cache = xp.asarray(Q), xp.asarray(CACHE)
    good: dict[str, Any] = {"sinks": np.ones(4, np.float32), "alibi_slopes": np.ones(4, np.float32)}
    cufa.decode(q, cache, cache, **{n: xp.asarray(x) for n, x in good.items() if n in change})
    for _ in range(2):
        with pytest.raises(error, match=f"^{message}"):
            cufa.decode(q, cache, cache, **given)


def test_arrays_elsewhere(gpu: Gpu) -> None:
    q, cache = on_gpu(Q), on_gpu(CACHE)
    sinks = np.ones(4, np.float32)
    cufa.decode(q, cache, cache, sinks=on_gpu(sinks))
    there = on_gpu(sinks)
    there.device_id = 1
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^sinks must be a cupy array, as q is"):
            cufa.decode(q, cache, cache, sinks=sinks)
        with pytest.raises(ValueError, match=r"^sinks .* is on device 1"):
            cufa.decode(q, cache, cache, sinks=there)


def test_out_over_slopes(gpu: Gpu) -> None:
    q, cache, out = on_gpu(Q), on_gpu(CACHE), on_gpu(Q)
    apart, inside = on_gpu(np.ones(4, np.float32)), out.view_of(out.host.reshape(-1)[7:11])
    for _ in range(2):
        cufa.decode(q, cache, cache, out=out, alibi_slopes=apart)
        with pytest.raises(ValueError, match=r"^out .* shares memory with alibi_slopes"):
            cufa.decode(q, cache, cache, out=out, alibi_slopes=inside)


def test_pages_in_front_of_a_window_are_not_in_use() -> None:
    """A window of two keys, and two queries more."""
    q = np.repeat(Q, 2, axis=2)
    table = np.array([[99, -1, 2], [99, 4, 0]])
    options: dict[str, Any] = {"block_table": table, "window": (1, 0)}
    cufa.decode(q, PAGES, PAGES, lengths=np.array([11, 9]), **options)
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is -1"):
        cufa.decode(q, PAGES, PAGES, lengths=np.array([10, 9]), **options)
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] is 99"):
        cufa.decode(q, PAGES, PAGES, lengths=np.array([11, 6]), **options)


# --- calls that are like each other ---


class Played:
    """Stands for a module, of the played GPU's arrays."""

    @staticmethod
    def asarray(array: np.ndarray) -> Array:
        """Return one."""
        return on_gpu(array)


@features
def test_a_call_that_comes_again(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
    for page_size in (0, 7, 16):
        case = Case(rng, name, page_size)
        given = case.there(Played)
        for _ in range(3):
            out, lse = cufa.decode(**given, return_lse=True)
            case.assert_accepts(out, lse)
    assert gpu.parsed == 2  # keys in one piece, and in pages
    for argument in ("alibi_slopes", "sinks"):  # of other kinds of strides, and without
        if argument in case.options:
            values = case.options[argument]
            apart = on_gpu(np.repeat(values, 3, axis=-1))[..., ::3]
            out = cufa.decode(**{**given, argument: apart})
            case.assert_accepts(out, lse)
            without = cufa.decode(**{**given, argument: None}).get()
            assert without.tobytes() != out.get().tobytes()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_cache_that_outgrows_its_window(
    gpu: Gpu, rng: np.random.Generator, layout: Layout
) -> None:
    """By its shape: the window is none before."""
    q, k, v = random_inputs(rng, "float16", b=2, hq=4, hk=2, sq=2, sk=60, d=64)
    options: dict[str, Any] = {"window": (31, 0)}
    turn = (lambda x: x) if layout == "bhsd" else (lambda x: x.swapaxes(1, 2))
    arrays = [on_gpu(np.ascontiguousarray(turn(x))) for x in (q, k, v)]
    for n in range(20, 60):
        parts = [turn(turn(x)[:, :, :n]) for x in arrays[1:]]
        out, lse = cufa.decode(arrays[0], *parts, layout=layout, return_lse=True, **options)
        assert_each_accepted(turn(out), lse, q, k, v, (n, n), causal=True, **options)
        score = ("Causal", "WindowLeft") if n > 32 else ("Causal",)
        assert gpu.launches[-1].score == score
    assert gpu.parsed == 1


def test_options_of_equal_value_and_other_types(gpu: Gpu) -> None:
    q, cache = on_gpu(Q), on_gpu(CACHE)
    cufa.decode(q, cache, cache, window=(1, 0), softcap=1)
    cases: list[dict[str, Any]] = [{"window": (True, 0)}, {"window": (1.0, 0)}, {"softcap": True}]
    for options in cases:
        with pytest.raises(TypeError, match=next(iter(options))):
            cufa.decode(q, cache, cache, **options)


@pytest.mark.gpu
def test_replays_while_lengths_grow(cupy: Any, rng: np.random.Generator, stream: Any) -> None:
    """Past the window, which moves on; and slopes and sinks change."""
    q, k, v = random_inputs(rng, "bfloat16", b=3, hq=8, hk=2, sq=2, sk=3000, d=64)
    lengths = cupy.asarray(np.array([1, 5, 200], np.int32))
    host = {name: rng.random(8, np.float32) for name in ("alibi_slopes", "sinks")}
    there: dict[str, Any] = {name: cupy.asarray(x) for name, x in host.items()}
    options: dict[str, Any] = {"window": (100, None), "softcap": 20.0}
    caches = (cupy.asarray(x) for x in (k, v))
    call: dict[str, Any] = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    call |= {"q": cupy.asarray(q), "lengths": lengths, **there, **options}
    cufa.decode(**call)
    stream.begin_capture()
    out, lse = cufa.decode(**call, return_lse=True)
    graph = stream.end_capture()
    for now in ((1, 5, 200), (70, 0, 101), (3000, 1025, 102), (2999, 17, 103)):
        lengths.set(np.array(now, np.int32))
        host = {name: rng.random(8, np.float32) for name in host}
        for name, array in there.items():
            array.set(host[name])
        graph.launch(stream)
        stream.synchronize()
        assert_each_accepted(out, lse, q, k, v, now, causal=True, **host, **options)
