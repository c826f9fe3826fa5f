"""Features together, as they are drawn, by the kernels' source on the host."""

from __future__ import annotations

import sys

import pytest
from combinations import checked
from emulated import needs_compiler
from exhaustive import FAMILIES, exhaustive
from test_emulated import emulated, emulator  # noqa: F401

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]


@pytest.mark.parametrize("number", range(0, 300, 12))
@exhaustive(*FAMILIES, one_in=2)
def test_together(number: int) -> None:
    checked(number, 300, sys.modules["cupy"], 2)
