"""Which tests are of a kernel's every form, and run when that kernel changes."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

#: Kernels that are verified together, by the name of their family.
FAMILIES = {
    **{kernel: (kernel,) for kernel in ("fa3_wgmma", "fa2_mma", "fa2_fp32", "fa1_fp32")},
    "decode": ("decode", "decode_wgmma"),
    "decode8": ("decode_fp8", "decode_int8"),
    "backward": (
        *("bwd_wgmma", "bwd_dq_wgmma", "bwd_dkv_wgmma", "bwd_mma", "bwd_fp32"),
        *("bwd_prepare", "bwd_finish", "bwd_join", "bwd_sinks", "bwd_sums"),
    ),
    "fp8": ("fp8_wgmma",),
    "others": (
        *("append", "append8", "means8", "expand8", "lse_mean"),
        *("merge", "block_mask", "block_lists", "clear_rows"),
    ),
    "quantize": ("quantize",),
}


def exhaustive(
    *families: str, but: Callable[..., bool] | None = None, one_in: int | None = None
) -> pytest.MarkDecorator:
    """Mark tests that run when a family's kernels have changed, and otherwise not.

    A kernel that has not changed is as all its tests found it: the others are there for what calls
    it.

    Parameters
    ----------
    *families : str
        Without any, the test's parameter `form` or `kernel` says which.
    but : function, optional
        Says of a test's parameters, which it takes by their names, if the test always runs.
    one_in : int, optional
        One in this many of these always runs: if the numbers of its parameters' values add up to a
        multiple. So each value of one parameter meets others of another.
    """
    assert set(families) <= set(FAMILIES)
    return pytest.mark.exhaustive(*families, but=but, one_in=one_in)


def families_of(item: Any) -> set[str]:
    """Return the families on whose change a test runs; none if it always runs."""
    mark = item.get_closest_marker("exhaustive")
    if mark is None:
        return set()
    params = item.callspec.params if hasattr(item, "callspec") else {}
    but, one_in = mark.kwargs["but"], mark.kwargs["one_in"]
    always = but is not None or one_in is not None
    if but is not None:
        always = but(**{name: params[name] for name in signature(but).parameters})
    if one_in is not None:
        always = always and _numbers(item) % one_in == 0
    if always:
        return set()
    if mark.args:
        return set(mark.args)
    kernel = (params.get("form") or params["kernel"]).split("<")[0]
    return {family for family, kernels in FAMILIES.items() if kernel in kernels}


def _numbers(item: Any) -> int:
    """Return the sum of the numbers of a test's values, each in its own list."""
    total = 0
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        mine = [item.callspec.params[name] for name in names]
        total += list(values).index(mine[0] if len(names) == 1 else tuple(mine))
    return total


def chosen(families: str) -> set[str]:
    """Return the families that a command line names, with commas; or all."""
    found = set(FAMILIES) if families == "all" else {name for name in families.split(",") if name}
    if not found <= set(FAMILIES):
        raise pytest.UsageError(f"--exhaustive: all, or some of {', '.join(FAMILIES)}")
    return found
