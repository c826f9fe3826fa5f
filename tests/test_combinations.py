"""Features together, as they are drawn: on the CPU, on a GPU, by the kernels' source on the host.

A failure names a number: ``pytest tests/test_combinations.py -k "cpu and 17"`` makes that group of
calls alone, and ``combinations.checked(173, 300, numpy)`` one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from combinations import checked
from drawn import Drawn

from cufa import device
from cufa.specs import KERNELS

TOGETHER = 10
groups = pytest.mark.parametrize("group", range(30))


def of_group(group: int) -> range:
    return range(group * TOGETHER, (group + 1) * TOGETHER)


def checked_by_number(number: int, *how: Any) -> None:
    try:
        checked(number, *how)
    except Exception as error:
        raise AssertionError(f"draw {number}: {error}") from error


@groups
def test_on_the_cpu(group: int) -> None:
    for number in of_group(group):
        checked_by_number(number, 300, np)


@pytest.mark.gpu
@groups
def test_on_the_gpu(cupy: Any, group: int) -> None:
    """Each call twice: the same bits."""
    gpu = device.of_id(cupy.cuda.runtime.getDevice())
    for number in of_group(group):
        kernel = Drawn(number, 64).kernel
        if kernel is None or KERNELS[kernel].runs_on(gpu):
            checked_by_number(number, 700, cupy, 2)
