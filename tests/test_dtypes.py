"""dtypes.py: one row an element type, which agrees with NumPy and with the CUDA headers."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from cufa.dtypes import DTYPES, Dtype, PScale
from cufa.features.parts import PARTS

rows = pytest.mark.parametrize("row", DTYPES.values(), ids=DTYPES)
HEADER = (resources.files("cufa.kernels") / "softmax.cuh").read_text()


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


@rows
def test_p_is_scaled_as_in_the_header(row: Dtype) -> None:
    """The header's first struct is for all types that it has no other for."""
    numbers = r"AT_MAX_LOG2 = (-?\d+);[^}]*MAX_SUM = 0x1p(\d+)f;"
    found: dict[str, str] = dict(re.findall(r"struct PScale(?:<(\w+)>)? {([^}]*)}", HEADER))
    match = re.search(numbers, found[row.cpp] if row.cpp in found else found[""])
    assert match is not None
    if row.p_scale is not None:
        assert row.p_scale == PScale(*map(int, match.groups()))
    assert (row.p_scale is None) == (row.tma is None)
