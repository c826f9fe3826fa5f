"""dtypes.py: one row an element type, which agrees with NumPy and with the CUDA headers."""

from __future__ import annotations

import pytest

from cufa.dtypes import DTYPES, Dtype
from cufa.features.parts import PARTS

rows = pytest.mark.parametrize("row", DTYPES.values(), ids=DTYPES)


@rows
def test_row_agrees_with_numpy(row: Dtype) -> None:
    assert DTYPES[row.name] is row
    assert row.numpy.name == row.name
    assert row.numpy.isnative
    assert row.numpy.itemsize == row.bytes


@rows
def test_softcaps_are_parts_of_a_score(row: Dtype) -> None:
    for returns_lse in (False, True):
        assert PARTS[row.softcap_part(returns_lse)].argument == "softcap"
    assert row.softcap_part(True) == row.softcap_with_lse
