"""decode.cu on the host, handed lengths, tables and numbers that cannot be as they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from played_gpu import Gpu, on_gpu
from reference import random_inputs
from test_emulated import emulator  # noqa: F401
from test_emulated_decode import checked, emulated  # noqa: F401

import cufa

pytestmark = needs_compiler


@pytest.mark.parametrize("page_size", [0, 7, 64])
def test_lengths_and_tables_that_lie(
    rng: np.random.Generator,
    page_size: int,
) -> None:
    """Results mean nothing, but are of what lies in the caches: around them is no memory."""
    lengths = np.array([-1, -(2**31), 2**31 - 1, 10**6, 100], np.int32)
    q, k, v = random_inputs(rng, "bfloat16", b=5, hq=4, hk=2, sq=2, sk=128, d=64)
    options: dict[str, Any] = {"lengths": on_gpu(lengths)}
    if page_size:
        table = rng.integers(-(2**31), 2**31, (5, 128 // page_size)).astype(np.int32)
        table[:, ::2] = rng.choice([-1, 0, 4, 5, 6], table[:, ::2].shape)
        options["block_table"] = on_gpu(table)
        k, v = k[:, :, :page_size], v[:, :, :page_size]
    arrays = [on_gpu(x) for x in (q, k, v)]
    for splits in (None, 3):
        out = cufa.decode(*arrays, num_splits=splits, **options).get().astype(np.float32)
        assert np.isfinite(out).all()
        assert not out[:2].any()  # negative lengths are none
        assert out[2:].any(axis=(1, 2, 3)).all()


def test_a_number_of_splits_of_few_bits(rng: np.random.Generator) -> None:
    """2 x 2 units have 200 pieces, which 8 bits cannot count."""
    splits: Any = np.int8(50)
    checked(rng, [1700, 10], hq=2, num_splits=splits)


def test_what_lies_on_the_host_is_checked(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v = (on_gpu(x) for x in random_inputs(rng, "float16", b=2, hq=2, sq=1, sk=16, d=64))
    gpu.launches.clear()
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"lengths": np.array([3, 17])}, r"lengths\[1\] is 17: it must be 0 to 16"),
        ({"lengths": np.array([-1, 17])}, r"lengths\[0\] is -1: it must be 0 to 16"),
        ({"block_table": np.array([[0, 1], [0, 2]])}, r"block_table\[1, 1\] is 2, .* 2 pages"),
        (
            {"block_table": np.array([[0, -1], [-1, 9]]), "lengths": np.array([16, 1])},
            r"block_table\[1, 0\] is -1, .* 2 pages",
        ),
    )
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            cufa.decode(q, k, v, **given)
    assert not gpu.launches
