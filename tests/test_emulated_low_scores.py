"""Masks of very low numbers by the kernels' source on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from exhaustive import exhaustive
from low_scores import VALUES, WAYS, assert_right, by_bias, by_function
from played_gpu import on_gpu
from reference import random_inputs
from test_emulated import (  # noqa: F401
    ALL,
    FA1,
    FA3_TURNS,
    ONE_OF_EACH,
    emulated,
    emulator,
)

import cufa
from cufa.specs.variant import Variant

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]

forms = pytest.mark.parametrize(
    "form", [form for form in ALL if form is not FA1], ids=lambda f: f.split(", Score")[0]
)


def always(form: str, way: Any) -> bool:
    """Whether a form's test always runs."""
    return form in ONE_OF_EACH or (form is FA3_TURNS and way in (by_bias, by_function))


@forms
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@exhaustive(but=always, one_in=3)
def test_masks_of_low_numbers(rng: np.random.Generator, form: str, way: Any) -> None:
    variant = Variant.parse(form.format(score=""))
    d, dv = variant.head_dim, variant.head_dim_v
    causal = form is not FA3_TURNS
    for sq, sk in ((70, 150), (30, 20)):
        arrays = random_inputs(rng, variant.dtype, hq=2, hk=1, sq=sq, sk=sk, d=d, dv=dv)
        given = [on_gpu(x) for x in arrays]
        for value in VALUES:
            there = way(value, (sq, sk), on_gpu)
            plan: Any = cufa.explain(*given, causal=causal, **there)
            chosen = variant._replace(score=plan.variant.score)
            out, lse = cufa.attention(
                *given, causal=causal, kernel=chosen, return_lse=True, **there
            )
            assert_right(out.get(), lse.get(), arrays, way, value, causal)
