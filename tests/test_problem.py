"""parse.py, problem.py: a legal call becomes a Problem, an illegal one an error that says why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import DTYPES
from test_arrays import device_array

from cufa.arrays import as_bhsd
from cufa.features.causal import Causal
from cufa.problem.parse import parse, restore_shape
from cufa.problem.problem import Problem, checked

Call = dict[str, Any]

sizes = st.one_of(st.integers(0, 5), st.integers(6, 10**6))
head_dims = st.integers(1, 256)
#: Below 2^64, of either sign.
scales = st.one_of(
    st.none(),
    st.floats(-(2.0**63), 2.0**63),
    st.integers(-100, 100),
    st.fractions(-8, 8),
    st.floats(-8, 8, width=32).map(np.float32),
)


def virtual(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Array of any shape in the memory of one element."""
    return np.broadcast_to(np.zeros((), DTYPES[dtype]), shape)


@st.composite
def problems(draw: st.DrawFn, size: st.SearchStrategy[int] = sizes) -> Problem:
    """Any legal problem."""
    heads_kv = draw(st.integers(0, 6))
    dim = draw(head_dims)
    scale = draw(scales)
    return Problem(
        draw(st.sampled_from(sorted(DTYPES))),
        draw(st.integers(0, 5)),
        heads_kv * draw(st.integers(0, 9)),
        heads_kv,
        draw(size),
        draw(size),
        dim,
        draw(head_dims),
        1 / math.sqrt(dim) if scale is None else float(scale),
        (Causal(),) if draw(st.booleans()) else (),
    )


def in_layout(shape: tuple[int, int, int, int], layout: str) -> tuple[int, ...]:
    b, h, s, d = shape
    return (b, h, s, d) if layout == "bhsd" else (b, s, h, d)


def call_of(p: Problem, layout: str = "bhsd") -> Call:
    """Arguments of `parse` that mean this problem."""
    shapes = {
        "q": (p.batch, p.heads_q, p.seq_q, p.head_dim),
        "k": (p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        "v": (p.batch, p.heads_kv, p.seq_kv, p.head_dim_v),
    }
    call: Call = {n: virtual(in_layout(s, layout), p.dtype) for n, s in shapes.items()}
    call.update(causal=p.causal, scale=p.scale, layout=layout, out=None)
    return call


def small_call(**changes: Any) -> Call:
    """Legal call on small real arrays with `out`."""
    p = Problem("float32", 2, 6, 3, 5, 7, 8, 4, 0.5)
    call = call_of(p)
    call.update({n: np.array(call[n]) for n in "qkv"})
    call["out"] = np.full((2, 6, 5, 4), 7.0, np.float32)
    call.update(changes)
    return call


# --- what is legal ---


@given(problems(), st.sampled_from(["bhsd", "bshd"]))
def test_every_legal_problem_is_accepted(p: Problem, layout: str) -> None:
    call = call_of(p, layout)
    parsed, operands = parse(call, np)
    assert parsed == p
    assert hash(parsed) == hash(p)
    assert operands.q.shape == (p.batch, p.heads_q, p.seq_q, p.head_dim)
    assert operands.k.shape == (p.batch, p.heads_kv, p.seq_kv, p.head_dim)
    assert operands.v.shape == (p.batch, p.heads_kv, p.seq_kv, p.head_dim_v)
    assert operands.out is None
    shapes = (operands.q.shape, operands.k.shape, operands.v.shape)
    assert Problem.of_shapes(*shapes, dtype=p.dtype, causal=p.causal, scale=p.scale) == p


@given(problems(st.integers(0, 9)), st.sampled_from(["bhsd", "bshd"]), st.integers(2, 4))
def test_out_has_the_shape_of_the_result(p: Problem, layout: str, ndim: int) -> None:
    if ndim < 4:
        p = p._replace(heads_q=1, heads_kv=1, batch=1 if ndim == 2 else p.batch)
    call = call_of(p, layout)
    if ndim < 4:
        call.update({n: as_bhsd(call[n], layout)[:, 0] for n in "qkv"})
    if ndim == 2:
        call.update({n: call[n][0] for n in "qkv"})
    shape, lse_shape = restore_shape(p, ndim, layout)
    assert shape == (*call["q"].shape[:-1], p.head_dim_v)
    assert len(lse_shape) == ndim - 1
    assert math.prod(lse_shape) == p.batch * p.heads_q * p.seq_q
    out = np.empty(shape, DTYPES[p.dtype])
    parsed, operands = parse({**call, "out": out}, np)
    assert parsed == p
    assert operands.out.shape == (p.batch, p.heads_q, p.seq_q, p.head_dim_v)
    assert out.size == 0 or np.shares_memory(operands.out, out)


def test_defaults() -> None:
    parsed, _ = parse(small_call(scale=None), np)
    assert parsed.scale == 1 / math.sqrt(8)
    assert Problem.of_shapes((1, 1, 2, 16), (1, 1, 2, 16), (1, 1, 2, 16)).scale == 0.25


@pytest.mark.parametrize(
    ("hq", "hk", "group"), [(6, 3, 2), (7, 1, 7), (4, 4, 1), (0, 3, 1), (0, 0, 1)]
)
def test_group(hq: int, hk: int, group: int) -> None:
    assert Problem.of_shapes((1, hq, 2, 8), (1, hk, 2, 8), (1, hk, 2, 8)).group == group


@pytest.mark.parametrize("scale", [0, -1, 0.0, np.float16(0.5), np.int64(3), Fraction(1, 3)])
def test_scale_is_any_real_number(scale: Any) -> None:
    parsed, _ = parse(small_call(scale=scale), np)
    assert parsed.scale == float(scale)
    assert type(parsed.scale) is float


def test_numpy_bool_is_a_bool() -> None:
    parsed, _ = parse(small_call(causal=np.True_), np)
    assert parsed.causal is True


def test_subclasses_are_taken_as_plain_arrays(tmp_path: Any) -> None:
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(5, 4))
    q, k, v = (np.ones(s, np.float32).view(np.matrix) for s in ((5, 8), (7, 8), (7, 4)))
    _, operands = parse(small_call(q=q, k=k, v=v, out=out), np)
    assert all(type(x) is np.ndarray for x in operands[:4])
    assert np.shares_memory(operands.out, out)


# --- the memory of `out` ---


def test_out_in_the_same_buffer_but_not_overlapping_is_accepted() -> None:
    # One packed buffer (b, s, 4, h, d): q, k, v and out are interleaved, and share nothing.
    packed = np.zeros((2, 7, 4, 3, 59), np.float16)
    q, k, v, out = (packed[:, :, i] for i in range(4))
    _, operands = parse(small_call(q=q, k=k, v=v, out=out, layout="bshd"), np)
    assert operands.out.strides == out.swapaxes(1, 2).strides
    columns = np.split(np.zeros((3, 5, 7, 32), np.float32), 4, axis=3)
    parse(small_call(**dict(zip(("q", "k", "v", "out"), columns, strict=True))), np)


def test_inputs_may_be_broadcast_and_share_memory() -> None:
    q = np.ones((2, 6, 5, 8), np.float32)
    k = np.broadcast_to(q[:, :1], (2, 3, 5, 8))
    parse(small_call(q=q, k=k, v=k, out=None), np)
    parse(small_call(q=q[..., ::-1, :], k=k[..., ::-1], v=k[:, :, ::-1], out=None), np)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_overlapping_an_input(name: str) -> None:
    buffer = np.zeros((2, 3, 5, 9), np.float32)
    call = small_call(**{n: np.zeros((2, 3, 5, 8), np.float32) for n in "qkv"})
    call[name] = buffer[..., :8]
    with pytest.raises(ValueError, match=rf"^out .* shares memory with {name} \(shape"):
        parse({**call, "out": buffer[..., 1:]}, np)


def test_out_overlapping_itself() -> None:
    out = np.lib.stride_tricks.sliding_window_view(np.zeros(8, np.float32), 4, writeable=True)
    q, k, v = (np.zeros(s, np.float32) for s in ((5, 8), (7, 8), (7, 4)))
    with pytest.raises(ValueError, match=r"^out .* share memory"):
        parse(small_call(q=q, k=k, v=v, out=out), np)
    broadcast = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (5, 4), (0, 4))
    with pytest.raises(ValueError, match=r"^out .* share memory"):
        parse(small_call(q=q, k=k, v=v, out=broadcast), np)


# --- what is illegal ---


def grown(call: Call, name: str, axis: int, by: int = 1) -> np.ndarray:
    shape = list(call[name].shape)
    shape[axis] += by
    return virtual(tuple(shape), call[name].dtype.name)


Error = type[Exception]

#: Each takes a legal call and returns the changes that spoil it, the error and the argument that
#: the message must begin with.
SPOILERS: dict[str, Callable[[Call], tuple[Call, Error, str]]] = {
    "q float64": lambda c: ({"q": c["q"].astype(np.float64)}, TypeError, "q"),
    "all float64": lambda c: ({n: c[n].astype(np.float64) for n in "qkv"}, TypeError, "q"),
    "all int32": lambda c: ({n: c[n].astype(np.int32) for n in "qkv"}, TypeError, "q"),
    "all complex": lambda c: ({n: c[n].astype(np.complex64) for n in "qkv"}, TypeError, "q"),
    "all object": lambda c: ({n: c[n].astype(object) for n in "qkv"}, TypeError, "q"),
    "swapped bytes": lambda c: ({n: c[n].astype(">f4") for n in "qkv"}, TypeError, "q"),
    "k dtype": lambda c: ({"k": c["k"].astype(np.int8)}, TypeError, "k"),
    "v dtype": lambda c: ({"v": c["v"].astype(np.float64)}, TypeError, "v"),
    "out dtype": lambda c: ({"out": np.empty(c["q"].shape, np.float64)}, TypeError, "out"),
    "q rank": lambda c: ({"q": c["q"][None]}, ValueError, "q"),
    "q vector": lambda c: ({"q": np.zeros(8, c["q"].dtype)}, ValueError, "q"),
    "q scalar": lambda c: ({"q": np.zeros((), c["q"].dtype)}, ValueError, "q"),
    "k rank": lambda c: ({"k": c["k"][..., 0]}, ValueError, "k"),
    "v rank": lambda c: ({"v": c["v"][None]}, ValueError, "v"),
    "k batch": lambda c: ({"k": grown(c, "k", 0)}, ValueError, "k"),
    "v batch": lambda c: ({"v": grown(c, "v", 0)}, ValueError, "v"),
    "k head_dim": lambda c: ({"k": grown(c, "k", 3)}, ValueError, "k"),
    "v heads": lambda c: ({"v": grown(c, "v", 1)}, ValueError, "v"),
    "v seq": lambda c: ({"v": grown(c, "v", 2)}, ValueError, "v"),
    "k seq": lambda c: ({"k": grown(c, "k", 2)}, ValueError, "v"),
    "heads": lambda c: ({"q": grown(c, "q", 1, max(1, c["k"].shape[1] - 1))}, ValueError, "q"),
    "q head_dim 0": lambda c: ({n: c[n][..., :0] for n in "qk"}, ValueError, "q"),
    "q head_dim 257": lambda c: (
        {n: grown(c, n, 3, 257 - c[n].shape[3]) for n in "qk"},
        ValueError,
        "q",
    ),
    "v head_dim 0": lambda c: ({"v": c["v"][..., :0]}, ValueError, "v"),
    "v head_dim 300": lambda c: ({"v": grown(c, "v", 3, 300 - c["v"].shape[3])}, ValueError, "v"),
    "causal int": lambda c: ({"causal": 1}, TypeError, "causal"),
    "causal None": lambda c: ({"causal": None}, TypeError, "causal"),
    "causal array": lambda c: ({"causal": np.array([True])}, TypeError, "causal"),
    "scale bool": lambda c: ({"scale": True}, TypeError, "scale"),
    "scale string": lambda c: ({"scale": "1"}, TypeError, "scale"),
    "scale complex": lambda c: ({"scale": 1j}, TypeError, "scale"),
    "scale array": lambda c: ({"scale": np.ones(1)}, TypeError, "scale"),
    "scale nan": lambda c: ({"scale": math.nan}, ValueError, "scale"),
    "scale inf": lambda c: ({"scale": -math.inf}, ValueError, "scale"),
    "scale 2^64": lambda c: ({"scale": -(2.0**64)}, ValueError, "scale"),
    "scale beyond float64": lambda c: ({"scale": 10**400}, ValueError, "scale"),
    "layout name": lambda c: ({"layout": "sbhd"}, ValueError, "layout"),
    "layout None": lambda c: ({"layout": None}, TypeError, "layout"),
    "layout array": lambda c: ({"layout": np.zeros(2)}, TypeError, "layout"),
    "out shape": lambda c: ({"out": np.empty((1, 2), c["q"].dtype)}, ValueError, "out"),
    "out rank": lambda c: (
        {"out": np.empty((*c["q"].shape[:3], c["v"].shape[3], 1), c["q"].dtype)},
        ValueError,
        "out",
    ),
    "out read-only": lambda c: (
        {"out": virtual((*c["q"].shape[:3], c["v"].shape[3]), c["q"].dtype.name)},
        ValueError,
        "out",
    ),
}


@given(problems(st.integers(0, 9)), st.sampled_from(sorted(SPOILERS)))
def test_every_illegal_call_names_the_argument(p: Problem, spoiler: str) -> None:
    call = call_of(p)
    # One K/V head goes with any number of query heads.
    assume(spoiler != "heads" or p.heads_kv != 1)
    changes, error, name = SPOILERS[spoiler](call)
    call.update(changes)
    with pytest.raises(error, match=rf"^{name}\b"):
        parse(call, np)


@pytest.mark.parametrize("spoiler", sorted(SPOILERS))
def test_nothing_is_written_before_an_error(spoiler: str) -> None:
    call = small_call()
    out = call["out"]
    changes, error, name = SPOILERS[spoiler](call)
    call.update(changes)
    with pytest.raises(error, match=rf"^{name}\b") as info:
        parse(call, np)
    assert np.all(out == 7.0)
    if error is ValueError and name in "qkv":
        assert str(call[name].shape) in str(info.value)


def test_messages_quote_the_shapes_as_the_caller_wrote_them() -> None:
    q, k = np.zeros((2, 5, 6, 8), np.float32), np.zeros((2, 7, 4, 8), np.float32)
    expected = "q has shape (2, 5, 6, 8), but k has shape (2, 7, 4, 8): heads 6 is no multiple"
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse(small_call(q=q, k=k, v=k, out=None, layout="bshd"), np)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"dtype": "float64"}, TypeError, "dtype"),
        ({"dtype": np.dtype("float16")}, TypeError, "dtype"),
        ({"q_shape": (1, 2, 8)}, ValueError, "q"),
        ({"k_shape": (1, 1, -2, 8)}, ValueError, "k"),
        ({"v_shape": (1, 1, 2.0, 8)}, ValueError, "v"),
        ({"v_shape": (1, 1, 3, 8)}, ValueError, "v"),
        ({"scale": math.nan}, ValueError, "scale"),
        ({"causal": "yes"}, ValueError, "causal"),
    ],
)
def test_of_shapes_errors(changes: Call, error: Error, name: str) -> None:
    call: Call = {f"{n}_shape": (1, 1, 2, 8) for n in "qkv"}
    call.update(changes)
    with pytest.raises(error, match=rf"^{name}\b"):
        Problem.of_shapes(**call)


@pytest.mark.parametrize("name", ["q_shape", "k_shape", "v_shape"])
def test_of_shapes_without_a_shape(name: str) -> None:
    call: Call = {f"{n}_shape": (1, 1, 2, 8) for n in "qkv"} | {name: 3}
    with pytest.raises(TypeError, match=f"^{name} must be a sequence of sizes, not int"):
        Problem.of_shapes(**call)


@given(problems())
def test_a_legal_problem_is_checked_to_itself(p: Problem) -> None:
    for flag in (False, True):
        p = p._replace(returns_lse=flag)
        assert checked(p) == p


# --- CuPy arrays: only what is known of them without a device ---


@pytest.fixture
def device_0(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)


def cupy_call(cupy: Any, **changes: Any) -> Call:
    shape = (2, 3, 5, 8)
    call: Call = {n: device_array(cupy, shape, at=i << 20) for i, n in enumerate(("q", "k", "v"))}
    call.update(out=device_array(cupy, shape, at=1 << 24), scale=None, layout="bhsd")
    call.update(changes)
    return call


@pytest.mark.usefixtures("device_0")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_cupy_arrays_are_accepted(cupy: Any, dtype: str) -> None:
    shape = (2, 5, 3, 8)
    q = device_array(cupy, shape, dtype=dtype)
    out = device_array(cupy, shape, at=1 << 20, dtype=dtype)
    call = {"q": q, "k": q, "v": q, "causal": True, "layout": "bshd", "out": out}
    p, operands = parse(call, cupy)
    assert p == Problem(dtype, 2, 3, 3, 5, 5, 8, 8, 1 / math.sqrt(8), (Causal(),))
    assert all(isinstance(x, cupy.ndarray) and x.shape == (2, 3, 5, 8) for x in operands[:4])
    assert operands.out.data.ptr == out.data.ptr


@pytest.mark.usefixtures("device_0")
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_array_on_another_device(cupy: Any, name: str) -> None:
    call = cupy_call(cupy)
    call[name] = device_array(cupy, (2, 3, 5, 8), device=1, at=1 << 25)
    with pytest.raises(ValueError, match=rf"^{name} .* is on device 1, but .* device is 0"):
        parse(call, cupy)


@pytest.mark.usefixtures("device_0")
def test_misaligned_elements(cupy: Any) -> None:
    call = cupy_call(cupy, k=device_array(cupy, (2, 3, 5, 8), at=(1 << 25) + 1))
    with pytest.raises(ValueError, match=r"^k .* no multiple of 2 bytes"):
        parse(call, cupy)


@pytest.mark.usefixtures("device_0")
def test_cupy_out_overlap(cupy: Any) -> None:
    packed = device_array(cupy, (2, 5, 4, 3, 8), at=1 << 26)
    q, k, v, out = (packed[:, :, i] for i in range(4))
    parse(cupy_call(cupy, q=q, k=k, v=v, out=out, layout="bshd"), cupy)
    for name in "qkv":
        call = cupy_call(cupy, q=q, k=k, v=v, layout="bshd")
        with pytest.raises(ValueError, match=rf"^out .* shares memory with {name}"):
            parse({**call, "out": call[name]}, cupy)
    # Beginning inside q, and ending after it; and running backwards over it.
    flat = device_array(cupy, (480,), at=1 << 27)
    q, out = flat[:240].reshape(2, 3, 5, 8), flat[200:440].reshape(2, 3, 5, 8)
    for view in (out, out[:, :, ::-1]):
        with pytest.raises(ValueError, match=r"^out .* shares memory with q"):
            parse(cupy_call(cupy, q=q, out=view), cupy)
    broadcast = cupy.broadcast_to(device_array(cupy, (2, 3, 1, 8), at=1 << 28), (2, 3, 5, 8))
    with pytest.raises(ValueError, match=r"^out .* share memory"):
        parse(cupy_call(cupy, out=broadcast), cupy)
