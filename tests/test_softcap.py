"""softcap.py: the polynomial that takes the place of bfloat16's tanh."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cufa.features.softcap import Curve, curve
from cufa.problem.problem import Problem


@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0, 1e4])
@pytest.mark.parametrize("scale", [0.01, 0.125, 1.0])
def test_it_is_tanh_up_to_its_end(scale: float, softcap: float) -> None:
    root, middle, rest, end = curve(scale, softcap)
    if not 2**-12 < scale / softcap < 2**12:
        assert end == 0
        return
    s = np.linspace(-0.75, 0.75, 1001) * softcap / scale
    found = s * ((root * s**2 + middle) ** 2 + rest)
    expected = softcap * np.tanh(scale * s / softcap) * math.log2(math.e)
    assert np.abs(found - expected).max() < 2**-12 * 0.75 * softcap * math.log2(math.e)
    assert end == pytest.approx(expected[-1])


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_beyond_its_end_it_grows(scale: float) -> None:
    """So that P of a score there tells that the curve is wrong."""
    root, middle, rest, end = curve(scale, 20.0)
    s = np.linspace(0.75, 100, 100_001) * 20 / scale
    found = s * ((root * s**2 + middle) ** 2 + rest)
    assert (np.diff(found) > 0).all()
    assert found[0] == pytest.approx(end, rel=2**-11)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 2.0**-12, 2.0**12, 1e15])
def test_there_is_none_of_factors_whose_powers_float32_has_not(scale: float) -> None:
    assert curve(scale, 1.0) == Curve(0, 0, 0, 0)


def test_a_problem_has_it() -> None:
    shape = (1, 2, 3, 64)
    problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16", softcap=5.0, scale=0.25)
    found = (problem.numbers[f"softcap_{name}"] for name in Curve._fields)
    assert Curve(*found) == curve(0.25, 5.0)
