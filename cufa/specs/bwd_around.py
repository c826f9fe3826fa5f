"""The kernels before and after the products of the backward pass."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS
from cufa.specs.instance import Instance
from cufa.specs.structs import struct
from cufa.specs.template_arguments import TemplateArguments

PREPARE = AuxiliarySpec(
    "bwd_prepare",
    PARAMS,
    threads=256,
    moved=("o", "d_out", "lse", "row_lse", "row_delta", "dq_sums"),
)
"""Sums over rows."""

SINKS = AuxiliarySpec("bwd_sinks", PARAMS, threads=256, moved=("row_lse", "row_delta"))
"""The gradients of sinks, from sums over rows."""

JOIN = AuxiliarySpec("bwd_join", PARAMS, threads=256, moved=("kv_sums", "dk", "dv"))
"""The sum of parts of dK and dV."""

FINISH = AuxiliarySpec("bwd_finish", PARAMS, threads=256, moved=("dq_sums", "dq"))
"""dQ from its sums."""

SUMS = AuxiliarySpec(
    "bwd_sums",
    struct(
        ("u8", "sums gradient"),
        ("i8", "elements"),
        ("i4", "batch heads queries keys sums_batch sums_heads sums_queries sums_keys lanes"),
    ),
    threads=128,
)
"""The gradient of an array from its sums."""


def around(spec: AuxiliarySpec, v: TemplateArguments, *more: int, smem_bytes: int = 0) -> Instance:
    """Return a kernel before or after the products; it is the same for all scores.

    Parameters
    ----------
    spec : AuxiliarySpec
    v : TemplateArguments
        The arguments of the products.
    *more : int
        Its own numbers behind the head dim.
    smem_bytes : int
    """
    numbers = v.head_dim, *more
    return Instance(spec.name, (v.dtype,), numbers, (), v.kv, smem_bytes, is_dependent=False)
