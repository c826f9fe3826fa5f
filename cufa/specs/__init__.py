"""One spec for each kernel.

Nothing else knows a kernel of `attention` or `decode` by its name, except that the modules for
attention in 8 bits know `fp8_wgmma`.

A new kernel is a file of ``cufa/kernels`` and one of the same stem here, named below.
"""

from __future__ import annotations

import functools

from cufa.device import Device
from cufa.specs import (
    append,
    append8,
    block_lists,
    block_mask,
    bwd_dkv_wgmma,
    bwd_dq_wgmma,
    bwd_finish,
    bwd_fp32,
    bwd_join,
    bwd_mma,
    bwd_prepare,
    bwd_sinks,
    bwd_sums,
    bwd_wgmma,
    clear_rows,
    decode,
    decode_fp8,
    decode_int8,
    decode_wgmma,
    expand8,
    fa1_fp32,
    fa2_fp32,
    fa2_mma,
    fa3_wgmma,
    fp8_wgmma,
    lse_mean,
    means8,
    merge,
    quantize,
)
from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import BackwardSpec
from cufa.specs.kernel_spec import KernelSpec
from cufa.specs.spec import Spec

KERNELS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        *(fa3_wgmma.SPEC, fa2_mma.SPEC, fa2_fp32.SPEC, fa1_fp32.SPEC),
        *(decode.SPEC, decode_wgmma.SPEC, decode_fp8.SPEC, decode_int8.SPEC),
    )
}
"""The kernels that compute attention, by name, in the order of preference.

A call of `attention` that names none takes the first that can run it.
"""

ATTENTION_KERNELS = {name: spec for name, spec in KERNELS.items() if not spec.decodes}
"""The kernels of `attention`, by name; the others are for `decode`."""

AUXILIARY_KERNELS: dict[str, AuxiliarySpec] = {
    spec.name: spec
    for spec in (
        *(append.SPEC, append8.SPEC, means8.SPEC, expand8.SPEC, lse_mean.SPEC),
        *(block_mask.SPEC, block_lists.SPEC, clear_rows.SPEC, merge.SPEC, quantize.SPEC),
        *(bwd_prepare.SPEC, bwd_sinks.SPEC, bwd_join.SPEC, bwd_finish.SPEC, bwd_sums.SPEC),
    )
}
"""The kernels that compute no attention, by name."""

BACKWARD_FORMS: tuple[tuple[BackwardSpec, ...], ...] = (
    (bwd_wgmma.SPEC,),
    (bwd_dq_wgmma.SPEC, bwd_dkv_wgmma.SPEC),
    (bwd_mma.SPEC,),
    (bwd_fp32.SPEC,),
)
"""The kernels that compute gradients of attention together, in the order of preference."""

BACKWARD_KERNELS: dict[str, BackwardSpec] = {
    spec.name: spec for form in BACKWARD_FORMS for spec in form
}
"""The kernels that compute gradients of attention, by name."""

FP8_KERNELS: dict[str, KernelSpec] = {fp8_wgmma.SPEC.name: fp8_wgmma.SPEC}
"""The kernels that compute attention of 8-bit arrays, by name."""


@functools.cache
def default_kernel(dtype: str, device: Device, keys: bool = True) -> Spec:
    """Return the kernel that a call of `attention` uses unless it names another.

    Parameters
    ----------
    dtype : str
    device : Device
    keys : bool
        Whether the call has any.
    """
    return next(
        spec
        for spec in ATTENTION_KERNELS.values()
        if dtype in spec.dtypes and spec.runs_on(device) and (keys or not spec.needs_keys)
    )


@functools.cache
def default_decoder(
    rows: int, dtype: str, has_max: bool, device: Device, kv_dtype: str | None = None
) -> Spec:
    """Return the kernel that a call of `decode` uses unless it names another.

    It is that of the largest tiles of rows that are more than half full.

    Parameters
    ----------
    rows : int
        Rows that share a K/V head.
    dtype : str
    has_max : bool
        Whether the call has a `unified_max`.
    device : Device
    kv_dtype : str, optional
        As in `cufa.specs.spec.Spec`.
    """
    can = [spec for spec in KERNELS.values() if spec.decodes and dtype in spec.dtypes]
    can = [spec for spec in can if spec.runs_on(device) and spec.kv_dtype == kv_dtype]
    can = [spec for spec in can if not has_max or "unified" in spec.arguments]
    return next((spec for spec in can[::-1] if 2 * rows > min(spec.rings)), can[0])
