"""The parameter that a launch of `decode` passes to the kernel by value."""

from __future__ import annotations

import functools

from cufa.arrays import Ints
from cufa.features.parts import ARRAYS
from cufa.launch.params import LOG2_E, ParameterLayout, scale_log2
from cufa.launch.signature import TENSORS, AddressSlot
from cufa.planner.decode import DecodePlan
from cufa.problem.extras import Extras
from cufa.problem.problem import Problem
from cufa.problem.scales import SCALES
from cufa.specs.kv import DIVISOR
from cufa.specs.variant import Variant


class DecodeLayout(ParameterLayout):
    """The layout of the parameter of kernels that decode.

    Parameters
    ----------
    variant : Variant
    """

    def __init__(self, variant: Variant) -> None:
        addresses = [(f"params.{name}.data", i) for i, name in enumerate("qkvo")]
        super().__init__(variant, [*addresses, ("params.lse", 4)], "params.partial")

    def places_of(self, extras: Extras) -> tuple[AddressSlot, ...]:
        """As in `ParameterLayout`; the address of lengths is 0 where all sequences are full."""
        addresses = [*self.addresses]
        if extras.lengths:
            first = TENSORS + extras.place(len(ARRAYS))
            addresses += [("params.lengths", first), ("kv.block_table", first + 1)]
            behind = first + len(extras.lengths) + len(extras.mods)
            addresses += [(f"params.{name}.data", behind + i) for i, name in enumerate(SCALES)]
        return self.places(addresses, TENSORS, extras)

    def of_plan(self, plan: DecodePlan, problem: Problem) -> list[float]:
        """As in `ParameterLayout`."""
        sizes = "batch", "heads_q", "heads_kv", "head_dim", "head_dim_v"
        known: dict[str, float] = {
            "scale_log2": scale_log2(problem.scale),
            "unified_max": (problem.unified_max or 0.0) * LOG2_E,
            **{name: getattr(problem, name) for name in sizes},
            **{name: getattr(plan, name) for name in ("splits", "slack", "spread", "ends")},
            **named_divisor("group", problem.group),
            **named_divisor("row_tiles", plan.row_tiles),
            **named_divisor("units", problem.heads_kv * plan.row_tiles),
            **named_divisor("blocks", plan.grid),
            **named_divisor("parts", plan.parts),
        }
        return self.numbers(known)

    def of_extras(
        self, problem: Problem, of_arrays: tuple[Ints, ...], extras: Extras
    ) -> dict[str, float]:
        """As in `ParameterLayout`."""
        found = self.of_score(problem, of_arrays)
        for name, scales in zip(SCALES, extras.scales, strict=False):
            for axis, step in zip(("batch", "head", "seq"), scales.strides, strict=True):
                found[f"{name}.stride_{axis}"] = step // scales.dtype.itemsize
        if extras.table is not None:
            found["table_stride"] = extras.table.strides[0] // extras.table.dtype.itemsize
            found["pages"] = problem.pages
            found |= named_divisor("page_size", max(1, problem.page_size))
        return found


@functools.lru_cache(maxsize=1024)
def divisor(n: int) -> tuple[int, int, int]:
    """Return what ``Divisor`` of ``kernels/divisor.cuh`` holds of a number below 2^31."""
    if n == 1:
        return 0, 0, 1
    shift = (n - 1).bit_length() - 1
    return -(-(1 << (32 + shift)) // n), shift, n


def named_divisor(name: str, n: int) -> dict[str, int]:
    """Return the numbers of a ``Divisor`` that has a name."""
    return {f"{name}.{field}": x for (field, _), x in zip(DIVISOR, divisor(n), strict=True)}
