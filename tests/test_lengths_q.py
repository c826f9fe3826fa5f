"""`attention` with `lengths_q`: batches whose queries are padded, too."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_cases import KERNELS
from played_gpu import Gpu, on_gpu
from reference import Expected, random_inputs, to_host
from score_arrays import FEATURES, options_of
from test_varlen import OPTIONS

import cufa

#: Queries and keys of each sequence, in arrays of 130 and 200.
LENGTHS_Q = np.array([130, 6, 0, 64, 1, 70], np.int32)
LENGTHS_K = np.array([200, 6, 50, 0, 120, 64], np.int32)

_OF_SEQUENCES = "alibi_slopes", "bias", "mask", "keep"
_OF_PAIRS = "bias", "mask", "keep"


def padded(
    rng: np.random.Generator,
    dtype: str,
    lengths_q: np.ndarray | None,
    lengths_k: np.ndarray | None,
    d: int = 32,
    dv: int | None = None,
    **sizes: int,
) -> tuple[np.ndarray, ...]:
    """Return q, k and v with NaN behind each sequence's last row."""
    shape = {"b": 6, "hq": 4, "hk": 2, "sq": 130, "sk": 200} | sizes
    arrays = random_inputs(rng, dtype, **shape, d=d, dv=d if dv is None else dv)
    for array, lengths in zip(arrays, (lengths_q, lengths_k, lengths_k), strict=True):
        for i, n in enumerate(() if lengths is None else lengths):
            array[i, :, n:] = np.nan
    return arrays


def _of_sequence(options: dict[str, Any], i: int, rows: int, keys: int) -> dict[str, Any]:
    """Return what the oracle is told of a sequence."""
    its = dict(options)
    for name in _OF_SEQUENCES:
        if name in its and its[name].ndim > 1:
            array = its[name]
            if name in _OF_PAIRS:
                array = array.reshape((1,) * (4 - array.ndim) + array.shape)
                array = array[:, :, :rows] if array.shape[2] > 1 else array
                if array.shape[3] > 1 and array.dtype != np.uint8:
                    array = array[..., :keys]
            its[name] = array[i : i + 1] if array.shape[0] > 1 else array
    for name in ("score_mod", "mask_mod"):
        if name in its:
            its[name] = _beginning_with(name, its[name], i)
    return its


def _beginning_with(name: str, function: Any, i: int) -> Any:
    if name == "score_mod":
        return lambda score, b, *at: function(score, b + i, *at)
    return lambda b, *at: function(b + i, *at)


def assert_each_is_right(
    found: Any,
    arrays: tuple[np.ndarray, ...],
    lengths_q: np.ndarray | None,
    lengths_k: np.ndarray | None,
    **options: Any,
) -> None:
    """Compare each sequence to the oracle, by the bound of all; rows behind it are 0 and -inf."""
    q, k, v = arrays
    out, lse = (to_host(x) for x in found)
    of_q, of_k = (
        [array.shape[2]] * len(array) if lengths is None else lengths.tolist()
        for array, lengths in ((q, lengths_q), (k, lengths_k))
    )
    cases = [
        Expected(
            *(q[i : i + 1, :, :n], k[i : i + 1, :, :m], v[i : i + 1, :, :m]),
            **_of_sequence(options, i, n, m),
        )
        for i, (n, m) in enumerate(zip(of_q, of_k, strict=True))
    ]
    bound = max(case.bound for case in cases)
    for i, (n, case) in enumerate(zip(of_q, cases, strict=True)):
        one = slice(i, i + 1)
        case.assert_accepts(out[one, :, :n], lse[one, :, :n], f"{i} {options}", bound)
        assert not out[one, :, n:].astype(np.float32).any(), f"rows behind {i} {options}"
        assert np.isneginf(lse[one, :, n:]).all(), f"rows behind {i} {options}"


@pytest.mark.parametrize("options", [*OPTIONS, {"attention_chunk": 48, "causal": True}], ids=str)
@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_each_sequence_by_its_own_lengths(
    xp: ModuleType, rng: np.random.Generator, dtype: str, with_keys: bool, options: dict[str, Any]
) -> None:
    lengths = LENGTHS_Q, LENGTHS_K if with_keys else None
    arrays = padded(rng, dtype, *lengths)
    given = [xp.asarray(x) for x in arrays]
    there: dict[str, Any] = {"lengths_q": xp.asarray(LENGTHS_Q)}
    if with_keys:
        there["lengths_k"] = xp.asarray(LENGTHS_K)
    found = cufa.attention(*given, return_lse=True, **(there | options))
    assert_each_is_right(found, arrays, *lengths, **options)


def test_a_batch_that_is_padded_on_the_right(xp: ModuleType, rng: np.random.Generator) -> None:
    """As many queries as keys: both alignments agree, with a window and ALiBi, too."""
    lengths = np.array([16, 6])
    arrays = padded(rng, "float32", lengths, lengths, b=2, sq=16, sk=16)
    slopes = rng.random(4, np.float32)
    its: dict[str, Any] = {"lengths_q": xp.asarray(lengths), "lengths_k": xp.asarray(lengths)}
    for causal in ("top-left", "bottom-right"):
        options: dict[str, Any] = {"causal": causal, "window": (3, None), "alibi_slopes": slopes}
        there = {**options, "alibi_slopes": xp.asarray(slopes)}
        its |= {**there, "return_lse": True}
        found = cufa.attention(*map(xp.asarray, arrays), **its)
        assert_each_is_right(found, arrays, lengths, lengths, **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_on_the_gpu(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, options: dict[str, Any]
) -> None:
    its: dict[str, Any] = {
        "lengths_q": cupy.asarray(LENGTHS_Q),
        "lengths_k": cupy.asarray(LENGTHS_K),
    }
    for d in (64, 128, 192):
        arrays = padded(rng, dtype, LENGTHS_Q, LENGTHS_K, d)
        given = [cupy.asarray(x) for x in arrays]
        found = cufa.attention(*given, kernel=kernel, return_lse=True, **(its | options))
        assert_each_is_right(found, arrays, LENGTHS_Q, LENGTHS_K, **options)


@pytest.mark.gpu
def test_in_a_capture(cupy: Any, rng: np.random.Generator) -> None:
    """A replay follows the lengths that it finds."""
    arrays = padded(rng, "float16", None, None, 64)
    given = [cupy.asarray(x) for x in arrays]
    lengths_q, lengths_k = cupy.asarray(LENGTHS_Q), cupy.asarray(LENGTHS_K)
    its: dict[str, Any] = {"lengths_q": lengths_q, "lengths_k": lengths_k, "causal": True}
    cufa.attention(*given, return_lse=True, **its)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        found = cufa.attention(*given, return_lse=True, **its)
        graph = stream.end_capture()
    for turned in range(3):
        new_q, new_k = np.roll(LENGTHS_Q, turned), np.roll(LENGTHS_K, -turned)
        lengths_q.set(new_q), lengths_k.set(new_k)
        for array in found:
            array.fill(7)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_each_is_right(found, arrays, new_q, new_k, causal=True)


@pytest.mark.parametrize("name", FEATURES)
def test_arrays_beside(xp: ModuleType, rng: np.random.Generator, name: str) -> None:
    """Rows behind a sequence are -inf in the log-sum-exp whatever a sink is."""
    options = options_of(rng, name, (6, 4, 2, 130, 200))
    there: dict[str, Any] = {
        k: xp.asarray(x) if hasattr(x, "dtype") else x for k, x in options.items()
    }
    arrays = padded(rng, "bfloat16", LENGTHS_Q, LENGTHS_K)
    its: dict[str, Any] = {"lengths_q": xp.asarray(LENGTHS_Q), "lengths_k": xp.asarray(LENGTHS_K)}
    found = cufa.attention(*map(xp.asarray, arrays), return_lse=True, **(its | there))
    assert_each_is_right(found, arrays, LENGTHS_Q, LENGTHS_K, **options)


def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * b - 0.05 * (q_idx - kv_idx)


def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 70 + kv_idx // 40 + h + b) % 3 > 0


def test_functions_and_tiles(xp: ModuleType, rng: np.random.Generator) -> None:
    """Positions are those of the arrays, whatever the lengths are."""
    arrays = padded(rng, "float16", LENGTHS_Q, LENGTHS_K)
    given = [xp.asarray(x) for x in arrays]
    its: dict[str, Any] = {"lengths_q": xp.asarray(LENGTHS_Q), "lengths_k": xp.asarray(LENGTHS_K)}
    options: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}
    tiles = cufa.BlockMask.of(mask_mod, 6, 4, 130, 200, block=(64, 32), xp=xp)
    for block_mask in (None, tiles):
        found = cufa.attention(*given, return_lse=True, block_mask=block_mask, **(its | options))
        assert_each_is_right(found, arrays, LENGTHS_Q, LENGTHS_K, **options)


def test_dropout(xp: ModuleType, rng: np.random.Generator) -> None:
    arrays = padded(rng, "float32", LENGTHS_Q, LENGTHS_K)
    its: dict[str, Any] = {"lengths_q": xp.asarray(LENGTHS_Q), "lengths_k": xp.asarray(LENGTHS_K)}
    found = cufa.attention(*map(xp.asarray, arrays), dropout_p=0.25, seed=5, return_lse=True, **its)
    keep = cufa.dropout_mask((6, 4, 130, 200), 0.25, 5) / 0.75
    assert_each_is_right(found, arrays, LENGTHS_Q, LENGTHS_K, keep=keep)


def test_layouts_and_ranks(xp: ModuleType, rng: np.random.Generator) -> None:
    """And a result that the caller owns, which is written everywhere."""
    arrays = padded(rng, "float32", LENGTHS_Q, LENGTHS_K, hq=1, hk=1)
    its: dict[str, Any] = {"lengths_q": xp.asarray(LENGTHS_Q), "lengths_k": xp.asarray(LENGTHS_K)}
    expected, expected_lse = map(
        to_host,
        cufa.attention(*map(xp.asarray, arrays), causal=True, return_lse=True, **its),
    )
    turned = [xp.asarray(x.swapaxes(1, 2)) for x in arrays]
    out = xp.full(turned[0].shape, 7, np.float32)
    found = cufa.attention(*turned, causal=True, layout="bshd", out=out, **its)
    assert found is out
    np.testing.assert_array_equal(to_host(out).swapaxes(1, 2), expected)
    three = [xp.asarray(x[:, 0]) for x in arrays]
    out, lse = cufa.attention(*three, causal=True, return_lse=True, **its)
    np.testing.assert_array_equal(to_host(out), expected[:, 0])
    np.testing.assert_array_equal(to_host(lse), expected_lse[:, 0])
    two = [x[1] for x in three]
    its = {name: x[1:2] for name, x in its.items()}
    out, lse = cufa.attention(*two, causal=True, return_lse=True, **its)
    np.testing.assert_allclose(to_host(out), expected[1, 0], 1e-5, 1e-6)
    assert np.isneginf(to_host(lse)[6:]).all()


def test_nothing_to_attend_to(xp: ModuleType, rng: np.random.Generator) -> None:
    """No sequences, no queries, no keys."""
    for b, sq, sk in ((0, 5, 7), (2, 0, 7), (2, 5, 0)):
        q, k, v = (xp.ones((b, 1, n, 8), np.float32) for n in (sq, sk, sk))
        lengths = xp.asarray(np.minimum(np.arange(b), sq))
        out, lse = cufa.attention(q, k, v, lengths_q=lengths, return_lse=True)
        assert out.shape == (b, 1, sq, 8)
        assert not to_host(out).any() or sk
        assert np.isneginf(to_host(lse)).all() or sk


@pytest.mark.parametrize("dtype", ["int64", "uint8", "int32"])
def test_lengths_of_any_kind(gpu: Gpu, rng: np.random.Generator, dtype: str) -> None:
    """Lengths on the host, or of other dtypes or steps, are copied; on a GPU that is played."""
    q = on_gpu(rng.standard_normal((2, 1, 4, 64)).astype(np.float16))
    for lengths in np.array([3, 4], dtype), np.array([3, 0, 4], dtype)[::2]:
        for there in lengths, on_gpu(np.repeat(lengths, 2))[::2]:
            for others in (
                {},
                {"lengths_k": there},
                {"lengths_k": on_gpu(np.array([1, 2], np.int32))},
            ):
                assert cufa.attention(q, q, q, lengths_q=there, **others) is not None
    assert len(gpu.launches) == 12
    plan: Any = cufa.explain(q, q, q, lengths_q=lengths)
    assert plan.variant.kv == "Padded"


def test_bad_lengths(xp: ModuleType) -> None:
    q, k = xp.ones((2, 1, 4, 8), np.float16), xp.ones((2, 1, 9, 8), np.float16)
    cases: tuple[tuple[Any, type[Exception], str], ...] = (
        (np.array([4]), ValueError, "lengths_q has shape"),
        (np.array([4, 5]), ValueError, r"lengths_q\[1\] is 5: it must be 0 to 4"),
        (np.array([4, -1]), ValueError, r"lengths_q\[1\] is -1: it must be 0 to 4"),
        (np.array([4.0, 3]), TypeError, "lengths_q has dtype"),
        ([4, 4], TypeError, "lengths_q must be a NumPy or a CuPy array"),
    )
    for bad, error, message in cases:
        for function in (cufa.attention, cufa.explain):
            with pytest.raises(error, match=f"^{message}"):
                function(q, k, k, lengths_q=bad)
    lengths = xp.zeros(2, np.int32)
    shared = lengths.view(np.float16).reshape(2, 1, 1, 2)
    with pytest.raises(ValueError, match="shares memory with lengths_q"):
        cufa.attention(*(q[:, :, :1, :2],) * 3, lengths_q=lengths, out=shared)
