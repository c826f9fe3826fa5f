"""Gradients of features together, as they are drawn: on the CPU.

A failure names a number: ``backward_combinations.checked(173, 150, numpy)`` makes that call alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from backward_combinations import checked

TOGETHER = 10


@pytest.mark.parametrize("group", range(36))
def test_on_the_cpu(group: int) -> None:
    for number in range(group * TOGETHER, (group + 1) * TOGETHER):
        try:
            checked(number, 150, np)
        except Exception as error:
            raise AssertionError(f"draw {number}: {error}") from error
