"""Chunked attention by the kernels' source on the host: chunks that are no multiple of a tile."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import test_emulated_decode
from emulated import Emulator, needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, on_gpu
from reference import Expected, assert_accepted, random_inputs
from test_attention_chunk import bound_of_few_keys, same_chunk
from test_emulated import (  # noqa: F401
    ALL,
    FA1,
    FA3,
    FA3_ONE_SLOT,
    FA3_TURNS,
    FA3_TWO_OF_THREE,
    FA3_WIDE,
    ONE_OF_EACH,
    emulated,
    emulator,
)
from test_emulated_varlen import varlen
from test_varlen import assert_each_is_right, ragged

import cufa
from cufa.specs.variant import Variant

pytestmark = needs_compiler

on_two = pytest.mark.usefixtures("emulated")
forms = pytest.mark.parametrize(
    "form",
    [*(form for form in ALL if form is not FA1), FA3_TWO_OF_THREE, FA3_ONE_SLOT],
    ids=lambda form: form[:50],
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"attention_chunk": 50, "causal": True},
    {"attention_chunk": 90},
    {"attention_chunk": 1},
    {"attention_chunk": 70, "window": (33, 20)},
    {"attention_chunk": 500, "causal": "top-left", "softcap": 3.0},
)


def checked(form: str, rng: np.random.Generator, sizes: Any, **options: Any) -> None:
    variant = Variant.parse(form.format(score=""))
    hq, hk, sq, sk = sizes
    d, dv = variant.head_dim, variant.head_dim_v
    arrays = random_inputs(rng, variant.dtype, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
    given = [on_gpu(x) for x in arrays]
    there: dict[str, Any] = {n: on_gpu(x) if hasattr(x, "dtype") else x for n, x in options.items()}
    plan: Any = cufa.explain(*given, **there)
    chosen = variant._replace(score=plan.variant.score)
    out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **there)
    chunk = options.pop("attention_chunk")
    expected = Expected(*arrays, mask=same_chunk(sq, sk, chunk), **options)
    bound = bound_of_few_keys(expected, arrays, chunk, **options)
    expected.assert_accepts(out.get(), lse.get(), f"{chosen} {sizes}", bound)


@on_two
@forms
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@exhaustive(but=lambda form, options: form in ONE_OF_EACH or options is OPTIONS[0], one_in=3)
def test_chunks(rng: np.random.Generator, form: str, options: dict[str, Any]) -> None:
    for sizes in ((2, 1, 201, 150), (1, 1, 90, 333), (8, 2, 13, 250), (1, 1, 205, 420)):
        checked(form, rng, sizes, **options)


@on_two
@pytest.mark.parametrize("form", [FA3, FA3_TURNS, FA3_WIDE, FA3_ONE_SLOT], ids=lambda f: f[:50])
@pytest.mark.parametrize("chunk", [3, 64, 128, 131])
@exhaustive(but=lambda form, chunk: chunk == 131 and form is not FA3)
def test_many_tiles_of_rows(rng: np.random.Generator, form: str, chunk: int) -> None:
    """A block's tiles end and begin with chunks, or within; large scores, too."""
    for causal in (True, False):
        checked(form, rng, (3, 1, 517, 517), attention_chunk=chunk, causal=causal, scale=2.0)


@on_two
@pytest.mark.parametrize("form", [*ONE_OF_EACH, FA3_TURNS], ids=lambda form: form[:50])
def test_slopes_turn_at_any_key(rng: np.random.Generator, form: str) -> None:
    """Without a causal mask, keys on both sides of a query are seen."""
    slopes = np.array([0.3, -0.1], np.float32)
    for chunk in (90, 40):
        variant = Variant.parse(form.format(score=""))
        arrays = random_inputs(
            rng, variant.dtype, hq=2, sq=333, d=variant.head_dim, dv=variant.head_dim_v
        )
        given = [on_gpu(x) for x in arrays]
        there: dict[str, Any] = {"attention_chunk": chunk, "alibi_slopes": on_gpu(slopes)}
        plan: Any = cufa.explain(*given, **there)
        chosen = variant._replace(score=plan.variant.score)
        out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **there)
        mask = same_chunk(333, 333, chunk)
        assert_accepted(out.get(), lse.get(), *arrays, mask=mask, alibi_slopes=slopes)


@on_two
@pytest.mark.parametrize("form", [*ONE_OF_EACH, FA3_WIDE], ids=lambda form: form[:50])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@exhaustive(one_in=2)
def test_sequences_of_any_lengths(
    rng: np.random.Generator, form: str, options: dict[str, Any]
) -> None:
    variant = Variant.parse(form.format(score=""))
    lengths = (30, 170, 1, 0, 65), (170, 70, 95, 9, 130)
    arrays = ragged(rng, variant.dtype, lengths, d=variant.head_dim)
    found = varlen(form, arrays, **options)
    assert_each_is_right(found, arrays, **options)


# Caches: the block of `decode.cu` and that of `decode_wgmma.cu`.


@pytest.fixture
def thirteen(
    gpu: Gpu,
    emulator: Emulator,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Emulator:
    """Play the GPU of the tests of `decode`."""
    plain = test_emulated_decode.emulated.__wrapped__  # type: ignore[attr-defined]
    found: Emulator = plain(gpu, emulator, monkeypatch)
    found.seed = zlib.crc32(request.node.name.encode()) % 8
    return found


@pytest.mark.usefixtures("thirteen")
@pytest.mark.parametrize("page_size", [0, 7, 16, 64])
@pytest.mark.parametrize("chunk", [1, 40, 129, 600])
@exhaustive("decode", one_in=2)
def test_decode(rng: np.random.Generator, chunk: int, page_size: int) -> None:
    """Keys of earlier chunks, and their pages, may hold anything."""
    for lengths, sq in (([300, 0, 77, 1, 40], 1), ([500, 129], 3), ([41, 80, 2], 5)):
        test_emulated_decode.checked(
            rng, lengths, sq=sq, page_size=page_size, attention_chunk=chunk
        )
    more: dict[str, Any] = {"window": (30, None), "num_splits": 3, "softcap": 5.0}
    test_emulated_decode.checked(
        rng, [290, 100], sq=2, page_size=page_size, attention_chunk=chunk, **more
    )


@pytest.mark.usefixtures("thirteen")
@pytest.mark.parametrize("page_size", [0, 64])
def test_decode_of_many_rows(rng: np.random.Generator, page_size: int) -> None:
    """By `decode_wgmma`, which takes 64 rows at once."""
    sizes: dict[str, Any] = {"hq": 16, "hk": 1, "sq": 8, "d": 128, "dv": 128}
    options: dict[str, Any] = {"attention_chunk": 90, "kernel": "decode_wgmma"}
    for causal in (True, False):
        test_emulated_decode.checked(
            rng, [300, 64, 7], page_size=page_size, causal=causal, **sizes, **options
        )
