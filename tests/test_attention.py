"""cufa.attention as its users see it: the same tests on NumPy and, with a device, on CuPy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, assert_accepted, oracle, random_inputs, to_host

import cufa
from cufa.api.options import Layout

HEAD_DIMS = (1, 8, 24, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)


def poisoned(xp: ModuleType, shape: tuple[int, ...], dtype: str) -> Any:
    """Return an array full of NaN."""
    return xp.asarray(np.full(shape, np.nan, DTYPES[dtype]))


def within_nan(
    xp: ModuleType,
    array: np.ndarray,
    before: tuple[int, ...] = (1, 1, 3, 8),
    after: tuple[int, ...] = (0, 2, 5, 16),
) -> Any:
    """View of an array's values in a larger array, whose other elements are all NaN."""
    pairs = list(zip(before, after, strict=True))
    buffer = np.full(
        [n + i + j for n, (i, j) in zip(array.shape, pairs, strict=True)], np.nan, array.dtype
    )
    place = tuple(slice(i, i + n) for n, (i, _) in zip(array.shape, pairs, strict=True))
    buffer[place] = array
    return xp.asarray(buffer)[place]


def attend(
    xp: ModuleType, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Run on `xp` from host arrays into a poisoned `out`; return host arrays."""
    out = poisoned(xp, (*q.shape[:-1], v.shape[-1]), q.dtype.name)
    lse_like = xp.full(q.shape[:-1], np.nan, np.float32)
    del lse_like  # the allocator gives this memory, NaN and all, to the LSE
    arrays = (xp.asarray(x) for x in (q, k, v))
    result, lse = cufa.attention(*arrays, out=out, return_lse=True, **options)
    assert result is out
    return to_host(result), to_host(lse)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(xp: ModuleType, rng: np.random.Generator, d: int, dtype: str) -> None:
    for causal in (False, True):
        for hq, hk in ((2, 2), (6, 3), (5, 1)):
            q, k, v = random_inputs(rng, dtype, b=2, hq=hq, hk=hk, sq=67, sk=93, d=d)
            out, lse = attend(xp, q, k, v, causal=causal)
            what = f"{hq} and {hk} heads, causal {causal}"
            assert_accepted(out, lse, q, k, v, causal=causal, what=what)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(xp: ModuleType, rng: np.random.Generator, causal: bool, dtype: str) -> None:
    lengths = [(1, 1), (1, 300), (300, 1), (129, 257), (257, 129), (17, 128), (128, 17), (321, 321)]
    for sq, sk in lengths:
        q, k, v = random_inputs(rng, dtype, hq=2, sq=sq, sk=sk, d=64)
        out, lse = attend(xp, q, k, v, causal=causal)
        assert_accepted(out, lse, q, k, v, causal=causal, what=f"{sq} queries, {sk} keys")


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("hq", "hk"), [(14, 2), (8, 1), (12, 4), (7, 7), (130, 1)])
def test_shared_kv_heads(
    xp: ModuleType, rng: np.random.Generator, hq: int, hk: int, dtype: str
) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=hq, hk=hk, sq=37, sk=71, d=32)
    out, lse = attend(xp, q, k, v, causal=True)
    assert_accepted(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("d", "dv"), [(64, 128), (192, 128), (128, 59), (1, 256), (256, 1)])
def test_head_dim_of_v(
    xp: ModuleType, rng: np.random.Generator, d: int, dv: int, dtype: str
) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=67, sk=93, d=d, dv=dv)
    out, lse = attend(xp, q, k, v, causal=True)
    assert_accepted(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("scale", [0.5, 1, 0, -0.3, 2.0**-30])
def test_scale(xp: ModuleType, rng: np.random.Generator, scale: float, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=2, sq=67, sk=93, d=64)
    for causal in (False, True):
        out, lse = attend(xp, q, k, v, scale=scale, causal=causal)
        assert_accepted(out, lse, q, k, v, scale=scale, causal=causal)


def test_scores_of_hundreds(xp: ModuleType, rng: np.random.Generator) -> None:
    """The maximum must be taken out of the exponentials, over all keys and not the last ones."""
    q, k, v = random_inputs(rng, "float32", sq=65, sk=301, d=64)
    ramp = np.linspace(-40, 40, 301, dtype=np.float32)[:, None]
    for keys in (k + ramp, k + ramp[::-1]):
        near = np.abs(q)
        out, lse = attend(xp, near, keys, v)
        assert_accepted(out, lse, near, keys, v)


@pytest.mark.parametrize(("value", "scale"), [(300, 4.0), (65504, 2.0**-14)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_scores_of_float16(
    xp: ModuleType, sign: int, value: float, scale: float
) -> None:
    """All are the same, some 1e8, so that each row is the mean of v."""
    q, k = (np.full((1, 2, n, 256), value, np.float16) for n in (5, 8))
    v = np.arange(2 * 8 * 8).reshape(1, 2, 8, 8).astype(np.float16)
    out, lse = attend(xp, q, k, v, scale=sign * scale)
    # P are not 1 here, and rounded.
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(2, keepdims=True), out.shape), 2**-9)
    np.testing.assert_allclose(lse, sign * scale * 256 * value**2, 1e-5)


@pytest.mark.parametrize("scale", [2.0**-4, 2.0**33, 2.0**63])
@pytest.mark.parametrize("sign", [1, -1])
def test_larger_scores_of_float16(xp: ModuleType, sign: int, scale: float) -> None:
    """Right, or NaN."""
    q, k = (np.full((1, 2, n, 256), 65504, np.float16) for n in (5, 8))
    v = np.arange(2 * 8 * 8).reshape(1, 2, 8, 8).astype(np.float16)
    out, _ = attend(xp, q, k, v, scale=sign * scale)
    expected = np.broadcast_to(v.mean(2, keepdims=True), out.shape)
    assert np.all(np.isclose(out, expected, 2**-9) | np.isnan(out))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_layout_bshd(xp: ModuleType, rng: np.random.Generator, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=6, hk=3, sq=67, sk=93, d=64, dv=32)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    device = [xp.asarray(x) for x in swapped]
    out, lse = cufa.attention(*device, layout="bshd", causal=True, return_lse=True)
    assert out.shape == (2, 67, 6, 32)
    assert lse.shape == (2, 6, 67)
    assert_accepted(to_host(out).swapaxes(1, 2), lse, q, k, v, causal=True)
    given = poisoned(xp, out.shape, dtype)
    assert cufa.attention(*device, layout="bshd", causal=True, out=given) is given
    assert_accepted(to_host(given).swapaxes(1, 2), None, q, k, v, causal=True)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_missing_axes(xp: ModuleType, rng: np.random.Generator, layout: Layout) -> None:
    q, k, v = random_inputs(rng, "float16", b=3, sq=67, sk=93, d=64, dv=40)
    three = [xp.asarray(x[:, 0]) for x in (q, k, v)]
    out, lse = cufa.attention(*three, layout=layout, return_lse=True)
    assert out.shape == (3, 67, 40)
    assert lse.shape == (3, 67)
    assert_accepted(to_host(out)[:, None], to_host(lse)[:, None], q, k, v)
    two = [x[1] for x in three]
    out, lse = cufa.attention(*two, layout=layout, return_lse=True)
    assert out.shape == (67, 40)
    assert lse.shape == (67,)
    one = [x[1:2] for x in (q, k, v)]
    assert_accepted(to_host(out)[None, None], to_host(lse)[None, None], *one)


def test_return_without_lse(xp: ModuleType, rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", sq=5, d=8)
    out = cufa.attention(*(xp.asarray(x) for x in (q, k, v)))
    assert isinstance(out, xp.ndarray)
    assert_accepted(out, None, q, k, v)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_around_the_arrays_is_never_read(
    xp: ModuleType, rng: np.random.Generator, causal: bool, dtype: str
) -> None:
    for d, dv in ((64, 64), (40, 24)):
        q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=67, sk=93, d=d, dv=dv)
        views = [within_nan(xp, x) for x in (q, k, v)]
        out, lse = cufa.attention(*views, causal=causal, return_lse=True)
        assert_accepted(out, lse, q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_only_out_is_written(xp: ModuleType, rng: np.random.Generator, dtype: str) -> None:
    for before, after in (((1, 1, 3, 8), (0, 2, 5, 16)), ((1, 1, 3, 1), (0, 2, 5, 2))):
        q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=67, sk=93, d=40, dv=59)
        inner = np.full((2, 4, 67, 59), np.nan, q.dtype)
        out = within_nan(xp, inner, before, after)
        cufa.attention(*(xp.asarray(x) for x in (q, k, v)), out=out)
        assert_accepted(out, None, q, k, v)
        buffer = to_host(out.base).astype(np.float32)
        assert np.isfinite(buffer).sum() == inner.size


STRIDES: dict[str, Any] = {
    "transposed": lambda xp, x: xp.asarray(x.swapaxes(-1, -2).copy()).swapaxes(-1, -2),
    "heads inside": lambda xp, x: xp.asarray(x.transpose(2, 0, 1, 3).copy()).transpose(1, 2, 0, 3),
    "reversed": lambda xp, x: xp.asarray(x[:, ::-1, ::-1].copy())[:, ::-1, ::-1],
    "reversed dims": lambda xp, x: xp.asarray(x[..., ::-1].copy())[..., ::-1],
    "every third row": lambda xp, x: xp.asarray(np.repeat(x, 3, axis=2))[:, :, ::3],
    "every second element": lambda xp, x: xp.asarray(np.repeat(x, 2, axis=3))[..., ::2],
    "one element in": lambda xp, x: within_nan(xp, x, (0, 0, 0, 1), (0, 0, 0, 0)),
    "begins one element in": lambda xp, x: xp.asarray(np.append(x[0, 0, 0, :1], x))[1:].reshape(
        x.shape
    ),
}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("view", sorted(STRIDES))
def test_strides(xp: ModuleType, rng: np.random.Generator, view: str, dtype: str) -> None:
    for d in (64, 59):
        q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=67, sk=93, d=d)
        arrays = [STRIDES[view](xp, x) for x in (q, k, v)]
        out, lse = cufa.attention(*arrays, causal=True, return_lse=True)
        assert_accepted(out, lse, q, k, v, causal=True, what=f"head_dim {d}")
        given = STRIDES[view](xp, np.full(q.shape, np.nan, q.dtype))
        assert cufa.attention(*arrays, causal=True, out=given) is given
        assert_accepted(given, None, q, k, v, causal=True, what=f"head_dim {d}, out")
        for device, host in zip(arrays, (q, k, v), strict=True):
            np.testing.assert_array_equal(to_host(device), host)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_broadcast_keys(xp: ModuleType, rng: np.random.Generator, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=3, hq=4, sq=67, sk=93, d=64)
    k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (k, v))
    device = [xp.broadcast_to(xp.asarray(x[:1, :1].copy()), x.shape) for x in (k, v)]
    out, lse = cufa.attention(xp.asarray(q), *device, return_lse=True)
    assert_accepted(out, lse, q, k, v)


def test_packed_qkv_and_out(xp: ModuleType, rng: np.random.Generator) -> None:
    """Projections of one product are views of one buffer; so may the result be."""
    q, k, v = random_inputs(rng, "float16", b=2, hq=3, sq=67, d=64)
    slots = [x.swapaxes(1, 2) for x in (q, k, v, np.full(q.shape, np.nan, q.dtype))]
    packed = xp.asarray(np.stack(slots, axis=2))
    views = [packed[:, :, i] for i in range(4)]
    cufa.attention(*views[:3], out=views[3], layout="bshd")
    assert_accepted(to_host(views[3]).swapaxes(1, 2), None, q, k, v)
    np.testing.assert_array_equal(to_host(packed)[:, :, :3], np.stack(slots[:3], axis=2))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_rows_without_a_key(xp: ModuleType, rng: np.random.Generator, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=2, sq=200, sk=30, d=64)
    out, lse = attend(xp, q, k, v, causal=True)
    assert np.all(out[:, :, :170] == 0)
    assert np.all(lse[:, :, :170] == -np.inf)
    assert np.all(np.isfinite(lse[:, :, 170:]))
    assert_accepted(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_at_all(xp: ModuleType, rng: np.random.Generator, causal: bool, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=67, sk=0, d=64, dv=32)
    out, lse = attend(xp, q, k, v, causal=causal)
    assert out.shape == (2, 4, 67, 32)
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(
    ("b", "hq", "hk", "sq"), [(0, 4, 2, 5), (2, 4, 2, 0), (2, 0, 2, 5), (2, 0, 0, 5), (0, 0, 0, 0)]
)
def test_empty_results(
    xp: ModuleType, rng: np.random.Generator, b: int, hq: int, hk: int, sq: int, dtype: str
) -> None:
    for causal in (False, True):
        q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=7, d=64, dv=32)
        out, lse = attend(xp, q, k, v, causal=causal)
        assert out.shape == (b, hq, sq, 32)
        assert lse.shape == (b, hq, sq)
        assert cufa.attention(*(xp.asarray(x) for x in (q, k, v))).shape == out.shape


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_identical_calls_are_bit_identical(
    xp: ModuleType, rng: np.random.Generator, dtype: str
) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=333, sk=501, d=64)
    first = attend(xp, q, k, v, causal=True)
    for _ in range(3):
        again = attend(xp, q, k, v, causal=True)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)


def test_calls_that_differ_in_one_thing_do_not_share_a_result(
    xp: ModuleType, rng: np.random.Generator
) -> None:
    """Memory of a call must not be used for another one."""
    q, k, v = random_inputs(rng, "float16", b=2, hq=4, sq=64, d=64)
    device = [xp.asarray(x) for x in (q, k, v)]
    for _ in range(2):
        for causal in (False, True):
            for scale in (None, 0.5, -0.5):
                out, lse = cufa.attention(*device, causal=causal, scale=scale, return_lse=True)
                assert_accepted(out, lse, q, k, v, causal=causal, scale=scale)
                only = cufa.attention(*device, causal=causal, scale=scale)
                np.testing.assert_array_equal(to_host(only), to_host(out))
    # As bshd the same arrays have 64 heads of 4 positions.
    out = cufa.attention(*device, layout="bshd")
    assert_accepted(to_host(out).swapaxes(1, 2), None, *(x.swapaxes(1, 2) for x in (q, k, v)))


def test_nan_in_keys_reaches_the_rows_that_see_it(xp: ModuleType, rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", hq=2, sq=67, d=64)
    expected, expected_lse = oracle(q, k, v, causal=True)
    k[0, 1, 40] = np.nan
    out, lse = attend(xp, q, k, v, causal=True)
    sees = np.zeros((1, 2, 67), bool)
    sees[0, 1, 40:] = True
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(sees[..., None], out.shape))
    np.testing.assert_array_equal(np.isnan(lse), sees)
    np.testing.assert_allclose(out[~sees], expected[~sees], atol=1e-5)
    np.testing.assert_allclose(lse[~sees], expected_lse[~sees], atol=1e-5)


# --- errors: raised before anything is written; test_problem.py has the whole list ---

_q = np.ones((2, 4, 5, 8), np.float16)
_k = np.ones((2, 2, 7, 8), np.float16)

ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({n: np.ones((2, 4, 5, 8)) for n in "qkv"}, TypeError, "q has dtype float64"),
    "mixed dtypes": ({"k": _k.astype(np.float32)}, TypeError, "k has dtype float32"),
    "out dtype": ({"out": np.ones((2, 4, 5, 8), np.float32)}, TypeError, "out has dtype float32"),
    "no array": ({"v": [[1.0]]}, TypeError, "v must be"),
    "out no array": ({"out": [[1.0]]}, TypeError, "out must be"),
    "rank": ({"q": _q[None]}, ValueError, r"q has shape \(1, 2, 4, 5, 8\)"),
    "ranks": ({"k": _k[0]}, ValueError, r"k has shape \(2, 7, 8\)"),
    "heads": ({"q": _q[:, :3]}, ValueError, r"q has shape \(2, 3, 5, 8\)"),
    "lengths": ({"v": _k[:, :, :6]}, ValueError, r"v has shape \(2, 2, 6, 8\)"),
    "batch": ({"k": _k[:1]}, ValueError, r"k has shape \(1, 2, 7, 8\)"),
    "head_dim": ({"k": _k[..., :7]}, ValueError, r"k has shape \(2, 2, 7, 7\)"),
    "head_dim_v": ({"v": np.ones((2, 2, 7, 257), np.float16)}, ValueError, "v .* not 257"),
    "out shape": ({"out": _q[..., :7]}, ValueError, r"out has shape \(2, 4, 5, 7\)"),
    "scale": ({"scale": float("nan")}, ValueError, "scale"),
    "scale limit": ({"scale": 1e35}, ValueError, r"scale must be less than 2\^64 in magnitude"),
    "scale type": ({"scale": "1"}, TypeError, "scale"),
    "scale bool": ({"scale": True}, TypeError, "scale"),
    "causal": ({"causal": 1}, TypeError, "causal"),
    "layout": ({"layout": "sbhd"}, ValueError, "layout"),
    "layout type": ({"layout": None}, TypeError, "layout"),
    "kernel": ({"kernel": "fa9"}, ValueError, "kernel"),
}


@pytest.mark.parametrize("case", sorted(ERRORS))
def test_errors(xp: ModuleType, case: str) -> None:
    changes, error, message = ERRORS[case]
    out = xp.asarray(np.full((2, 4, 5, 8), 7, np.float16))
    legal = {"q": xp.asarray(_q), "k": xp.asarray(_k), "v": xp.asarray(_k), "out": out}
    # Legal calls that are equal to illegal ones, as True == 1 is, must not let those pass.
    for options in ({"causal": True}, {"scale": 1.0}):
        cufa.attention(**legal, **options)
    out[...] = 7
    call = {
        **legal,
        **{n: xp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in changes.items()},
    }
    for function in (cufa.attention, cufa.explain):
        with pytest.raises(error, match=f"^{message}"):
            function(**call)
    assert np.all(to_host(out) == 7)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_that_overlaps_an_input(xp: ModuleType, name: str) -> None:
    arrays = {n: xp.asarray(np.ones((2, 4, 5, 8), np.float16)) for n in "qkv"}
    for _ in range(2):
        cufa.attention(**arrays, out=xp.zeros((2, 4, 5, 8), np.float16))
        with pytest.raises(ValueError, match=f"^out .* shares memory with {name}"):
            cufa.attention(**arrays, out=arrays[name])


def test_explain_is_one_line(xp: ModuleType, rng: np.random.Generator) -> None:
    q, k, v = (xp.asarray(x) for x in random_inputs(rng, "float16", b=2, hq=4, hk=2, sq=7, d=64))
    for causal in (False, True):
        line = str(cufa.explain(q, k, v, causal=causal))
        assert line
        assert "\n" not in line
