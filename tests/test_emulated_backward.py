"""The backward kernels' source on the host, from `cufa.attention_backward` on."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import numpy as np
import played_gpu
import pytest
import score_mods
from emulated import LANES, Emulator, emulate, needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, on_gpu, one_in
from reference import DTYPES, oracle, random_inputs
from reference_backward import ExpectedGradients
from test_backward import NAMES, features, formula_options, wrt_of
from test_varlen import ragged

import cufa
from cufa import device
from cufa.launch import backward, workspace
from cufa.planner import scheduler

pytestmark = needs_compiler

Case = tuple[str, str, int, int]
"""Device, dtype, and head dims of Q and K and of V."""

#: A form of each kernel, with which all features always run.
MMA, FP32 = ("a100", "bfloat16", 32, 24), ("h200", "float32", 20, 32)
#: Where two warps share keys.
MMA_SHARED, FP32_SHARED = ("a100", "float16", 192, 192), ("h200", "float32", 64, 40)
MMA_EIGHT = ("a100", "bfloat16", 64, 64)
#: Calls whose consumers share dQ by rows, or by columns.
WGMMA_ROWS, WGMMA_COLUMNS = ("h200", "bfloat16", 40, 64), ("h200", "float16", 100, 72)
#: Calls whose dQ has a kernel of its own.
WGMMA_TWO, WGMMA_TWO_192 = ("h200", "bfloat16", 256, 200), ("h200", "float16", 192, 128)
FORMS = (
    *(MMA, FP32, MMA_SHARED, FP32_SHARED, MMA_EIGHT),
    *(WGMMA_ROWS, WGMMA_COLUMNS, WGMMA_TWO),
)
SAMPLE = (MMA, "all"), (FP32, "dropout_p"), (MMA, "function all"), (FP32, "softcap")


def name_of(case: Any) -> str:
    return "-".join(map(str, case)) if isinstance(case, tuple) else str(case)


forms = pytest.mark.parametrize("form", FORMS, ids=name_of)


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture(autouse=True)
def emulated(
    gpu: Gpu,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Emulator:
    """Play a GPU; warps take turns at random, or in order: in each test always the same way."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    played = device.named(params.get("form", MMA)[0])
    monkeypatch.setattr(device, "of_id", lambda device_id: played)
    monkeypatch.setattr(backward, "_prepared", {})
    monkeypatch.setattr(workspace, "_of_device", {})
    emulate(monkeypatch, emulator)
    seed = zlib.crc32(request.node.name.encode()) % 8
    emulator.last_first, emulator.seed = seed % 2 == 1, seed
    return emulator


def drawn(
    rng: np.random.Generator, form: Case, sizes: tuple[int, ...], **options: Any
) -> tuple[np.ndarray, ...]:
    """Draw dout, q, k and v, and return them with what the forward pass gives."""
    b, hq, hk, sq, sk = sizes
    _, dtype, d, dv = form
    q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
    dout = rng.standard_normal((b, hq, sq, dv), np.float32).astype(DTYPES[dtype])
    out, lse = oracle(q, k, v, **options)
    return dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)


def there(options: dict[str, Any]) -> dict[str, Any]:
    return {name: on_gpu(x) if hasattr(x, "dtype") else x for name, x in options.items()}


def gradients(arrays: tuple[np.ndarray, ...], **options: Any) -> dict[str, np.ndarray]:
    """Return all gradients of a call."""
    found = cufa.attention_backward(*map(on_gpu, arrays), **there(options))
    return {name: x.get() for name, x in zip(options.get("wrt", "qkv"), found, strict=True)}


def checked(
    rng: np.random.Generator, form: Case, sizes: tuple[int, ...], given: Any = None, **options: Any
) -> None:
    """Compare the gradients of a call with the oracle's; the call may name others than it."""
    arrays = drawn(rng, form, sizes, **options)
    wrt = wrt_of(options)
    found = gradients(arrays, wrt=wrt, **(options if given is None else given))
    dout, q, k, v, *_ = arrays
    ExpectedGradients(dout, q, k, v, **options).assert_accepts(found, f"{form} {sizes}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", [*FORMS, WGMMA_TWO_192], ids=name_of)
@exhaustive("backward", one_in=2)
def test_odd_lengths(rng: np.random.Generator, form: Case, causal: bool) -> None:
    checked(rng, form, (1, 2, 1, 45, 71) if causal else (2, 1, 1, 70, 33), causal=causal)


@forms
@pytest.mark.parametrize("name", NAMES)
@exhaustive("backward", but=lambda form, name: (form, name) in SAMPLE)
def test_features(rng: np.random.Generator, form: Case, name: str) -> None:
    sizes = (2, 2, 1, 37, 90)
    if name.startswith("function "):
        options, given = score_mods.made(rng, name.removeprefix("function "), sizes, on_gpu)
    else:
        options = features(rng, name, sizes)
        given = options
    checked(rng, form, sizes, given, **formula_options(options, sizes))


def two_thirds(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hide a third of all tiles."""
    return (q_idx // 64 + kv_idx // 64 + h) % 3 > 0


@pytest.mark.parametrize("name", ["causal", "window", "attention_chunk", "mask_mod"])
@pytest.mark.parametrize(
    "form", [MMA, FP32_SHARED, WGMMA_ROWS, WGMMA_COLUMNS, WGMMA_TWO], ids=name_of
)
@exhaustive("backward", but=lambda form, name: form is MMA and name in ("window", "mask_mod"))
def test_sums_have_the_same_bits(
    emulated: Emulator, rng: np.random.Generator, form: Case, name: str
) -> None:
    """Whichever blocks and warps come first, of tiles of keys that see some tiles of rows."""
    # Heads of a group are shared by blocks where there are some.
    b, hq, _, sq, sk = sizes = (1, 2, 2 if name in ("window", "mask_mod") else 1, 150, 210)
    by_name: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window": (70, 5)},
        "attention_chunk": {"attention_chunk": 48},
        "mask_mod": {"mask_mod": two_thirds},
    }
    options = by_name[name]
    given = dict(options)
    if name == "mask_mod":
        tile: dict[str, Any] = {"block": (64, 32), "xp": sys.modules["cupy"]}
        given["block_mask"] = cufa.BlockMask.of(two_thirds, b, hq, sq, sk, **tile)
    arrays = drawn(rng, form, sizes, **options)
    expected = ExpectedGradients(*arrays[:4], **options)
    found = []
    for last_first, seed in ((False, 0), (True, 3), (False, 5)):
        emulated.last_first, emulated.seed = last_first, seed
        found.append(gradients(arrays, deterministic=True, **given))
        expected.assert_accepts(found[-1], name)
    for other in found[1:]:
        for x in "qkv":
            assert found[0][x].tobytes() == other[x].tobytes(), f"d{x}"


@pytest.mark.parametrize("form", [WGMMA_ROWS, WGMMA_COLUMNS], ids=name_of)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (60, 5)}], ids=str)
@exhaustive("backward", but=lambda form, options: form is WGMMA_COLUMNS and "window" in options)
def test_blocks_draw_tiles_of_keys(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Case,
    options: dict[str, Any],
) -> None:
    """Two blocks take eight tiles, in any order or a fixed one; no row sees a window's first."""
    gpu = device.named(form[0])._replace(sm_count=2)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)
    arrays = drawn(rng, form, (1, 4, 2, 150, 450), **options)
    expected = ExpectedGradients(*arrays[:4], **options)
    for deterministic in (False, True):
        expected.assert_accepts(gradients(arrays, deterministic=deterministic, **options))
    plans = [call.plan for call in backward._prepared.values()]
    assert [(plan.key_blocks, plan.steps[1].grid) for plan in plans] == [(8, 2)] * 2


@pytest.mark.parametrize("form", [WGMMA_ROWS, WGMMA_COLUMNS], ids=name_of)
@exhaustive("backward", but=lambda form: form is WGMMA_COLUMNS)
def test_tiles_of_keys_that_no_row_sees(
    emulated: Emulator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Case
) -> None:
    """A block has four of them in front of one that rows see, twice; lanes of a warp part."""
    gpu = device.named(form[0])._replace(sm_count=1)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)
    for emulated.seed in (LANES + 2, LANES + 3, LANES + 4):
        checked(rng, form, (1, 2, 2, 40, 600), window=(20, 5))


@pytest.mark.parametrize("form", [WGMMA_ROWS, WGMMA_COLUMNS], ids=name_of)
@pytest.mark.parametrize("name", ["causal", "dropout_p"])
@exhaustive("backward", but=lambda form, name: form is WGMMA_COLUMNS and name == "causal")
def test_blocks_share_the_query_heads_of_a_group(
    emulated: Emulator,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Case,
    name: str,
) -> None:
    """Two blocks have two of five heads each: in any order, in a fixed one, for one gradient."""
    sizes = (1, 5, 1, 70, 150)
    gpu = device.named(form[0])._replace(sm_count=3 if name == "causal" else 6)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)
    options: dict[str, Any] = {"causal": True} if name == "causal" else features(rng, name, sizes)
    shown = formula_options(options, sizes)
    arrays = drawn(rng, form, sizes, **shown)
    expected = ExpectedGradients(*arrays[:4], **shown)
    expected.assert_accepts(gradients(arrays, **options), "in any order")
    found = []
    for emulated.last_first, emulated.seed in ((False, 0), (True, 3)):
        found.append(gradients(arrays, deterministic=True, **options))
        expected.assert_accepts(found[-1], "in order")
    for x in "qkv":
        assert found[0][x].tobytes() == found[1][x].tobytes(), f"d{x}"
    for x in "qkv":
        expected.assert_accepts(gradients(arrays, wrt=(x,), **options), x)
    plans = [call.plan for call in backward._prepared.values()]
    assert {plan.kv_splits for plan in plans} == {3}
    assert [plan.kv_sums >= 0 for plan in plans] == [True, True, False, True, True]


@pytest.mark.parametrize("form", [MMA, FP32, WGMMA_COLUMNS, WGMMA_TWO], ids=name_of)
def test_sections_of_heads(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Case
) -> None:
    """Four heads have their tiles of keys interleaved, then the other three."""
    key_tiles = {FP32: 5, WGMMA_COLUMNS: 2}.get(form, 3)
    blocks_per_sm = 2 if form in (MMA, FP32) else 1
    gpu = device.named(form[0])._replace(sm_count=4 * key_tiles // blocks_per_sm)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)
    monkeypatch.setattr(scheduler, "_FEW_TILES", 1)
    checked(rng, form, (1, 7, 7, 40, 150), causal=True)
    (call,) = backward._prepared.values()
    assert call.plan.key_tiles == key_tiles
    assert call.plan.section_heads == 4


@pytest.mark.parametrize(
    "form", [MMA, FP32_SHARED, WGMMA_ROWS, WGMMA_COLUMNS, WGMMA_TWO], ids=name_of
)
@pytest.mark.parametrize("deterministic", [False, True])
@exhaustive("backward", but=lambda form, deterministic: form is MMA and deterministic)
def test_lengths_of_keys(rng: np.random.Generator, form: Case, deterministic: bool) -> None:
    """Nothing beyond a length is read; gradients there are 0."""
    sizes, lengths = (3, 2, 1, 40, 150), np.array([70, 0, 150], np.int32)
    arrays = drawn(rng, form, sizes)
    dout, q, k, v, out, lse = arrays
    for i, n in enumerate(lengths):
        result = oracle(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], causal=True)
        out[i], lse[i] = result[0][0], result[1][0]
        k[i, :, n:] = v[i, :, n:] = np.nan
    options = {"causal": True, "lengths_k": lengths, "deterministic": deterministic}
    found = gradients(arrays, **options)
    for i, n in enumerate(lengths):
        one = slice(i, i + 1)
        for x in "kv":
            assert not np.any(found[x][i, :, n:].astype(np.float32))
        its = {name: x[one, :, :n] if name in "kv" else x[one] for name, x in found.items()}
        expected = ExpectedGradients(
            *(dout[one], q[one], k[one, :, :n], v[one, :, :n]), causal=True
        )
        expected.assert_accepts(its, f"{n} keys")


@pytest.mark.parametrize("form", [MMA, WGMMA_ROWS, WGMMA_COLUMNS, WGMMA_TWO], ids=name_of)
@exhaustive("backward", but=lambda form: form is MMA)
def test_lengths_of_queries(rng: np.random.Generator, form: Case) -> None:
    """Nothing beyond a length is read, and gradients there are 0."""
    arrays = drawn(rng, form, (3, 2, 1, 80, 40))
    dout, q, k, v, out, lse = arrays
    lengths = np.array([13, 0, 80], np.int32)
    for i, n in enumerate(lengths):
        result = oracle(q[i : i + 1, :, :n], k[i : i + 1], v[i : i + 1], causal=True)
        out[i, :, :n], lse[i, :, :n] = result[0][0], result[1][0]
        out[i, :, n:], lse[i, :, n:] = 0, -np.inf
        q[i, :, n:] = dout[i, :, n:] = np.nan
    found = gradients(arrays, causal=True, lengths_q=lengths)
    for i, n in enumerate(lengths):
        one = slice(i, i + 1)
        assert not np.any(found["q"][i, :, n:].astype(np.float32))
        if n == 0:
            assert not np.any(found["k"][i].astype(np.float32))
            continue
        its = {name: x[one, :, :n] if name == "q" else x[one] for name, x in found.items()}
        four = dout[one, :, :n], q[one, :, :n], k[one], v[one]
        ExpectedGradients(*four, causal=True).assert_accepts(its, f"{n} queries")


@pytest.mark.parametrize(
    "form", [MMA, FP32_SHARED, WGMMA_ROWS, WGMMA_COLUMNS, WGMMA_TWO], ids=name_of
)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (20, 5)}], ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
@exhaustive("backward", but=lambda form, options: form is MMA and "window" in options)
def test_sequences_of_any_lengths(
    rng: np.random.Generator, form: Case, options: dict[str, Any], deterministic: bool
) -> None:
    """Rows that no sequence has get 0, and what is in them reaches nothing."""
    checked_sequences(rng, form, options, deterministic)


def checked_sequences(
    rng: np.random.Generator, form: Case, options: dict[str, Any], deterministic: bool
) -> None:
    """Compare gradients of sequences of unequal lengths, empty ones among them."""
    hq, hk = (2, 1) if deterministic else (6, 3)  # whose tiles of keys are interleaved
    _, dtype, d, dv = form
    lengths = ((5, 0, 70, 40, 1, 64), (7, 3, 30, 90, 0, 129))
    q, k, _, cu_q, cu_k = ragged(rng, dtype, lengths, hq, hk, d, played_gpu)
    v = ragged(rng, dtype, lengths, hq, hk, dv, played_gpu)[2]
    dout = rng.standard_normal((*q.shape[:2], dv), np.float32).astype(q.dtype)
    out, lse = np.full_like(dout, np.nan), np.full((hq, q.shape[0]), np.nan, np.float32)
    parts = []
    for i in range(len(lengths[0])):
        a, b = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        four = [x.swapaxes(0, 1)[None] for x in (dout[a], q[a], k[b], v[b])]
        if four[1].size and four[2].size:
            result = oracle(*four[1:], **options)
            out[a], lse[:, a] = result[0][0].swapaxes(0, 1), result[1][0]
            parts.append((a, b, ExpectedGradients(*four, **options)))
        elif four[1].size:
            out[a], lse[:, a] = 0, -np.inf
    given = [on_gpu(x) for x in (dout, q, k, v, out, lse, cu_q, cu_k)]
    found = dict(
        zip(
            "qkv",
            cufa.attention_varlen_backward(*given, deterministic=deterministic, **options),
            strict=True,
        )
    )
    host = {name: x.get() for name, x in found.items()}
    bounds = {x: np.max([e.bounds(x) for _, _, e in parts], axis=0) for x in "qkv"}
    rest = {name: np.ones(x.shape[0], bool) for name, x in host.items()}
    for a, b, expected in parts:
        its = {x: host[x][a if x == "q" else b].swapaxes(0, 1)[None] for x in "qkv"}
        expected.assert_accepts(its, str(options), bounds)
        rest["q"][a] = rest["k"][b] = rest["v"][b] = False
    for name, x in host.items():
        assert not np.any(x[rest[name]].astype(np.float32)), f"d{name}"


def test_rows_of_no_sequence_where_places_are_copied(rng: np.random.Generator) -> None:
    """Offsets lie on the host; rows of `dk` are not contiguous."""
    _, dtype, d, dv = MMA
    q, k, v = (
        x[0].swapaxes(0, 1)
        for x in random_inputs(rng, dtype, b=1, hq=2, hk=1, sq=20, sk=30, d=d, dv=dv)
    )
    dout = rng.standard_normal((20, 2, dv), np.float32).astype(q.dtype)
    four = [x.swapaxes(0, 1)[None] for x in (dout, q, k[:23], v[:23])]
    result = oracle(*four[1:])
    out, lse = result[0][0].swapaxes(0, 1).astype(q.dtype), result[1][0].astype(np.float32)
    place = on_gpu(np.full((d, 1, 30), np.nan, k.dtype))
    dk = place.view_of(place.host.transpose(2, 1, 0))
    given: list[Any] = list(map(on_gpu, (dout, q, k, v, out, lse)))
    given += np.array([0, 20], np.int32), np.array([0, 23], np.int32)
    (found,) = cufa.attention_varlen_backward(
        *given, max_seqlen_q=20, max_seqlen_k=23, wrt=("k",), dk=dk
    )
    assert found is dk
    host = dk.get()
    assert not np.any(host[23:].astype(np.float32))
    ExpectedGradients(*four).assert_accepts({"k": host[:23].swapaxes(0, 1)[None]})


@pytest.mark.parametrize("form", [MMA, FP32, WGMMA_COLUMNS, WGMMA_TWO], ids=name_of)
def test_arrays_that_lie_otherwise(rng: np.random.Generator, form: Case) -> None:
    """Any strides, of gradients, too; heads that share memory; a negative scale; what is wanted."""
    sizes = (2, 2, 2, 37, 70)
    dout, q, k, v, _, _ = drawn(rng, form, sizes)
    k[:, 1], v[1] = k[:, 0], v[0]
    out, lse = oracle(q, k, v, scale=-0.2)
    expected = ExpectedGradients(dout, q, k, v, scale=-0.2)

    def turned(x: np.ndarray) -> Any:  # rows are not contiguous
        array = on_gpu(np.ascontiguousarray(x.swapaxes(2, 3)))
        return array.view_of(array.host.swapaxes(2, 3))

    of_k, of_v = on_gpu(k[:, :1]), on_gpu(v[:1])
    there_k = of_k.view_of(np.broadcast_to(of_k.host, k.shape))
    there_v = of_v.view_of(np.broadcast_to(of_v.host, v.shape))
    results = turned(dout), one_in(q), there_k, there_v, turned(out.astype(q.dtype))
    into = turned(np.zeros_like(k)), one_in(np.zeros_like(v))
    dk, dv = cufa.attention_backward(
        *results, on_gpu(lse.astype(np.float32)), wrt=("k", "v"), scale=-0.2, dk=into[0], dv=into[1]
    )
    assert dk is into[0]
    assert dv is into[1]
    expected.assert_accepts({"k": dk.get(), "v": dv.get()})
    given = map(on_gpu, (dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)))
    (dq,) = cufa.attention_backward(*given, wrt=("q",), scale=-0.2)
    expected.assert_accepts({"q": dq.get()})


@pytest.mark.parametrize("name", ["rtx3090", "a100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(96, 96), (128, 128), (192, 128), (256, 256)], ids=name_of)
@exhaustive("backward")
def test_planned_tiles(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    name: str,
    dtype: str,
    dims: tuple[int, int],
) -> None:
    """Those of other devices, and of scores with a derivative."""
    played = device.named(name)
    monkeypatch.setattr(device, "of_id", lambda device_id: played)
    form = (name, dtype, *dims)
    checked(rng, form, (1, 2, 1, 40, 70), causal=True)
    checked(rng, form, (1, 1, 1, 20, 70), softcap=2.0)


def test_an_empty_call_writes_zeros() -> None:
    q, k = on_gpu(np.ones((1, 2, 5, 32), np.float16)), on_gpu(np.ones((1, 1, 0, 32), np.float16))
    out, lse = on_gpu(np.zeros((1, 2, 5, 32), np.float16)), on_gpu(np.zeros((1, 2, 5), np.float32))
    dq, dk, dv = cufa.attention_backward(q, q, k, k, out, lse)
    assert not dq.get().any()
    assert dk.shape == dv.shape == k.shape


@pytest.mark.parametrize("rows", [20, 300])
def test_a_call_of_no_sequence_launches_nothing(gpu: Gpu, rows: int) -> None:
    """An empty grid would be launched as one block."""
    x, lse = on_gpu(np.ones((rows, 2, 32), np.float16)), on_gpu(np.zeros((2, rows), np.float32))
    offsets, sinks = on_gpu(np.zeros(1, np.int32)), on_gpu(np.zeros(2, np.float32))
    arrays, wrt = (x, x, x, x, x, lse, offsets, offsets), (*"qkv", "sinks")
    nan = np.full(x.shape, np.nan, x.dtype)
    places: dict[str, Any] = {f"d{name}": on_gpu(nan) for name in "qkv"}
    found = cufa.attention_varlen_backward(*arrays, sinks=sinks, wrt=wrt, **places)
    assert not any(gradient.get().any() for gradient in found)
    assert not backward._prepared


def test_a_table_is_no_place_for_a_gradient() -> None:
    memory = on_gpu(np.zeros((1, 1, 4, 32), np.float16))
    table = memory.view_of(memory.host.reshape(-1)[:4])
    x, lse = on_gpu(np.ones((1, 1, 4, 32), np.float16)), on_gpu(np.ones((1, 1, 4), np.float32))

    def added(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[q_idx]

    with pytest.raises(ValueError, match=r"^dq .* shares memory with score_mod: table"):
        cufa.attention_backward(x, x, x, x, x, lse, score_mod=added, dq=memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_mod": "score * 2"}, "score_mod is C\\+\\+, which cannot be differentiated"),
        ({"kernel": "fa2_mma"}, "kernel: the dtype and the GPU choose that"),
    ],
)
def test_what_no_kernel_computes(options: dict[str, Any], message: str) -> None:
    x, lse = on_gpu(np.ones((1, 1, 4, 32), np.float16)), on_gpu(np.ones((1, 1, 4), np.float32))
    with pytest.raises((TypeError, ValueError), match=message):
        cufa.attention_backward(x, x, x, x, x, lse, **there(options))


def test_keys_of_no_query_and_keys_not_in_use(rng: np.random.Generator) -> None:
    """Their gradients are 0, as are those of rows that no sequence has: all of them is written."""
    _, dtype, d, dv = MMA
    q, k, v, dout = (
        rng.standard_normal((n, 2, size), np.float32).astype(DTYPES[dtype])
        for n, size in ((50, d), (90, d), (90, dv), (50, dv))
    )
    # The second sequence has no query; of the third, 20 of 35 keys are in use, and 9 of 12 queries
    cu_q, cu_k = np.array([3, 30, 30, 42], np.int32), np.array([5, 40, 52, 87], np.int32)
    used = np.array([35, 12, 20], np.int32)
    options: dict[str, Any] = {"seqused_k": used, "max_seqlen_q": 27, "causal": True}

    def gradients_of(arrays: Any, ends: Any, options: dict[str, Any], **into: Any) -> Any:
        results = cufa.attention_varlen(*arrays[1:], *ends, return_lse=True, **options)
        function: Any = cufa.attention_varlen_backward
        return function(*arrays, *results, *ends, **options, **into)

    given = [on_gpu(x) for x in (dout, q, k, v)]
    on_device = {**options, "seqused_k": on_gpu(used)}
    found = gradients_of(given, [on_gpu(x) for x in (cu_q, cu_k)], on_device)
    rows, keys = slice(3, 42), slice(5, 87)
    inside = dout[rows], q[rows], k[keys], v[keys]
    expected = gradients_of(inside, (cu_q - 3, cu_k - 5), options)
    for array, its, place in zip(found, expected, (rows, keys, keys), strict=True):
        whole = np.zeros(array.shape, np.float32)
        whole[place] = its
        np.testing.assert_allclose(array.get().astype(np.float32), whole, atol=0.05)
    assert not np.any(found[1].get()[72:].astype(np.float32))
    # Places whose rows are contiguous, but begin at no multiple of 16 bytes
    into = {
        f"d{name}": one_in(np.zeros(x.shape, x.dtype)) for name, x in zip("qkv", found, strict=True)
    }
    for written in into.values():
        written.host.fill(np.nan)
    gradients_of(given, [on_gpu(x) for x in (cu_q, cu_k)], on_device, **into)
    for written, array in zip(into.values(), found, strict=True):
        np.testing.assert_array_equal(written.get(), array.get())


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@forms
@exhaustive("backward", but=lambda form, layout: form is MMA)
def test_calls_like_an_earlier_one(
    gpu: Gpu, rng: np.random.Generator, form: Case, layout: str
) -> None:
    """They compute with their own arrays."""
    sizes = (1, 2, 1, 45, 71)
    for wrt in (("q", "k", "v"), ("v", "q")):
        for _ in range(2):
            arrays = drawn(rng, form, sizes, causal=True)
            dout, q, k, v, *_ = arrays
            given = [x.swapaxes(1, 2) if layout == "bshd" and x.ndim == 4 else x for x in arrays]
            given = [np.ascontiguousarray(x) for x in given]
            found = gradients(tuple(given), wrt=wrt, causal=True, layout=layout)
            if layout == "bshd":
                found = {name: x.swapaxes(1, 2) for name, x in found.items()}
            ExpectedGradients(dout, q, k, v, causal=True).assert_accepts(found, f"{form} {wrt}")
    copied = any(n * DTYPES[form[1]].itemsize % 16 for n in form[2:])  # by each call
    assert gpu.parsed == (4 if copied else 2)
