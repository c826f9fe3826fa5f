"""`attention_backward`: each feature alone, arrays of all kinds, and what is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import score_arrays
import score_mods
from drawn_values import DRAWINGS
from reference import DTYPES, oracle, random_inputs
from reference_backward import ExpectedGradients, gradients_of

import cufa
from cufa.features import VALUES

SHAPES = ((2, 4, 2, 67, 131), (1, 6, 1, 129, 90), (2, 2, 2, 77, 77))
HEAD_DIMS = ((24, 24), (64, 40), (128, 128))

Options = dict[str, Any]

NUMBERS = np.arange(11)
bias = np.zeros(11, np.float32)  # as an argument of the calls


def features(rng: np.random.Generator, name: str, sizes: Any) -> Options:
    """Return the options of a call with a feature, by name."""
    if name.startswith("function "):
        return score_mods.made(rng, name.removeprefix("function "), sizes, np.asarray)[0]
    if name in VALUES:
        drops = {"seed": 2**40 + 7} if name == "dropout_p" else {}
        return {name: DRAWINGS[name].draw(rng, sizes[3], sizes[4]), **drops}
    return score_arrays.options_of(rng, name, sizes)


NAMES = (*VALUES, *score_arrays.FEATURES, *(f"function {name}" for name in score_mods.FEATURES))


def wrt_of(options: Options) -> tuple[str, ...]:
    return ("q", "k", "v", *(name for name in ("bias", "sinks") if name in options))


def formula_options(options: Options, sizes: Any) -> Options:
    """Return what the oracle is told."""
    found = {name: x for name, x in options.items() if name not in ("seed", "layout")}
    if "dropout_p" in options:
        b, hq, _, sq, sk = sizes
        p = found.pop("dropout_p")
        found["keep"] = cufa.dropout_mask((b, hq, sq, sk), p, options["seed"]) / (1 - p)
    return found


def differentiated(dout: Any, q: Any, k: Any, v: Any, **options: Any) -> dict[str, Any]:
    """Call both passes; return gradients by name."""
    wrt = options.pop("wrt", wrt_of(options))
    out, lse = cufa.attention(q, k, v, return_lse=True, **options)
    return gradients_of(wrt, cufa.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **options))


def drawn(
    rng: np.random.Generator, dtype: str, sizes: Any, d: int = 24, dv: int = 24
) -> list[np.ndarray]:
    """Return dout, q, k and v."""
    b, hq, hk, sq, sk = sizes
    q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
    dout = rng.standard_normal((b, hq, sq, dv), np.float32).astype(DTYPES[dtype])
    return [dout, q, k, v]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_feature(rng: np.random.Generator, dtype: str, name: str) -> None:
    for sizes, dims in zip(SHAPES, HEAD_DIMS, strict=True):
        arrays = drawn(rng, dtype, sizes, *dims)
        options = features(rng, name, sizes)
        expected = ExpectedGradients(*arrays, **formula_options(options, sizes))
        expected.assert_accepts(differentiated(*arrays, **options), f"{sizes}")


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_against_differences(rng: np.random.Generator, name: str) -> None:
    """Gradients agree with differences of the forward pass in float64, along random directions."""
    sizes = (2, 4, 2, 19, 37)
    dout, *tensors = drawn(rng, "float32", sizes, 12, 20)
    options = features(rng, name, sizes)
    of_formula = formula_options(options, sizes)
    found = differentiated(dout, *tensors, **options)
    arrays = dict(zip("qkv", tensors, strict=True))
    arrays |= {name: options[name] for name in found.keys() - arrays.keys()}
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}

    def loss(**moved: np.ndarray) -> float:
        given = wide | moved
        tensors = [given.pop(name) for name in "qkv"]
        return float((oracle(*tensors, **(of_formula | given))[0] * dout).sum())

    for each, gradient in found.items():
        step = 1e-6 * rng.standard_normal(wide[each].shape)
        difference = (loss(**{each: wide[each] + step}) - loss(**{each: wide[each] - step})) / 2
        along = float((gradient.astype(np.float64) * step).sum())
        rough = 2e-2 if gradient.dtype != np.float32 else 1e-4
        scale = np.linalg.norm(gradient.astype(np.float64)) * 1e-6
        assert abs(difference - along) <= rough * (scale + 1e-12), each


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_several_tiles(rng: np.random.Generator, dtype: str, causal: bool) -> None:
    """Queries and keys take several, with correlated rows: neighbours resemble each other.

    Scores stay below 16: with larger ones a few keys have nearly all weights, and the largest
    error of their few sums is a matter of chance.
    """
    sizes = (1, 2, 1, 1061, 773)
    arrays = []
    for x in drawn(rng, dtype, sizes, 40, 33):
        smooth = np.cumsum(x.astype(np.float32), axis=2) / 32 + x.astype(np.float32) / 8
        arrays.append(smooth.astype(x.dtype))
    arrays[2] = (arrays[2] + arrays[1][:, :1, :773]).astype(DTYPES[dtype])  # K is like Q
    expected = ExpectedGradients(*arrays, causal=causal)
    expected.assert_accepts(differentiated(*arrays, causal=causal))


@pytest.mark.parametrize("d", [1, 3, 64, 255, 256])
def test_head_dims(rng: np.random.Generator, d: int) -> None:
    sizes = (1, 4, 2, 45, 83)
    arrays = drawn(rng, "float32", sizes, d, 257 - d)
    ExpectedGradients(*arrays, scale=0.3).assert_accepts(differentiated(*arrays, scale=0.3))


@pytest.mark.parametrize("scale", [0.0, -0.4, 1.0])
def test_scales(rng: np.random.Generator, scale: float) -> None:
    sizes = (1, 4, 2, 45, 83)
    arrays = drawn(rng, "bfloat16", sizes)
    options: Options = {"scale": scale, "causal": True}
    ExpectedGradients(*arrays, **options).assert_accepts(differentiated(*arrays, **options))


WRT = ("q", "k", "v", "bias", "sinks")


def test_what_is_not_asked_for_changes_nothing(rng: np.random.Generator) -> None:
    """Gradients alone, in any order, have the bits that they have together."""
    sizes = (2, 4, 2, 67, 131)
    arrays = drawn(rng, "bfloat16", sizes)
    options: Options = {
        "bias": score_arrays.shared_bias(rng, sizes),
        "sinks": score_arrays.sinks(rng, sizes),
        **{"dropout_p": 0.2, "seed": 3, "causal": True},
    }
    together = differentiated(*arrays, **options, wrt=WRT)
    for wrt in (*((name,) for name in WRT), ("sinks", "v", "q"), ["k", "bias"]):
        for name, gradient in differentiated(*arrays, **options, wrt=wrt).items():
            assert gradient.tobytes() == together[name].tobytes(), (wrt, name)
    out, lse = cufa.attention(*arrays[1:], **options, return_lse=True)
    again = cufa.attention_backward(*(*arrays, out, lse), **options, wrt=WRT, deterministic=True)
    for name, gradient in zip(WRT, again, strict=True):
        assert gradient.tobytes() == together[name].tobytes(), name


@pytest.mark.parametrize("ndim", [2, 3])
def test_arrays_of_fewer_axes(rng: np.random.Generator, ndim: int) -> None:
    sizes = (1 if ndim == 2 else 3, 1, 1, 40, 50)
    arrays = drawn(rng, "float32", sizes)
    bias = score_arrays.bias(rng, sizes, np.float16)
    expected = differentiated(*arrays, bias=bias, causal=True)
    axes = (0, 0) if ndim == 2 else (slice(None), 0)
    found = differentiated(*(x[axes] for x in arrays), bias=bias[axes], causal=True)
    for name, gradient in found.items():
        assert gradient.tobytes() == expected[name].tobytes(), name
        assert gradient.shape == expected[name][axes].shape, name


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_any_strides_and_outputs(rng: np.random.Generator, layout: str) -> None:
    """Arrays that are read and written have any strides, the outputs full of NaN; the same bits."""
    sizes = (2, 4, 2, 67, 131)
    contiguous = drawn(rng, "bfloat16", sizes, 24, 40)
    expected = differentiated(*contiguous, causal=True)
    out, lse = cufa.attention(*contiguous[1:], causal=True, return_lse=True)
    order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)

    def laid(x: np.ndarray) -> np.ndarray:
        """Return a view with gaps and steps back, in the axes of the layout."""
        wide = np.full((*x.shape[1:], 2 * x.shape[0], 3), np.nan, x.dtype)
        view = np.moveaxis(wide[..., ::-2, 1], -1, 0)
        view[...] = x
        return view.transpose(order)

    arrays = [laid(x) for x in (*contiguous, out)]
    strided_lse = np.repeat(lse, 2, axis=-1)[..., ::2]
    places = [laid(np.full_like(x, np.nan)) for x in contiguous[1:]]
    given = dict(zip(("dq", "dk", "dv"), places, strict=True))
    call: Any = cufa.attention_backward
    found = call(*arrays, strided_lse, causal=True, layout=layout, **given)
    for name, gradient, place in zip("qkv", found, places, strict=True):
        assert gradient is place
        same = np.ascontiguousarray(gradient.transpose(order))
        assert same.tobytes() == expected[name].tobytes(), name
        around = place.base if place.base.base is None else place.base.base
        written = np.isfinite(around.astype(np.float32)).sum()
        assert written == gradient.size, name


def test_broadcast_keys_and_values(rng: np.random.Generator) -> None:
    """Each place has its own gradient, as in a copy."""
    dout, q, k, v = drawn(rng, "float32", (3, 4, 2, 30, 41))
    k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (k, v))
    dout = np.broadcast_to(dout[:1], dout.shape)
    found = differentiated(dout, q, k, v)
    expected = differentiated(dout.copy(), q, k.copy(), v.copy())
    for name, gradient in found.items():
        assert gradient.tobytes() == expected[name].tobytes(), name
        assert gradient.flags.writeable


def test_rows_that_see_no_key(rng: np.random.Generator) -> None:
    """They have no gradient, whatever dout is there, and give none."""
    sizes = (1, 4, 2, 60, 40)
    dout, q, k, v = drawn(rng, "float32", sizes)
    clean = differentiated(dout, q, k, v, causal=True)
    dout[:, :, :20], q[:, :, :20] = np.nan, np.inf
    found = differentiated(dout, q, k, v, causal=True)
    assert not found["q"][:, :, :20].any()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, clean[name], rtol=1e-5, atol=1e-6)


def test_nan_in_dout_of_rows_that_see_no_key(rng: np.random.Generator) -> None:
    """It does not reach the gradient of sinks, nor that of keys that a bias hides."""
    dout, q, k, v = drawn(rng, "float32", (1, 2, 2, 9, 7))
    hides = np.zeros((9, 7), np.float32)
    hides[4] = -np.inf
    options: list[dict[str, Any]] = [
        {"mask": hides == 0, "sinks": np.zeros(2, np.float32), "wrt": ("q", "k", "v", "sinks")},
        {"bias": hides},
    ]
    for each in options:
        clean = differentiated(dout, q, k, v, **each)
        bad = dout.copy()
        bad[:, :, 4] = np.nan
        for name, gradient in differentiated(bad, q, k, v, **each).items():
            np.testing.assert_allclose(gradient, clean[name], rtol=1e-5, atol=1e-6)


def test_memory_is_bounded(rng: np.random.Generator) -> None:
    """Tiles of queries keep no scores, also where a function is differentiated by an array."""
    q, k, v = random_inputs(rng, "float32", sq=8001, sk=300, d=8)
    factors = np.ones(len(q[0, 0]), np.float32)
    by_factors = {"score_mod": lambda s, b, h, i, j: s * factors[i], "wrt": ("q", "factors")}
    options: tuple[Options, ...] = {}, by_factors
    for more in options:
        out, lse = cufa.attention(q, k, v, return_lse=True)
        tracemalloc.start()
        cufa.attention_backward(out, q, k, v, out, lse, **more)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 6 << 20  # the scores of one tile of keys are 8 MB


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_hidden_reaches_nothing(rng: np.random.Generator, bad: float) -> None:
    """Neither of keys and values, nor of queries and dout."""
    arrays = drawn(rng, "float32", (2, 4, 2, 70, 70))
    mask = np.broadcast_to(np.arange(70) != 33, (70, 70))
    for options, spoilt, clean in (
        ({"mask": mask}, ("k", "v"), {"q": slice(None), "k": slice(None), "v": slice(None)}),
        ({"causal": True}, ("k", "v"), {"q": slice(33)}),
        ({"causal": True}, ("dout", "q"), {"q": slice(33), "k": slice(34, 70), "v": slice(34, 70)}),
    ):
        expected = differentiated(*arrays, **options)
        given = dict(zip(("dout", "q", "k", "v"), (x.copy() for x in arrays), strict=True))
        for name in spoilt:
            given[name][:, :, 33] = bad
        found = differentiated(**given, **options)
        for name, rows in clean.items():
            near, its = (x[name][:, :, rows] for x in (expected, found))
            np.testing.assert_allclose(its, near, rtol=1e-5, atol=1e-6)
        if "mask" in options:
            assert not found["k"][:, :, 33].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["lengths_k", "lengths_q", "both"])
def test_lengths_of_padded_sequences(rng: np.random.Generator, dtype: str, given: str) -> None:
    """Data behind a length is not read, and has no gradient."""
    sizes = (4, 4, 2, 45, 90)
    dout, q, k, v = drawn(rng, dtype, sizes)
    bias, sinks = score_arrays.bias(rng, sizes, np.float32), score_arrays.sinks(rng, sizes)
    keys = np.array([90, 1, 0, 57]) if given != "lengths_q" else np.full(4, 90)
    rows = np.array([45, 3, 20, 0]) if given != "lengths_k" else np.full(4, 45)
    for i, (n, m) in enumerate(zip(rows, keys, strict=True)):
        q[i, :, n:], dout[i, :, n:], bias[i, :, n:] = np.nan, np.nan, np.nan
        k[i, :, m:], v[i, :, m:], bias[i, :, :, m:] = np.nan, np.nan, np.nan
    lengths = {"lengths_k": keys, "lengths_q": rows}
    lengths = lengths if given == "both" else {given: lengths[given]}
    options: Options = {"causal": True, "sinks": sinks, "dropout_p": 0.1, "seed": 5}
    found = differentiated(dout, q, k, v, bias=bias, **lengths, **options)
    total = np.zeros_like(sinks)
    for i, (n, m) in enumerate(zip(rows.tolist(), keys.tolist(), strict=True)):
        one = slice(i, i + 1)
        its: Options = {"causal": True, "sinks": sinks, "bias": bias[one, :, :n, :m]}
        keep = cufa.dropout_mask((4, 4, 45, 90), 0.1, 5)[one, :, :n, :m] / 0.9
        if n and m:
            expected = ExpectedGradients(
                *(dout[one, :, :n], q[one, :, :n], k[one, :, :m], v[one, :, :m]), keep=keep, **its
            )
            total += expected.exact["sinks"].astype(np.float32)
            ends = {"q": n, "k": m, "v": m}
            parts = {name: found[name][one, :, :end] for name, end in ends.items()}
            parts["bias"] = found["bias"][one, :, :n, :m]
            expected.assert_accepts(parts, f"lengths {n}, {m}")
        for name, end in (("q", n), ("k", m), ("v", m), ("bias", n)):
            assert not found[name][i, :, end:].any()
        assert not found["bias"][i, :, :, m:].any()
    rough = 1e-4 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found["sinks"], total, rtol=rough, atol=rough)


@pytest.mark.parametrize("name", ["none", "all", "function all", "dropout_p"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_in_a_row(rng: np.random.Generator, dtype: str, name: str) -> None:
    """As each alone; runs of equal lengths, empty ones, unused keys, and rows that none has."""
    rows, keys = np.array([30, 30, 0, 7, 40]), np.array([55, 55, 20, 0, 33])
    used = np.array([50, 50, 20, 0, 33])
    sizes = (len(rows), 4, 2, 40, 55)
    options: Options = {} if name == "none" else features(rng, name, sizes)
    d, dv = 24, 17
    q = rng.standard_normal((rows.sum(), 4, d), np.float32).astype(DTYPES[dtype])
    dout = rng.standard_normal((rows.sum(), 4, dv), np.float32).astype(DTYPES[dtype])
    k, v = (
        rng.standard_normal((keys.sum() + 3, 2, n), np.float32).astype(DTYPES[dtype])
        for n in (d, dv)
    )
    ends_q, ends_k = (np.append(0, np.cumsum(x)) for x in (rows, keys))
    for end, n, m in zip(ends_k[1:], keys, used, strict=True):
        k[end - n + m : end], v[end - n + m : end] = np.nan, np.nan
    k[keys.sum() :], v[keys.sum() :] = np.nan, np.nan
    offsets: Options = {"seqused_k": used, "max_seqlen_q": 40, "max_seqlen_k": 55}
    out, lse = cufa.attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, **offsets, **options)
    places = {
        name: np.full_like(x, np.nan) for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)
    }
    wrt = wrt_of(options)
    call: Any = cufa.attention_varlen_backward
    arrays = [dout, q, k, v, out, lse, ends_q, ends_k]
    found = gradients_of(wrt, call(*arrays, wrt=wrt, **offsets, **options, **places))
    expected = {name: np.zeros(x.shape) for name, x in found.items()}
    for i, (row, key) in enumerate(zip(ends_q[:-1], ends_k[:-1], strict=True)):
        its = _of_sequence(options, i, int(rows[i]), int(used[i]), sizes)
        mine, theirs = slice(row, row + rows[i]), slice(key, key + used[i])
        arrays = [x[mine].swapaxes(0, 1)[None] for x in (dout, q)]
        arrays += [x[theirs].swapaxes(0, 1)[None] for x in (k, v)]
        if rows[i] == 0 or used[i] == 0:
            continue
        exact = ExpectedGradients(*arrays, **its)
        parts = {"q": found["q"][mine], "k": found["k"][theirs], "v": found["v"][theirs]}
        exact.assert_accepts({n: x.swapaxes(0, 1)[None] for n, x in parts.items()}, f"of {i}")
        for n, span in (("q", mine), ("k", theirs), ("v", theirs)):
            expected[n][span] = exact.exact[n][0].swapaxes(0, 1)
        if "bias" in options:
            of_bias = exact.exact["bias"]
            rows_of_bias, keys_of_bias = of_bias.shape[-2:]
            expected["bias"][..., :rows_of_bias, :keys_of_bias] += of_bias
        if "sinks" in options:
            expected["sinks"] += exact.exact["sinks"]
    for n, gradient in found.items():
        rough = 1e-4 if dtype == "float32" == gradient.dtype else 6e-2
        np.testing.assert_allclose(
            gradient.astype(np.float64), expected[n], rtol=rough, atol=rough, err_msg=n
        )
    assert not found["k"][keys.sum() :].any()


def _of_sequence(options: Options, i: int, rows: int, keys: int, sizes: Any) -> Options:
    """Return what the oracle is told of one sequence."""
    found = formula_options(options, sizes)
    for name in ("bias", "mask"):
        array = found.get(name)
        if array is not None:
            array = array[i : i + 1] if array.ndim == 4 and array.shape[0] > 1 else array
            array = array[..., :rows, :] if array.shape[-2] > 1 else array
            found[name] = array[..., :keys] if array.shape[-1] > 1 else array
    if "keep" in found:
        found["keep"] = found["keep"][i : i + 1, :, :rows, :keys]
    for name in ("score_mod", "mask_mod"):
        function = found.get(name)
        if function is not None:
            lead = 1 if name == "score_mod" else 0

            def moved(*args: Any, of: Any = function, lead: int = lead) -> Any:
                return of(*args[:lead], args[lead] + i, *args[lead + 1 :])

            found[name] = moved
    return found


@pytest.mark.parametrize("hiding", [-1e9, -1e30, float(np.finfo(np.float32).min), 3e4])
def test_scores_that_are_all_large(rng: np.random.Generator, hiding: float) -> None:
    """A row of which all scores are lowered alike has the mean of its values, and its gradient."""
    sizes = (1, 2, 1, 40, 70)
    dout, q, k, v = drawn(rng, "float32", sizes)
    q[:, :, 5] = 0
    bias = np.zeros((40, 70), np.float32)
    bias[9, ::2], bias[11] = hiding, -np.inf
    rough = 1e-5 if hiding < 0 else 2e-2  # float32 has 2^-10 of the scores of a row
    exact = ExpectedGradients(dout, q, k, v, bias=bias).exact
    lowered = bias.copy()
    lowered[5] = hiding
    for name, gradient in differentiated(dout, q, k, v, bias=lowered).items():
        np.testing.assert_allclose(gradient, exact[name], rtol=1e-4, atol=rough, err_msg=name)
    sinks = np.array([-np.inf, 0], np.float32)
    found = differentiated(dout, q, k, v, bias=lowered, sinks=sinks)
    exact = ExpectedGradients(dout, q, k, v, bias=lowered, sinks=sinks).exact
    for name in ("k", "v", "sinks"):
        np.testing.assert_allclose(found[name], exact[name], rtol=1e-4, atol=rough, err_msg=name)


def test_tiles_that_a_block_mask_hides_are_skipped(rng: np.random.Generator) -> None:
    arrays = drawn(rng, "float32", (1, 2, 1, 1024, 1024), 16, 16)
    documents = np.repeat(np.arange(8), 128)
    calls = []

    def within(b: Any, h: Any, i: Any, j: Any) -> Any:
        if isinstance(i, np.ndarray):
            calls.append(i.size * j.size)
        return documents[i] == documents[j]

    expected = differentiated(*arrays, mask_mod=within)
    tiles = cufa.BlockMask.of(within, None, None, 1024, 1024, block=(64, 64))
    called_without, calls[:] = sum(calls), []
    found = differentiated(*arrays, block_mask=tiles)
    assert sum(calls) < called_without / 2
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6)


#: Which arrays a function reads that may be differentiated by.
READ = {
    "alibi": ("slopes",),
    "even steps": ("slopes",),
    "relative positions": ("table",),
    "all": ("slopes", "strength"),
}


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("name", READ)
def test_arrays_that_a_function_reads(rng: np.random.Generator, name: str, varlen: bool) -> None:
    """Against differences of the forward pass in float64, along random directions."""
    sizes = (2, 4, 2, 19, 37)
    dout, *tensors = drawn(rng, "float32", sizes, 12, 20)
    draw, make = score_mods.FEATURES[name]
    arrays = {each: np.asarray(array) for each, array in draw(rng, sizes).items()}
    options, wrt = make(arrays), READ[name]
    if varlen:
        flat = [x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (dout, *tensors)]
        ends = {"cu_seqlens_q": np.array([0, 19, 38]), "cu_seqlens_k": np.array([0, 37, 74])}
        given = {"max_seqlen_q": 19, "max_seqlen_k": 37, **ends, **options}
        out, lse = cufa.attention_varlen(*flat[1:], return_lse=True, **given)
        call: Any = cufa.attention_varlen_backward
        both = call(*flat, out, lse, wrt=(*wrt, "q"), **given)
        found = gradients_of(wrt, both[:-1])
    else:
        found = differentiated(dout, *tensors, wrt=wrt, **options)

    def loss(of: str, moved: np.ndarray) -> float:
        its = formula_options(make({**arrays, of: moved}), sizes)
        return float((oracle(*tensors, **its)[0] * dout).sum())

    for each, gradient in found.items():
        assert gradient.dtype == arrays[each].dtype
        assert gradient.shape == arrays[each].shape
        wide = arrays[each].astype(np.float64)
        step = 1e-6 * rng.standard_normal(wide.shape)
        difference = (loss(each, wide + step) - loss(each, wide - step)) / 2
        along = float((gradient.astype(np.float64) * step).sum())
        rough = 1e-3 if gradient.dtype != np.float32 else 1e-4
        assert abs(difference - along) <= rough * np.linalg.norm(gradient.astype(float)) * 1e-6


def test_three_arrays_of_the_same_name(rng: np.random.Generator) -> None:
    """Each has a number, and its own gradient."""

    def adding(table: np.ndarray) -> Any:
        return lambda score, j: score + table[j] * table[j]

    functions = [adding(np.full(37, n, np.float32)) for n in range(3)]

    def added(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for function in functions:
            score = function(score, j)
        return score

    arrays = drawn(rng, "float32", (2, 4, 2, 19, 37))
    names = ("table", "table (2)", "table (3)")
    found = differentiated(*arrays, score_mod=added, wrt=names)
    assert np.abs(found["table (2)"]).max() > 0.1
    for n, name in enumerate(names):
        np.testing.assert_allclose(found[name], n * found["table (2)"], rtol=1e-5, atol=1e-5)


def test_many_addends_of_one_number() -> None:
    """As many as scores: a sum in float32, one by one, would stand still at 2^24 small ones."""
    q = k = np.zeros((16, 8, 512, 1), np.float32)
    signs = ((-1.0) ** np.arange(512)).astype(np.float32)
    v = np.broadcast_to(signs[:, None], q.shape)
    two = np.zeros(2, np.float32)

    def parity(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + two[(i + j) % 2]

    found = differentiated(v, q, k, v, score_mod=parity, wrt=("two",))
    assert found["two"].tolist() == [32768, -32768]


def test_an_array_that_a_function_reads_is_not_overwritten() -> None:
    memory = np.zeros(96, np.float32)
    table, q = memory[:6], np.ones((1, 2, 6, 8), np.float32)

    def added(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[j]

    out, lse = cufa.attention(q, q, q, score_mod=added, return_lse=True)
    place = memory.reshape(q.shape)
    with pytest.raises(ValueError, match=r"^dq .* shares memory with score_mod: table"):
        cufa.attention_backward(out, q, q, q, out, lse, score_mod=added, dq=place)
    with pytest.raises(ValueError, match=r"^out .* shares memory with score_mod: table"):
        cufa.attention(q, q, q, score_mod=added, out=place)
    assert not memory.any()


# --- what is refused ---

Call = dict[str, Any]


def legal(rng: np.random.Generator) -> Call:
    """Return the arguments of a call, with outputs of NaN."""
    dout, q, k, v = drawn(rng, "float32", (2, 4, 2, 9, 11), 8, 5)
    bias, sinks = np.zeros((4, 9, 11), np.float32), np.zeros(4, np.float32)
    out, lse = cufa.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    places = {f"d{name}": np.full_like(x, np.nan) for name, x in (("q", q), ("k", k), ("v", v))}
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    return {**tensors, **places, "bias": bias, "sinks": sinks}


def _with_sequences(call: Call) -> Call:
    """Return the same call of sequences that follow each other."""
    found = dict(call)
    for name in ("dout", "q", "k", "v", "out", "dq", "dk", "dv"):
        x = found[name]
        if isinstance(x, np.ndarray) and x.ndim == 4:
            found[name] = x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])
    lse = found["lse"]
    if isinstance(lse, np.ndarray) and lse.ndim == 3:
        found["lse"] = np.ascontiguousarray(lse.swapaxes(0, 1)).reshape(lse.shape[1], -1)
    ends = {"cu_seqlens_q": np.array([0, 9, 18]), "cu_seqlens_k": np.array([0, 11, 22])}
    return {**found, **ends, "max_seqlen_q": 9, "max_seqlen_k": 11}


def changed(name: str, change: Any) -> Any:
    return lambda call: {name: change(call[name])}


def itself(name: str, other: str) -> Any:
    return lambda call: {name: call[other]}


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a name": ({"wrt": "q"}, TypeError, r"wrt must be a tuple of names of .* give \('q',\)"),
    "no names": ({"wrt": 3}, TypeError, "wrt must be a tuple of names .* not int"),
    "numbers": ({"wrt": (1,)}, TypeError, r"wrt must be a tuple of names .* not \(1,\)"),
    "nothing": ({"wrt": ()}, ValueError, "wrt is empty: it must name one or more"),
    "unknown": ({"wrt": ("q", "dq")}, ValueError, "wrt has 'dq', which is none of 'q', 'k', 'v'"),
    "twice": ({"wrt": ("q", "v", "q")}, ValueError, "wrt has 'q' twice"),
    "no bias": (
        {"wrt": ("bias",), "bias": None},
        ValueError,
        "wrt has 'bias', but the call has no",
    ),
    "no sinks": ({"wrt": ("sinks",), "sinks": None}, ValueError, "wrt has 'sinks', but the call"),
    "not asked for": ({"wrt": ("q", "k")}, ValueError, "dv is given, but 'v' is not in wrt"),
    "a flag": ({"deterministic": 1}, TypeError, "deterministic must be True or False, not int"),
    "shape of dout": (changed("dout", lambda x: x[..., :-1]), ValueError, "dout has shape"),
    "shape of out": (changed("out", lambda x: x[:-1]), ValueError, "out has shape"),
    "shape of lse": (changed("lse", lambda x: x[..., None]), ValueError, "lse has shape"),
    "dtype of dout": (
        changed("dout", lambda x: x.astype(np.float16)),
        TypeError,
        "dout has dtype float16, but q has dtype float32",
    ),
    "dtype of out": (changed("out", lambda x: x.astype(float)), TypeError, "out has dtype float64"),
    "dtype of lse": (
        changed("lse", lambda x: x.astype(float)),
        TypeError,
        "lse has dtype float64: float32 is needed, as return_lse=True gives",
    ),
    "kind of lse": (
        changed("lse", lambda x: x.tolist()),
        TypeError,
        "lse must be a NumPy or a CuPy",
    ),
    "kind of dq": (changed("dq", lambda x: x.tolist()), TypeError, "dq must be a NumPy or a CuPy"),
    "shape of dq": (changed("dq", lambda x: x[..., :-1]), ValueError, "dq has shape"),
    "dtype of dk": (changed("dk", lambda x: x.astype(float)), TypeError, "dk has dtype float64"),
    "read-only": (
        changed("dv", lambda x: np.broadcast_to(x, x.shape)),
        ValueError,
        "dv .* is read-only",
    ),
    "dq is q": (itself("dq", "q"), ValueError, "dq .* shares memory with q"),
    "dv in dout": (
        lambda call: {"dv": call["dout"].reshape(-1)[: call["dv"].size].reshape(call["dv"].shape)},
        ValueError,
        "dv .* shares memory with dout",
    ),
    "dk in dq": (
        lambda call: {"dk": call["dq"].reshape(-1)[: call["dk"].size].reshape(call["dk"].shape)},
        ValueError,
        "dk .* shares memory with dq",
    ),
    "kernel": ({"kernel": "fa2_fp32"}, ValueError, "kernel must be None for NumPy arrays"),
    "C++": (
        {"score_mod": "score * 2"},
        ValueError,
        "score_mod must be a function for NumPy arrays",
    ),
    "what cannot be traced": (
        {"score_mod": lambda s, b, h, i, j: s if i > j else 0},
        TypeError,
        "score_mod cannot be traced",
    ),
    "an array of integers": (
        {"wrt": ("NUMBERS",), "score_mod": lambda s, b, h, i, j: s + NUMBERS[j]},
        ValueError,
        "wrt has 'NUMBERS', which is none of 'q', 'k', 'v', 'bias', 'sinks'",
    ),
    "an array with the name of an argument": (
        {"wrt": ("bias",), "score_mod": lambda s, b, h, i, j: s + bias[j]},
        ValueError,
        "wrt has 'bias', which is an argument and the name of an array .* rename the array",
    ),
    "seed": ({"dropout_p": 0.5}, ValueError, "seed is needed with dropout_p"),
    "window": ({"window": (-1, 0)}, ValueError, "window"),
}


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(rng: np.random.Generator, name: str, varlen: bool) -> None:
    """With the name of the argument; and nothing is written."""
    change, error, message = WRONG[name]
    call = legal(rng)
    call = _with_sequences(call) if varlen else call
    call |= change(call) if callable(change) else change
    function: Any = cufa.attention_varlen_backward if varlen else cufa.attention_backward
    with pytest.raises(error, match=f"^{message}"):
        function(**call)
    places = [call[place] for place in ("dq", "dk", "dv")]
    inputs = [call["q"], call["dout"]]
    for place in places:
        if isinstance(place, np.ndarray) and not any(np.shares_memory(place, x) for x in inputs):
            assert np.isnan(place).all()


def test_a_function_that_raises_writes_nothing(rng: np.random.Generator) -> None:
    call = legal(rng)
    table = np.zeros(5, np.float32)  # too short for the keys
    with pytest.raises(IndexError):
        cufa.attention_backward(**call, score_mod=lambda s, b, h, i, j: s * table[j])
    assert all(np.isnan(call[name]).all() for name in ("dq", "dk", "dv"))


def test_nothing_to_do() -> None:
    """Empty batches, no heads, no queries, no keys: zeros, or nothing."""
    for b, h, sq, sk in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        q, k = np.ones((b, h, sq, 8), np.float32), np.ones((b, 1, sk, 8), np.float32)
        bias, sinks = np.ones((sq, sk), np.float32), np.ones(h, np.float32)
        found = differentiated(q, q, k, k, bias=bias, sinks=sinks)
        for gradient, x in zip(found.values(), (q, k, k, bias, sinks), strict=True):
            assert gradient.shape == x.shape
            assert not gradient.any()
