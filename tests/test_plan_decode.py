"""DecodeProblem -> DecodePlan: what is too large for a kernel, and numbers of few bits."""

from __future__ import annotations

from typing import Any

import pytest

from cufa import device
from cufa.decode_problem import DecodeProblem
from cufa.planner.decode import plan

H200 = device.named("h200")


def problem(**sizes: Any) -> DecodeProblem:
    fields = {
        **{"dtype": "float16", "batch": 1, "heads_q": 8, "heads_kv": 2, "seq_q": 1},
        **{"capacity": 1000, "pages": 0, "page_size": 0, "head_dim": 64, "head_dim_v": 64},
        **{"causal": True, "scale": 0.125},
    }
    return DecodeProblem(**{**fields, **sizes})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"heads_q": 2**16, "heads_kv": 1, "seq_q": 2**15}, "q: 2147483648 rows"),
        ({"heads_q": 2**16, "batch": 2**15}, "or 2147483648 heads of all"),
        ({"capacity": 2**30, "heads_kv": 8, "batch": 2**6}, "k_cache: .* tiles of keys"),
    ],
)
def test_too_large(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(problem(**sizes), H200)


def test_splits_are_no_more_than_tiles() -> None:
    assert plan(problem(), H200, 10**6).splits == -(-1000 // plan(problem(), H200).variant.bn)
