"""Calls of `decode` on a GPU that the host plays: what is remembered of them, and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from played_gpu import Array, Gpu, Stream, on_gpu, one_in
from reference import DTYPES, random_inputs
from test_decode import assert_each_accepted, in_pages, poisoned
from test_launch import broadcast, in_threads, odd_bytes

import cufa
from cufa.api.options import Layout
from cufa.launch import scratch

LENGTHS = (0, 1, 37, 50)


class Case:
    """A call of `decode`, and the arrays that its result is compared with.

    Parameters
    ----------
    rng : numpy.random.Generator
    page_size : int
        0 for a contiguous cache.
    lengths : sequence of int
    dtype : str
    **sizes
        As in `random_inputs`.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        page_size: int = 0,
        lengths: Any = LENGTHS,
        dtype: str = "bfloat16",
        **sizes: int,
    ) -> None:
        shape = {"hq": 4, "hk": 2, "sq": 1, "sk": 50, "d": 64, **sizes}
        self.host = random_inputs(rng, dtype, b=len(lengths), **shape)
        q, *caches = self.host
        self.lengths = np.array(lengths, np.int32)
        caches = [poisoned(x, lengths) for x in caches]
        self.call: dict[str, Any] = {"q": on_gpu(q), "lengths": on_gpu(self.lengths)}
        if page_size:
            seed = int(rng.integers(1 << 30))
            paged = [in_pages(np.random.default_rng(seed), x, lengths, page_size) for x in caches]
            caches = [cache for cache, _ in paged]
            self.call["block_table"] = on_gpu(paged[0][1])
        self.call |= zip(("k_cache", "v_cache"), map(on_gpu, caches), strict=True)

    def checked(self, **changes: Any) -> Any:
        """Make the call, with changes that give the same result, and check that."""
        given = {**self.call, **changes}
        options = {name: given[name] for name in ("scale", "causal") if name in given}
        lengths = self.lengths
        if given["lengths"] is None:
            lengths = np.full_like(lengths, self.host[1].shape[2])
        result, lse = cufa.decode(**{**given, "return_lse": True})
        assert_each_accepted(result, lse, *self.host, lengths, **{"causal": True, **options})
        if given.get("out") is not None:
            assert result is given["out"]
        return result

    def new_out(self) -> Array:
        """Return memory for the result."""
        q, _, v = self.host
        return on_gpu(np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype))


page_sizes = pytest.mark.parametrize("page_size", [0, 7, 32])


@page_sizes
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_call_that_comes_again(
    gpu: Gpu, rng: np.random.Generator, dtype: str, page_size: int
) -> None:
    case = Case(rng, page_size, dtype=dtype, sq=3, hq=6, dv=32)
    case.checked()
    gpu.allocated.clear()
    for _ in range(3):
        case.checked()
    assert gpu.allocated == 3 * [(4, 6, 3, 32), (4, 6, 3)]  # results, and no other memory
    assert gpu.parsed == len(gpu.loaded) == 1
    assert len(set(gpu.scratch)) == 1


class Subclass(Array):
    """Stands for a subclass of `cupy.ndarray`."""


def test_subclasses_of_arrays(gpu: Gpu, rng: np.random.Generator) -> None:
    case = Case(rng, 32)
    for name in case.call:
        array = case.call[name]
        case.checked(**{name: Subclass(array.host.shape, array.host.dtype, array.host)})


@page_sizes
def test_what_is_read_on_the_device_may_change(
    gpu: Gpu, rng: np.random.Generator, page_size: int
) -> None:
    """Other lengths and tables in the same memory, and in other memory."""
    for repeat in range(4):
        case = Case(rng, page_size, rng.integers(0, 51, 4).tolist())
        case.checked()
        if repeat == 0:
            first = case
        for name in ("lengths", "block_table"):
            if name in case.call:
                first.call[name][...] = case.call[name]
        case.checked(**{n: first.call[n] for n in ("lengths", "block_table") if n in first.call})
    assert gpu.parsed == 1


@page_sizes
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_new_shapes_are_patched_in(
    gpu: Gpu, rng: np.random.Generator, layout: Layout, page_size: int
) -> None:
    """Checks in full are for the first call of a kind only."""
    for n in range(12):
        hk = int(rng.integers(1, 4))
        sizes: Any = {"hk": hk, "hq": hk * int(rng.integers(1, 4)), "sq": int(rng.integers(1, 5))}
        case = Case(rng, page_size, rng.integers(0, 51, int(rng.integers(1, 5))).tolist(), **sizes)
        out = case.new_out()
        if layout == "bshd":
            for name in ("q", "k_cache", "v_cache"):
                case.call[name] = on_gpu(case.call[name].host.swapaxes(1, 2).copy())
            out = on_gpu(out.host.swapaxes(1, 2).copy())
        for given in (None, out) if n else (None,):
            result, lse = cufa.decode(**case.call, layout=layout, out=given, return_lse=True)
            assert given is None or result is given
            result = result if layout == "bhsd" else result.swapaxes(1, 2)
            assert_each_accepted(result, lse, *case.host, case.lengths, causal=True)
    assert gpu.parsed == 1


@pytest.mark.parametrize("lengths", [False, True])
def test_a_cache_that_grows(gpu: Gpu, rng: np.random.Generator, lengths: bool) -> None:
    """By its shape."""
    q, k, v = random_inputs(rng, "float16", b=2, hq=8, hk=2, sq=2, sk=90, d=64)
    arrays = [on_gpu(x) for x in (q, k, v)]
    for n in range(1, 90):
        own = (n, n // 2) if lengths else (n, n)
        given = on_gpu(np.array(own, np.int32)) if lengths else None
        parts = [x[:, :, :n] for x in arrays[1:]]
        out, lse = cufa.decode(arrays[0], *parts, lengths=given, return_lse=True)
        assert_each_accepted(out, lse, q, k, v, own, causal=True)
    assert gpu.parsed == 1


def test_without_lengths(gpu: Gpu, rng: np.random.Generator) -> None:
    case = Case(rng, lengths=(50, 50))
    for _ in range(2):
        case.checked()
        case.checked(lengths=None)
        case.checked(lengths=None, causal=False)
    assert gpu.parsed == 2


@page_sizes
def test_lengths_on_the_host_are_checked_each_time(
    gpu: Gpu, rng: np.random.Generator, page_size: int
) -> None:
    case = Case(rng, page_size)
    for _ in range(3):
        case.checked(lengths=case.lengths.astype(np.int64))
        with pytest.raises(ValueError, match=r"^lengths\[1\] is -1"):
            cufa.decode(**{**case.call, "lengths": np.array([0, -1, 3, 5])})
        case.checked()


#: Integers that kernels do not read as they are.
UNREADABLE: dict[str, Any] = {
    "int64": lambda x: on_gpu(x.host.astype(np.int64)),
    "uint16": lambda x: on_gpu(x.host.astype(np.uint16)),
    "strides": lambda x: on_gpu(np.repeat(x.host, 2, axis=-1))[..., ::2],
    "backwards": lambda x: on_gpu(np.ascontiguousarray(x.host[..., ::-1]))[..., ::-1],
}


@page_sizes
@pytest.mark.parametrize("kind", UNREADABLE)
def test_other_integers_on_the_device_are_converted(
    gpu: Gpu, rng: np.random.Generator, page_size: int, kind: str
) -> None:
    """As CuPy makes them of a list, or as views: int64, every second."""
    case = Case(rng, page_size)
    names = ["lengths", *(["block_table"] if page_size else [])]
    for _ in range(3):
        for chosen in (names, *([name] for name in names)):
            case.checked(**{name: UNREADABLE[kind](case.call[name]) for name in chosen})
        case.checked()


def test_pages_on_the_host_are_checked_each_time(gpu: Gpu, rng: np.random.Generator) -> None:
    case = Case(rng, 16)
    table = case.call["block_table"].get()
    for _ in range(3):
        case.checked(block_table=table, lengths=case.lengths)
        bad = table.copy()
        bad[3, 1] = 99
        with pytest.raises(ValueError, match=r"^block_table\[3, 1\] is 99"):
            cufa.decode(**{**case.call, "block_table": bad, "lengths": case.lengths})
        case.checked()


@page_sizes
def test_another_option(gpu: Gpu, rng: np.random.Generator, page_size: int) -> None:
    case = Case(rng, page_size, sq=2)
    options: list[dict[str, Any]] = [
        {},
        {"causal": False},
        {"scale": 0.3},
        {"scale": -0.3},
        {"num_splits": 1},
        {"num_splits": 3},
        {"kernel": "decode"},
    ]
    for _ in range(2):
        for each in options:
            case.checked(**each)
    assert gpu.parsed == len(options)


def test_another_page_size(gpu: Gpu, rng: np.random.Generator) -> None:
    """It may be another kernel."""
    for _ in range(2):
        for page_size in (1, 7, 16, 32, 48, 0):
            Case(rng, page_size).checked()
    assert gpu.parsed == 2  # in pages, and in one piece
    assert {each.kv for each in gpu.launches} == {"Contiguous", "Paged", "PagedTiles"}


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_another_alignment(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
    case = Case(rng)
    for make in (on_gpu, one_in, on_gpu):
        for _ in range(2):
            out = case.new_out()
            array = case.call.get(name, out)
            case.checked(**{"out": out, name: make(array.host)})
    assert gpu.parsed == 1


def test_other_strides(gpu: Gpu, rng: np.random.Generator) -> None:
    """Whole caches that cannot be read as they are get copied; others are read in place."""
    case = Case(rng)
    cache = case.call["k_cache"].host
    turned = on_gpu(cache.swapaxes(2, 3).copy()).swapaxes(2, 3)
    apart = on_gpu(np.repeat(cache, 3, axis=2))[:, :, ::3]
    for _ in range(2):
        for array, copies in ((turned, 1), (apart, 0), (on_gpu(cache), 0)):
            gpu.allocated.clear()
            case.checked(k_cache=array)
            assert gpu.allocated.count(cache.shape) == copies
    assert gpu.parsed == 1


def test_sequences_that_share_a_cache(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=4, hq=4, hk=2, sq=1, sk=50, d=64)
    k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    arrays = [on_gpu(q), *(broadcast(on_gpu(x[:1]), x.shape) for x in (k, v))]
    lengths = on_gpu(np.array(LENGTHS, np.int32))
    for _ in range(2):
        gpu.allocated.clear()
        out, lse = cufa.decode(*arrays, lengths=lengths, return_lse=True)
        assert_each_accepted(out, lse, q, k, v, LENGTHS)
        assert k.shape not in gpu.allocated


#: Changes that make a legal paged call illegal, the error and how it begins.
SPOILERS: dict[str, tuple[Any, type[Exception], str]] = {
    "q rank": (lambda c: {"q": c["q"][0]}, ValueError, "q has shape"),
    "q batch": (lambda c: {"q": c["q"][:3]}, ValueError, "block_table has shape"),
    "q heads": (lambda c: {"q": c["q"][:, :3]}, ValueError, "q has shape .* heads 3"),
    "k dtype": (
        lambda c: {"k_cache": on_gpu(c["k_cache"].host.astype(np.float32))},
        TypeError,
        "k_cache has dtype",
    ),
    "v pages": (lambda c: {"v_cache": c["v_cache"][1:]}, ValueError, "v_cache .* pages"),
    "k bytes": (lambda c: {"k_cache": odd_bytes(c["k_cache"])}, ValueError, "k_cache .* no mult"),
    "lengths number": (lambda c: {"lengths": 5}, TypeError, "lengths must be a NumPy or"),
    "table number": (lambda c: {"block_table": 0}, TypeError, "block_table must be a NumPy or"),
    "lengths shape": (lambda c: {"lengths": c["lengths"][:3]}, ValueError, "lengths has shape"),
    "lengths dtype": (
        lambda c: {"lengths": on_gpu(c["lengths"].host.astype(np.float32))},
        TypeError,
        "lengths has dtype float32: integers are needed",
    ),
    "lengths bytes": (lambda c: {"lengths": odd_bytes(c["lengths"])}, ValueError, "lengths .* 4 b"),
    "lengths list": (lambda c: {"lengths": [1, 2, 3, 4]}, TypeError, "lengths must be"),
    "table rank": (lambda c: {"block_table": c["block_table"][0]}, ValueError, "block_table has"),
    "table batch": (lambda c: {"block_table": c["block_table"][1:]}, ValueError, "block_table has"),
    "table dtype": (
        lambda c: {"block_table": on_gpu(c["block_table"].host.astype(bool))},
        TypeError,
        "block_table has dtype bool: integers are needed",
    ),
    "out shape": (lambda c: {"out": c["out"][:, :, :, 1:]}, ValueError, "out has shape"),
    "out k": (
        lambda c: {
            "out": c["k_cache"]
            .view_of(c["k_cache"].host.reshape(-1)[:1024])
            .view_of(c["k_cache"].host.reshape(-1)[:1024].reshape(4, 4, 1, 64))
        },
        ValueError,
        "out .* shares memory with k_cache",
    ),
    "splits": (lambda c: {"num_splits": True}, TypeError, "num_splits must be an integer"),
    "causal": (lambda c: {"causal": 1}, TypeError, "causal must be"),
    "return_lse": (lambda c: {"return_lse": 1}, TypeError, "return_lse must be"),
}


@pytest.mark.parametrize("spoiler", sorted(SPOILERS))
def test_what_is_illegal_after_a_legal_call(
    gpu: Gpu, rng: np.random.Generator, spoiler: str
) -> None:
    changes, error, message = SPOILERS[spoiler]
    case = Case(rng, 16)
    case.checked(num_splits=1)
    case.checked()
    case.checked(out=case.new_out())
    given = {**case.call, "out": case.new_out()}
    launches = len(gpu.launches)
    for _ in range(2):
        with pytest.raises(error, match=f"^{message}"):
            cufa.decode(**{**given, **changes(given)})
        assert len(gpu.launches) == launches
    case.checked()


@pytest.mark.parametrize("shape", [(0, 4, 1, 8), (2, 4, 0, 8), (2, 0, 1, 8)])
@pytest.mark.parametrize("capacity", [0, 5])
def test_nothing_is_asked(gpu: Gpu, shape: tuple[int, ...], capacity: int) -> None:
    b, h, _, d = shape
    q = on_gpu(np.ones(shape, np.float16))
    cache = on_gpu(np.ones((b, min(h, 2), capacity, d), np.float16))
    out, lse = cufa.decode(q, cache, cache, return_lse=True)
    assert (out.shape, lse.shape) == (shape, shape[:3])
    with pytest.raises(ValueError, match=r"^kernel"):
        cufa.decode(q, cache, cache, kernel="nonsense")
    assert not gpu.launches


def test_numbers_after_calls_without_arrays(gpu: Gpu, rng: np.random.Generator) -> None:
    """They are no addresses."""
    q, k, v = map(on_gpu, random_inputs(rng, "float16", hq=4, hk=2, sq=1, sk=50, d=64))
    cufa.decode(q, k, v)
    launches = len(gpu.launches)
    with pytest.raises(TypeError, match=r"^lengths must be a NumPy or a CuPy array, not int"):
        cufa.decode(q, k, v, lengths=5)  # type: ignore[call-overload]
    assert len(gpu.launches) == launches


def test_out_over_lengths_and_the_table(gpu: Gpu, rng: np.random.Generator) -> None:
    case = Case(rng, 16)
    out = case.new_out()
    inside = out.host.reshape(-1).view(np.int32)
    for name in ("lengths", "block_table"):
        shape = case.call[name].shape
        shared = out.view_of(inside[: np.prod(shape)].reshape(shape))
        for _ in range(2):
            case.checked(out=case.new_out())
            with pytest.raises(ValueError, match=f"^out .* shares memory with {name}"):
                cufa.decode(**{**case.call, name: shared}, out=out)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out", "lengths", "block_table"])
def test_another_device(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
    case = Case(rng, 16)
    call = {**case.call, "out": case.new_out()}
    gpu.current = 1
    there = {n: on_gpu(x.host) for n, x in call.items()}
    for _ in range(2):
        gpu.current = 0
        case.checked(out=call["out"])
        with pytest.raises(ValueError, match=f"^{name} .* is on device 1, but .* device is 0"):
            cufa.decode(**{**call, name: there[name]})
        gpu.current = 1
        assert case.checked(**there).device_id == 1
    assert len(gpu.loaded) == 2


def test_threads_share_what_is_remembered(gpu: Gpu, rng: np.random.Generator) -> None:
    cases = [Case(rng, 16) for _ in range(4)]
    cases[0].checked()
    gpu.slow = True
    in_threads(4, lambda number: [cases[number].checked() for _ in range(5)])
    assert len(gpu.loaded) == 1


# --- calls that are captured into a graph ---


@pytest.fixture
def capture(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begin a capture, of a number, when it is called."""

    def begin(number: int) -> None:
        gpu.stream = Stream(capturing=True)
        monkeypatch.setattr(scratch, "current_capture", lambda: (number, 0))

    return begin


@page_sizes
def test_captured_calls_allocate_their_results_alone(
    gpu: Gpu, rng: np.random.Generator, capture: Any, page_size: int
) -> None:
    case = Case(rng, page_size)
    case.checked(num_splits=2)
    gpu.allocated.clear()
    capture(1)
    out = case.new_out()
    gpu.allocated.clear()
    cufa.decode(**case.call, num_splits=2, out=out)
    assert gpu.allocated == []
    cufa.decode(**case.call, num_splits=2)
    assert gpu.allocated == [(4, 4, 1, 64)]
    assert gpu.scratch[-1] == gpu.scratch[-2]
    capture(2)
    cufa.decode(**case.call, num_splits=2)
    assert gpu.scratch[-1] != gpu.scratch[-2]


def test_a_single_split_needs_nothing_set_aside(
    gpu: Gpu, rng: np.random.Generator, capture: Any
) -> None:
    case = Case(rng)
    capture(1)
    case.checked(num_splits=1)
    case.checked()  # so short that nothing is cut
    with pytest.raises(RuntimeError, match="no memory is set aside for this captured launch"):
        cufa.decode(**case.call, num_splits=2)


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", ["lengths", "block_table"])
def test_integers_that_are_converted_cannot_be_captured(
    gpu: Gpu, rng: np.random.Generator, capture: Any, name: str, kind: str
) -> None:
    case = Case(rng, 16)
    call = {**case.call, name: UNREADABLE[kind](case.call[name])}
    cufa.decode(**call)
    capture(1)
    gpu.allocated.clear()
    with pytest.raises(
        ValueError, match=rf"^{name} .* would be copied, .* make a contiguous int32"
    ):
        cufa.decode(**call)
    assert gpu.allocated == []


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "lengths", "block_table"])
def test_copies_that_are_captured(
    gpu: Gpu, rng: np.random.Generator, capture: Any, name: str, known: bool
) -> None:
    case = Case(rng, 16)
    array = case.call[name]
    call = {**case.call, name: array.get() if array.dtype == np.int32 else one_in(array.host)}
    if known:
        cufa.decode(**call)
    capture(1)
    gpu.allocated.clear()
    launches = len(gpu.launches)
    with pytest.raises(ValueError, match=rf"^{name} \(shape .* would be copied"):
        cufa.decode(**call)
    assert gpu.allocated == []
    assert len(gpu.launches) == launches
