"""Sequences of unequal lengths: `attention_varlen`, and `attention` with `lengths_k`."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_cases import KERNELS
from played_gpu import Gpu, on_gpu
from reference import DTYPES, Expected, random_inputs, same_without_lse, to_host
from score_arrays import FEATURES, options_of

import cufa
from cufa.compiler import jit
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant

#: Queries and keys of each sequence.
LENGTHS = (
    ((5, 0, 130, 40, 1, 200), (7, 3, 130, 90, 0, 201)),
    ((64, 64, 64), (64, 64, 64)),
    ((300,), (420,)),
    ((1,) * 40, tuple(range(40))),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "top-left", "softcap": 3.0},
    {"window": (20, 5)},
    {"window": (100, None), "causal": True, "scale": -0.3},
)


def offsets(lengths: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def ragged(
    rng: np.random.Generator,
    dtype: str,
    lengths: Any,
    hq: int = 4,
    hk: int = 2,
    d: int = 32,
    xp: ModuleType = np,
) -> tuple[np.ndarray, ...]:
    """Return q, k and v with three rows behind the last sequence, NaN in k and v, and offsets.

    On the host, q has no such rows: offsets must cover it there.
    """
    found = []
    for of, heads, more, spare in (
        (lengths[0], hq, 0.0, 0 if xp is np else 3),
        (lengths[1], hk, np.nan, 3),
        (lengths[1], hk, np.nan, 3),
    ):
        array = rng.standard_normal((sum(of) + spare, heads, d), np.float32)
        array[sum(of) :] = more
        found.append(array.astype(DTYPES[dtype]))
    return (*found, offsets(lengths[0]), offsets(lengths[1]))


def assert_each_is_right(
    found: Any, arrays: tuple[np.ndarray, ...], used: Any = None, **options: Any
) -> None:
    """Compare each sequence to the oracle, by the bound of all: few numbers err by chance."""
    q, k, v, cu_q, cu_k = arrays
    out, lse = (to_host(x) for x in found)
    cases = []
    for i in range(len(cu_q) - 1):
        a = slice(cu_q[i], cu_q[i + 1])
        b = slice(cu_k[i], cu_k[i + 1] if used is None else min(cu_k[i + 1], cu_k[i] + used[i]))
        its = dict(options)
        for name in ("alibi_slopes", "bias", "mask"):
            if name in its and its[name].ndim > 1:
                array = its[name]
                its[name] = array[i : i + 1] if array.shape[0] > 1 else array
        sizes = a.stop - a.start, b.stop - b.start
        for name in ("bias", "mask"):
            if name in its:
                its[name] = its[name][..., : sizes[0] if its[name].shape[-2] > 1 else 1, :]
                if its[name].dtype != np.uint8:
                    its[name] = its[name][..., : sizes[1]]
        if sizes[0]:
            four = [x.swapaxes(0, 1)[None] for x in (q[a], k[b], v[b])]
            expected = Expected(*four, **its)
            cases.append((expected, out[a].swapaxes(0, 1)[None], lse[None, :, a]))
    bound = max(expected.bound for expected, _, _ in cases)
    for expected, its_out, its_lse in cases:
        expected.assert_accepts(its_out, its_lse, str(options), bound)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sequences_of_any_lengths(
    xp: ModuleType, rng: np.random.Generator, dtype: str, options: dict[str, Any]
) -> None:
    for lengths in LENGTHS:
        arrays = ragged(rng, dtype, lengths, xp=xp)
        found = cufa.attention_varlen(*map(xp.asarray, arrays), return_lse=True, **options)
        assert_each_is_right(found, arrays, **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_on_the_gpu(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, options: dict[str, Any]
) -> None:
    for lengths in LENGTHS:
        for d in (64, 128, 192):
            arrays = ragged(rng, dtype, lengths, hq=8, d=d)
            given = [cupy.asarray(x) for x in arrays]
            found = cufa.attention_varlen(*given, kernel=kernel, return_lse=True, **options)
            assert_each_is_right(found, arrays, **options)
            again = cufa.attention_varlen(*given, kernel=kernel, **options)
            end = arrays[3][-1]
            if same_without_lse(dtype, options):
                assert to_host(again)[:end].tobytes() == to_host(found[0])[:end].tobytes()
            else:
                assert_each_is_right((again, found[1]), arrays, **options)


@pytest.mark.parametrize("name", [n for n in FEATURES if "bits" not in n])
def test_arrays_beside(xp: ModuleType, rng: np.random.Generator, name: str) -> None:
    lengths = ((30, 5, 61, 100), (40, 0, 61, 150))
    arrays = ragged(rng, "bfloat16", lengths, xp=xp)
    options = options_of(rng, name, (4, 4, 2, 100, 150))
    there: dict[str, Any] = {
        k: xp.asarray(x) if hasattr(x, "dtype") else x for k, x in options.items()
    }
    found = cufa.attention_varlen(
        *map(xp.asarray, arrays), max_seqlen_q=100, max_seqlen_k=150, return_lse=True, **there
    )
    assert_each_is_right(found, arrays, **options)


def test_keys_in_use(xp: ModuleType, rng: np.random.Generator) -> None:
    lengths = ((30, 20, 61, 100), (40, 90, 61, 150))
    # On the device, more than a sequence has are all of them.
    used = np.array([33, 0, 61 if xp is np else 100, 149], np.int32)
    arrays = ragged(rng, "float16", lengths, xp=xp)
    for first, end in ((33, 40), (40, 130), (191 + 149, 191 + 150)):
        arrays[1][first:end], arrays[2][first:end] = np.nan, np.nan
    found = cufa.attention_varlen(
        *map(xp.asarray, arrays), seqused_k=xp.asarray(used), causal=True, return_lse=True
    )
    assert_each_is_right(found, arrays, used=used, causal=True)


def test_nothing_reaches_another_sequence(xp: ModuleType, rng: np.random.Generator) -> None:
    """Not even NaN, and rows behind the last sequence are not written."""
    lengths = ((70, 70, 5, 200), (70, 70, 90, 210))
    for dtype in ("bfloat16", "float32"):
        arrays = ragged(rng, dtype, lengths, xp=xp)
        for array, of in zip(arrays[:3], (3, 4, 4), strict=True):
            array[arrays[of][1] : arrays[of][2]] = np.nan
        out = xp.full(arrays[0].shape, 7, arrays[0].dtype)
        given = [xp.asarray(x) for x in arrays]
        cufa.attention_varlen(*given, causal=True, out=out)
        found = to_host(out).astype(np.float32)
        assert np.isnan(found[70:140]).all()
        assert np.isfinite(found[:70]).all()
        assert np.isfinite(found[140:345]).all()
        assert (found[345:] == 7).all()
        out, lse = (to_host(x) for x in cufa.attention_varlen(*given, return_lse=True))
        assert not out[345:].astype(np.float32).any()
        assert np.isneginf(lse[:, 345:]).all()


def test_sequences_longer_than_the_longest(xp: ModuleType, rng: np.random.Generator) -> None:
    """On the device, their first queries and keys count; on the host they are refused."""
    arrays = ragged(rng, "float16", ((50, 20), (60, 90)), xp=xp)
    q, k, v, cu_q, cu_k = arrays
    out = xp.full(q.shape, 7, q.dtype)
    given = [xp.asarray(x) for x in arrays]
    if xp is np:
        with pytest.raises(ValueError, match=r"^max_seqlen_q is 30, but sequence 0 has length 50"):
            cufa.attention_varlen(*given, max_seqlen_q=30)
        with pytest.raises(ValueError, match=r"^max_seqlen_k is 64, but sequence 1 has length 90"):
            cufa.attention_varlen(*given, max_seqlen_k=64)
        cufa.attention_varlen(*given, max_seqlen_k=64, seqused_k=np.array([9, 64]))
        return
    cufa.attention_varlen(*given, max_seqlen_q=30, max_seqlen_k=64, out=out)
    found = to_host(out)
    assert (found[30:50] == 7).all()
    made, lse = cufa.attention_varlen(*given, max_seqlen_q=30, max_seqlen_k=64, return_lse=True)
    assert not to_host(made)[30:50].any()
    assert np.isneginf(to_host(lse)[:, 30:50]).all()
    np.testing.assert_array_equal(to_host(made)[:30], found[:30])
    for i, rows, keys in ((0, 30, 60), (1, 20, 64)):
        a, b = slice(cu_q[i], cu_q[i] + rows), slice(cu_k[i], cu_k[i] + keys)
        four = [x.swapaxes(0, 1)[None] for x in (q[a], k[b], v[b])]
        Expected(*four).assert_accepts(found[a].swapaxes(0, 1)[None], None)


def test_longest_lengths_of_nothing(xp: ModuleType, rng: np.random.Generator) -> None:
    """A maximum length of 0 is ``lengths.max()`` where there is nothing."""
    empty = xp.asarray(np.empty((0, 2, 8), np.float32))
    offsets = xp.asarray(np.zeros(3, np.int32))
    out = cufa.attention_varlen(
        *(empty, empty, empty, offsets, offsets), max_seqlen_q=0, max_seqlen_k=0
    )
    assert out.shape == (0, 2, 8)
    if xp is np:  # there, lengths that exceed the maximum are refused
        return
    given = [xp.asarray(x) for x in ragged(rng, "float32", ((5, 20), (0, 30)), xp=xp)]
    out, lse = cufa.attention_varlen(*given, max_seqlen_k=0, return_lse=True)
    assert not to_host(out)[:25].any()
    assert np.isneginf(to_host(lse)[:, :25]).all()
    out = xp.full(given[0].shape, 7, np.float32)
    cufa.attention_varlen(*given, max_seqlen_q=0, out=out)
    assert (to_host(out) == 7).all()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padded_batches(xp: ModuleType, rng: np.random.Generator, options: dict[str, Any]) -> None:
    for dtype, d in (("bfloat16", 64), ("float32", 48)):
        q, k, v = random_inputs(rng, dtype, b=5, hq=4, hk=2, sq=90, sk=200, d=d)
        lengths = np.array([200, 0, 1, 127, 64], np.int32)
        for i, n in enumerate(lengths):
            k[i, :, n:], v[i, :, n:] = np.nan, np.nan
        given = [xp.asarray(x) for x in (q, k, v)]
        for its in (xp.asarray(lengths), lengths):
            out, lse = cufa.attention(*given, lengths_k=its, return_lse=True, **options)
            cases = [
                Expected(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], **options)
                for i, n in enumerate(lengths)
            ]
            bound = max(case.bound for case in cases)
            for i, case in enumerate(cases):
                case.assert_accepts(out[i : i + 1], lse[i : i + 1], str(options), bound)


def test_padded_batches_of_masks(xp: ModuleType, rng: np.random.Generator) -> None:
    """Positions are those of the arrays, whatever the lengths are."""
    q, k, v = random_inputs(rng, "float16", b=2, hq=4, sq=40, sk=70, d=32)
    mask = rng.random((2, 1, 40, 70)) < 0.5
    slopes = rng.random((2, 4), np.float32)
    given = [xp.asarray(x) for x in (q, k, v)]
    lengths = xp.asarray(np.array([70, 33], np.int32))
    out = cufa.attention(
        *given, lengths_k=lengths, mask=xp.asarray(mask), alibi_slopes=xp.asarray(slopes)
    )
    for i, n in enumerate((70, 33)):
        one, keys = slice(i, i + 1), slice(n)
        expected = Expected(
            *(q[one], k[one, :, keys], v[one, :, keys]),
            mask=mask[one, ..., keys],
            alibi_slopes=slopes[one],
        )
        expected.assert_accepts(out[one], None)


def test_no_sequences(xp: ModuleType) -> None:
    """And on the device, queries that none has; in a call like one of some sequences, too."""
    for rows in (0,) if xp is np else (0, 5):
        q, k = xp.ones((rows, 4, 8), np.float16), xp.ones((7, 2, 8), np.float16)
        for n in (0, 1, 0):
            offsets = xp.asarray(np.zeros(n + 1, np.int32))
            out, lse = cufa.attention_varlen(q, k, k, offsets, offsets, return_lse=True)
            assert (out.shape, lse.shape) == ((rows, 4, 8), (4, rows))
            assert not to_host(out).any()
            assert np.isneginf(to_host(lse)).all()
            mine = xp.full(q.shape, 7, np.float16)
            assert cufa.attention_varlen(q, k, k, offsets, offsets, out=mine) is mine
            assert (to_host(mine) == 7).all()
        assert "\n" not in str(cufa.explain_varlen(q, k, k, offsets, offsets))


def test_functions_of_the_caller(xp: ModuleType, rng: np.random.Generator) -> None:
    """They take the sequence's number, and its own queries and keys."""
    arrays = ragged(rng, "float16", ((30, 61, 100), (40, 61, 150)), xp=xp)
    table = rng.standard_normal((3, 4), np.float32)
    there = xp.asarray(table)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * there[b, h] + 0.1 * (q_idx - kv_idx)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx + b) % 3 > 0

    found = cufa.attention_varlen(
        *map(xp.asarray, arrays), score_mod=score_mod, mask_mod=mask_mod, return_lse=True
    )
    out, lse = (to_host(x) for x in found)
    q, k, v, cu_q, cu_k = arrays
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        four = [x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])]

        def its_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, i: int = i) -> Any:
            return score * table[i, h] + 0.1 * (q_idx - kv_idx)

        def its_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, i: int = i) -> Any:
            return (kv_idx + i) % 3 > 0

        expected = Expected(*four, score_mod=its_score, mask_mod=its_mask)
        expected.assert_accepts(out[rows].swapaxes(0, 1)[None], lse[None, :, rows])


def test_drawn(xp: ModuleType) -> None:
    rng = random.Random(3)
    for number in range(40 if xp is not np else 8):
        data = np.random.default_rng(number)
        n = rng.randint(1, 9)
        most = rng.choice((3, 70, 300))
        lengths = [[rng.randint(0, most) for _ in range(n)] for _ in range(2)]
        lengths[0][0] += 1
        dtype = rng.choice(("float16", "bfloat16", "float32"))
        group, hk = rng.choice((1, 4, 7)), rng.randint(1, 2)
        arrays = ragged(data, dtype, lengths, group * hk, hk, 8 * rng.randint(1, 24), xp=xp)
        options = rng.choice(OPTIONS)
        found = cufa.attention_varlen(*map(xp.asarray, arrays), return_lse=True, **options)
        assert_each_is_right(found, arrays, **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": np.ones((8, 16), np.float16)}, ValueError, r"q has shape \(8, 16\): \(total"),
        ({"cu_seqlens_q": [0, 8]}, TypeError, "cu_seqlens_q must be a NumPy or a CuPy array"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a NumPy or a CuPy array"),
        ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be a NumPy or a CuPy array"),
        ({"cu_seqlens_q": np.zeros(0, int)}, ValueError, "cu_seqlens_q has shape"),
        ({"cu_seqlens_q": np.array([0])}, ValueError, r"cu_seqlens_q\[-1\] is 0, but q has"),
        ({"cu_seqlens_q": np.zeros((2, 2), int)}, ValueError, "cu_seqlens_q has shape"),
        ({"cu_seqlens_q": np.array([0.0, 4, 8])}, TypeError, "cu_seqlens_q has dtype float64"),
        ({"cu_seqlens_k": np.array([0, 4])}, ValueError, r"cu_seqlens_k has shape \(2,\)"),
        ({"cu_seqlens_q": np.array([1, 4, 8])}, ValueError, r"cu_seqlens_q\[0\] is 1"),
        ({"cu_seqlens_k": np.array([0, 5, 4])}, ValueError, r"cu_seqlens_k\[2\] is 4, less"),
        ({"cu_seqlens_k": np.array([0, 5, 10])}, ValueError, r"cu_seqlens_k\[-1\] is 10"),
        ({"seqused_k": np.array([0, -1])}, ValueError, r"seqused_k\[1\] is -1"),
        ({"seqused_k": np.array([0])}, ValueError, "seqused_k has shape"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be 0 to"),
        ({"max_seqlen_k": 4.0}, TypeError, "max_seqlen_k must be an integer"),
        ({"bias": np.ones((4, 4), np.float32)}, ValueError, "bias: max_seqlen_q and"),
        ({"kernel": "fa1_fp32"}, ValueError, "kernel"),
        ({"k": np.ones((8, 1, 9), np.float16)}, ValueError, r"k has shape \(8, 1, 9\), but q has"),
        (
            {"out": np.ones((8, 2, 15), np.float16)},
            ValueError,
            r"out has shape \(8, 2, 15\), but shape \(8, 2, 16\) is needed \(q \(8",
        ),
        ({"out": np.ones((8, 2, 16), np.float32)}, TypeError, "out has dtype float32, but q has"),
        ({"causal": 1}, TypeError, "causal"),
    ],
    ids=str,
)
def test_bad_calls(
    xp: ModuleType, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    call: dict[str, Any] = {name: np.ones((8, 2, 16), np.float16) for name in "qkv"}
    call |= {name: np.array([0, 4, 8]) for name in ("cu_seqlens_q", "cu_seqlens_k")} | changes
    on_device = ("q", "k", "v", "bias", "out")
    given = {n: xp.asarray(x) if n in on_device else x for n, x in call.items()}
    for function in (cufa.attention_varlen, cufa.explain_varlen, cufa.attention_varlen):
        with pytest.raises(error, match=f"^{message}"):
            function(**given)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"kernel": "fa2_mma"}, {"seqused_k": np.array([1, 0, 9])}, {"bias": 3}],
    ids=str,
)
def test_how_a_call_runs(
    gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The plan is that of the call, and nothing is compiled for it; on a GPU that is played."""
    asked: list[Variant | Instance] = []

    def kernel(variant: Variant | Instance, *_: Any) -> Any:
        asked.append(variant)
        return lambda *_: None

    monkeypatch.setattr(jit, "kernel", kernel)
    given = [on_gpu(x) for x in ragged(rng, "bfloat16", ((30, 700, 61), (40, 900, 61)), d=64)]
    if "bias" in options:
        bias = on_gpu(np.ones((61, 61), np.float32))
        options = {"bias": bias, "max_seqlen_q": 61, "max_seqlen_k": 61}
    plan: Any = cufa.explain_varlen(*given, **options)
    assert not asked
    cufa.attention_varlen(*given, **options)
    assert [each for each in asked if isinstance(each, Variant)] == [plan.variant]
    assert plan.variant.kv == "Varlen"
    assert "\n" not in str(plan)
    priced = [variant for variant, _ in plan.expected_us]
    assert not priced or plan.variant in priced
    assert bool(priced) == (plan.variant.kernel == "fa3_wgmma")


def test_launches_for_rows_that_no_sequence_has(gpu: Gpu, rng: np.random.Generator) -> None:
    """One, where offsets are on the device and the call makes an array; on a played GPU."""
    arrays = ragged(rng, "float32", ((5, 20), (9, 30)), d=64)
    q, k, v = map(on_gpu, arrays[:3])
    out = on_gpu(np.zeros_like(arrays[0]))

    def launches(offsets: tuple[Any, Any], **options: Any) -> int:
        before = len(gpu.launches)
        cufa.attention_varlen(q, k, v, *offsets, **options)
        return len(gpu.launches) - before

    there = on_gpu(arrays[3]), on_gpu(arrays[4])
    for _ in range(3):
        assert launches(there) == 2
        assert launches(there, out=out) == 1
        assert launches(there, out=out, return_lse=True) == 2
        assert launches((arrays[3], arrays[4])) == 1
        assert launches((arrays[3], there[1])) == 1


def test_numbers_after_calls_without_arrays(gpu: Gpu, rng: np.random.Generator) -> None:
    """They are no addresses; on a GPU that is played."""
    given = [on_gpu(x) for x in ragged(rng, "float32", ((30, 50), (20, 300)), d=64)]
    cufa.attention_varlen(*given)
    launches = len(gpu.launches)
    for name in ("seqused_k", "sinks", "alibi_slopes"):
        options: dict[str, Any] = {name: 5}
        with pytest.raises(TypeError, match=f"^{name} must be a NumPy or a CuPy array, not int"):
            cufa.attention_varlen(*given, **options)
    assert len(gpu.launches) == launches


def test_out_over_what_a_function_reads(gpu: Gpu, rng: np.random.Generator) -> None:
    """On a GPU that is played; also after a call in which they are apart."""
    arrays = ragged(rng, "float32", ((30, 50), (20, 300)), d=64)
    given = [on_gpu(x) for x in arrays]
    out = on_gpu(np.zeros_like(arrays[0]))

    def reads(array: Any) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + array[kv_idx % 64]

    cufa.attention_varlen(*given, score_mod=reads(on_gpu(np.zeros(64, np.float32))), out=out)
    launches = len(gpu.launches)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out .* shares memory with score_mod: array"):
            cufa.attention_varlen(*given, score_mod=reads(out[0, 0]), out=out)
    assert len(gpu.launches) == launches


def test_how_a_call_runs_on_the_cpu(rng: np.random.Generator) -> None:
    """In tiles of sequences of the average length."""
    arrays = ragged(rng, "float32", ((30, 50), (20, 300)))
    x = np.ones((2, 4, 40, 32), np.float32)
    y = np.ones((2, 2, 162, 32), np.float32)  # with the rows that follow the last sequence
    assert cufa.explain_varlen(*arrays, causal=True) == cufa.explain(x, y, y, causal=True)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "int32"])
def test_lengths_on_the_host(gpu: Gpu, rng: np.random.Generator, dtype: str) -> None:
    """Any integers are copied as int32, those of the device, too; on a GPU that is played."""
    q = on_gpu(rng.standard_normal((2, 1, 4, 64)).astype(np.float16))
    for lengths in np.array([3, 4], dtype), np.array([3, 0, 4], dtype)[::2]:
        for options in {}, {"out": on_gpu(np.zeros_like(q.host))}, {"return_lse": True}:
            for there in lengths, on_gpu(np.repeat(lengths, 2))[::2]:
                assert cufa.attention(q, q, q, lengths_k=there, **options) is not None
    assert len(gpu.launches) == 12
    rows = on_gpu(rng.standard_normal((4, 1, 64), np.float32))
    for offsets in np.array([0, 2, 4], dtype), np.array([0, 9, 2, 9, 4], dtype)[::2]:
        for x in offsets, on_gpu(np.repeat(offsets, 2))[::2]:
            given: Any = x, x
            assert cufa.attention_varlen(rows, rows, rows, *given, seqused_k=x[:2]) is not None
    assert len(gpu.launches) == 18  # one more where offsets are on the device


def test_more_keys_in_use_than_there_are(xp: ModuleType) -> None:
    """On the host, as `lengths_k`; what is on the device is known there alone."""
    rows = xp.ones((16, 2, 8), np.float32)
    offsets = np.array([0, 7, 16])
    for function in (cufa.attention_varlen, cufa.explain_varlen):
        for used, i, most in (((9, 9), 0, 7), ((7, 10), 1, 9), ((7, -1), 1, 9)):
            message = rf"^seqused_k\[{i}\] is {used[i]}: it must be 0 to {most}, the keys of seq"
            with pytest.raises(ValueError, match=message):
                function(rows, rows, rows, offsets, offsets, seqused_k=np.array(used))


def test_bad_lengths(xp: ModuleType) -> None:
    q = xp.ones((2, 1, 4, 8), np.float16)
    cases: Any = (
        (np.array([4]), ValueError, "lengths_k has shape"),
        (np.array([4, 5]), ValueError, r"lengths_k\[1\] is 5: it must be 0 to 4"),
        (np.array([4.0, 3]), TypeError, "lengths_k has dtype"),
        ([4, 4], TypeError, "lengths_k must be a NumPy or a CuPy array"),
    )
    for bad, error, message in cases:
        for function in (cufa.attention, cufa.explain):
            with pytest.raises(error, match=f"^{message}"):
                function(q, q, q, lengths_k=bad)
