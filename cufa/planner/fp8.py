"""Problem + Device -> Fp8Plan: how attention of arrays in 8 bits runs. Integers only, no CuPy."""

from __future__ import annotations

from cufa.device import Device
from cufa.features.parts import kind_of, part_named
from cufa.planner.checks import check_device, check_lengths
from cufa.planner.plan import Plan, planned
from cufa.problem.problem import Problem
from cufa.specs import quantize
from cufa.specs.fp8_wgmma import SCORES, SPEC
from cufa.specs.instance import Instance
from cufa.specs.variant import Fp8Variant, Variant

_MAX_LENGTH = 2**29
"""Keys, and queries: V has two rows of its tensor map for each key at most."""


class Fp8Plan(Plan):
    """How a call in 8 bits runs."""

    __slots__ = ()

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.variant} grid={self.grid} block={self.block} smem={self.smem_bytes} "
            f"section_heads={self.section_heads} late_rows={self.late_rows} ({self.reason})"
        )


def plan_fp8(problem: Problem, device: Device, kernel: object = None) -> Fp8Plan:
    """Return how a problem of arrays in 8 bits runs on a device.

    Parameters
    ----------
    problem : Problem
        Its `dtype` is that of the result.
    device : Device
    kernel : object
        The kernel that the call names, if it names one.

    Raises
    ------
    TypeError, ValueError
        The kernel, or one of its name, cannot run this.
    """
    problem = problem._replace(precision="fp8")
    score = problem.score
    _check(problem, score, device, kernel)
    dims = SPEC.padded(device, problem.head_dim, problem.head_dim_v)
    (shape,) = SPEC.tiles(device, dims)
    variant = Fp8Variant(*(SPEC.name, problem.dtype, *dims, *shape), score=score, kv=problem.kv)
    reason = "the kernel of 8 bits" if kernel is None else "forced kernel"
    return Fp8Plan._make(planned(problem, variant, device, reason))


def kernels(problem: Problem, device: Device) -> tuple[Variant | Instance, ...]:
    """Return the kernels of a call with ``precision="fp8"`` on arrays of the result's dtype."""
    variant = plan_fp8(problem, device).variant
    return (
        variant,
        quantize.instance(problem.dtype, variant.head_dim, True, False, quantize.WHOLE),
        quantize.instance(problem.dtype, variant.head_dim_v, False, True, quantize.WHOLE),
    )


def _check(problem: Problem, score: tuple[str, ...], device: Device, kernel: object) -> None:
    check_device(device)
    name, others = SPEC.name, "without precision, arrays of 16 bits"
    if not (kernel is None or isinstance(kernel, str)):
        raise TypeError(f"kernel must be None or {name!r} in 8 bits, not {type(kernel).__name__}")
    if kernel not in (None, name):
        raise ValueError(f"kernel must be None or {name!r} in 8 bits, not {kernel!r}")
    if not SPEC.runs_on(device):
        raise ValueError(
            f"precision: {name}, the kernel of 8 bits, is for {' and '.join(SPEC.archs)}, "
            f"{device.name} is {device.arch}; {others} run there, and NumPy arrays on the CPU"
        )
    if problem.dtype not in SPEC.dtypes:
        raise ValueError(
            f"out_dtype: {name} writes {' or '.join(SPEC.dtypes)}, not {problem.dtype}"
        )
    for part in score:
        if kind_of(part) not in SCORES:
            argument = part_named(part).argument
            raise ValueError(f"{argument}: {name} has no such scores; {others} take it")
    check_lengths(problem, f"{name}'s", _MAX_LENGTH, blocks=problem.kv == "Varlen")
