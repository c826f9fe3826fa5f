"""Arrays -> launch of ``kernels/merge.cu``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cufa.arrays import ALIGNMENT, Array
from cufa.launch.auxiliary import address, are_aligned, prepared, tensor
from cufa.launch.capture import refuse_memory
from cufa.specs.instance import Instance
from cufa.specs.merge import MAX_PARTS, PART, SPEC

_WAY_OUT = "give fewer, contiguous arrays"


def merge(outs: Sequence[Array], lses: Sequence[Array], out: Array, lse: Array) -> None:
    """Merge parts on the current device and stream.

    Parameters
    ----------
    outs : sequence of cupy.ndarray, (batch, heads, seq, head_dim)
    lses : sequence of cupy.ndarray, (batch, heads, seq) float32
    out : cupy.ndarray
        Where the result goes; any strides.
    lse : cupy.ndarray
        The same; contiguous.
    """
    import cupy

    if out.size == 0:
        lse[...] = -np.inf  # of no rows, or of rows of no elements
        return
    if len(outs) > MAX_PARTS:
        refuse_memory(f"outs: the addresses of more than {MAX_PARTS} would need memory", _WAY_OUT)
    outs = _alike("outs", outs, rows=True)
    lses = _alike("lses", lses, rows=False)
    direct = out.shape[3] == 1 or out.strides[3] == out.itemsize
    if not direct:
        refuse_memory(f"out: of strides {out.strides} the result would need memory", _WAY_OUT)
    written = out if direct else cupy.empty(out.shape, out.dtype)
    parts = np.zeros(len(outs), PART)
    parts["out"], parts["lse"] = ([x.data.ptr for x in arrays] for arrays in (outs, lses))
    others = cupy.asarray(parts[MAX_PARTS:].view(np.uint64)) if len(parts) > MAX_PARTS else None
    parameter = np.zeros(1, SPEC.params)
    p = parameter[0]
    p["out"], p["lse"], p["others"] = address(written), address(lse), address(others)
    steps = (tensor(array)[1:] for array in (written, outs[0], lses[0]))
    p["of_out"], p["of_parts"], p["of_part_lses"] = steps
    _, p["heads"], p["seq"], p["head_dim"] = out.shape
    p["rows"], p["parts"] = lse.size, len(outs)
    p["part"][: len(parts)] = parts[:MAX_PARTS]
    elements = ALIGNMENT // outs[0].itemsize
    if out.shape[3] % elements or not are_aligned(*outs, written):
        elements = 1
    instance = Instance(SPEC.name, (outs[0].dtype.name, out.dtype.name), (elements,))
    rows = SPEC.threads // (out.shape[3] // elements)
    prepared(instance, -(-lse.size // rows), parameter)()
    if not direct:
        out[...] = written


def _alike(name: str, arrays: Sequence[Array], rows: bool) -> Sequence[Array]:
    """Return arrays that have the same strides: as they are, or copies."""
    import cupy

    first = arrays[0]
    if all(array.strides == first.strides for array in arrays) and not (
        rows and first.shape[3] > 1 and first.strides[3] != first.itemsize
    ):
        return arrays
    if not all(array.flags.c_contiguous for array in arrays):
        what = f"{name}: of shape {first.shape} have different strides, and copies"
        refuse_memory(f"{what} would need memory", _WAY_OUT)
    return [cupy.ascontiguousarray(array) for array in arrays]
