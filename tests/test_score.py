"""score.py: the parts of a score are structs of the kernels, with parameters that problems have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cufa
from cufa.features.parts import PARTS, edges
from cufa.features.softcap import Softcap
from cufa.problem.problem import Problem, checked

FOLDER = Path(cufa.__file__).parent / "kernels"


def struct_of(name: str) -> str:
    """Return the text of a part's struct, or of the template that it is an instance of."""
    source = "".join(header.read_text() for header in FOLDER.rglob("*.cuh"))
    alias = re.search(rf"^using {name} = (\w+)<", source, re.MULTILINE)
    found = re.search(
        rf"^struct {alias[1] if alias else name} .*?^}};", source, re.MULTILINE | re.DOTALL
    )
    assert found
    return found[0]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_a_struct(name: str) -> None:
    part = PARTS[name]
    assert part.name == name
    assert struct_of(name)
    np.dtype([tuple(number) for number in part.numbers], align=True)
    assert bool(part.axes) == bool(part.dtype)


@pytest.mark.parametrize("name", PARTS)
def test_edges_are_those_of_the_struct(name: str) -> None:
    struct = struct_of(name)
    part = PARTS[name]
    assert ("LEFT_EDGE = true" in struct) == part.left_edge
    assert ("RIGHT_EDGE = true" in struct) == part.right_edge
    assert edges((name,)) == part.left_edge + part.right_edge
    assert edges(()) == 0


@pytest.mark.parametrize(
    ("options", "score"),
    [
        ({}, ()),
        ({"causal": True}, ("Causal",)),
        ({"causal": "bottom-right"}, ("Causal",)),
        ({"causal": "top-left"}, ("TopLeft",)),
        ({"window": (None, 0)}, ("Causal",)),
        ({"window": (5, 0)}, ("Causal", "WindowLeft")),
        ({"window": (5, 3), "causal": True}, ("Causal", "WindowLeft")),
        ({"window": (3, 4)}, ("WindowLeft", "WindowRight")),
        ({"window": (None, 4), "causal": "top-left"}, ("TopLeft", "WindowRight")),
        ({"window": (None, 0), "causal": "top-left"}, ("TopLeft", "WindowRight")),
        ({"window": (2**40, None)}, ()),
        ({"softcap": 50, "causal": True}, ("FineSoftcap", "Causal")),
        ({"softcap": 50.0, "dtype": "bfloat16"}, ("Softcap",)),
        ({"softcap": 50.0, "dtype": "float32"}, ("ExactSoftcap",)),
    ],
)
def test_a_problem_names_its_parts(options: dict[str, Any], score: tuple[str, ...]) -> None:
    q = (1, 2, 3, 64)
    problem = Problem.of_shapes(q, q, q, **options)
    assert problem.score == score
    assert checked(problem) == problem
    for part in problem.score:
        for parameter in PARTS[part].parameters:
            assert np.dtype(parameter.dtype).type(problem.numbers[parameter.name]) is not None


@pytest.mark.parametrize(
    ("dtype", "part"),
    [("float16", "FineSoftcap"), ("bfloat16", "FineSoftcap"), ("float32", "ExactSoftcap")],
)
def test_a_log_sum_exp_asks_for_more_of_a_softcap(dtype: str, part: str) -> None:
    q = (1, 2, 3, 64)
    problem = Problem.of_shapes(q, q, q, dtype=dtype, softcap=5.0)._replace(returns_lse=True)
    assert problem.score == problem.in_cache.score == (part,)
    assert problem.without(Softcap).score == ()
