"""Arrays -> launch of ``kernels/merge.cu``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cufa.arrays import ALIGNMENT, Array
from cufa.launch.counters import is_capturing
from cufa.launch.launch import PreparedLaunch, ready
from cufa.specs.instance import Instance
from cufa.specs.merge import MAX_PARTS, PART, SPEC


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
        _refuse_capture("outs", f"the addresses of more than {MAX_PARTS}")
    outs = _alike("outs", outs, rows=True)
    lses = _alike("lses", lses, rows=False)
    direct = out.shape[3] == 1 or out.strides[3] == out.itemsize
    if not direct:
        _refuse_capture("out", f"of strides {out.strides} the result")
    written = out if direct else cupy.empty(out.shape, out.dtype)
    instance = instance_of(outs, written)
    parts = parts_at(outs, lses)
    others = cupy.asarray(parts[MAX_PARTS:].view(np.uint64)) if len(parts) > MAX_PARTS else None
    parameter = filled(outs, lses, written, lse)
    parameter["part"][0, : len(parts)] = parts[:MAX_PARTS]
    parameter["others"] = 0 if others is None else others.data.ptr
    rows = SPEC.threads // (out.shape[3] // instance.arguments[0])
    PreparedLaunch(ready(instance, -(-lse.size // rows), SPEC.threads), parameter)()
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
    copied = [array for array in arrays if not array.flags.c_contiguous]
    if copied:
        _refuse_capture(name, f"of shape {first.shape} have different strides, and copies")
    return [cupy.ascontiguousarray(array) for array in arrays]


def _refuse_capture(name: str, what: str) -> None:
    if is_capturing():
        raise ValueError(
            f"{name}: {what} would need memory, for which a call that is captured into a CUDA "
            "graph has no place: give fewer, contiguous arrays"
        )


def instance_of(outs: Sequence[Array], out: Array) -> Instance:
    """Return the instantiation that reads and writes the most at once that all arrays allow."""
    elements = ALIGNMENT // outs[0].itemsize
    addresses = [step for array in (*outs, out) for step in (array.data.ptr, *_steps(array))]
    whole = out.shape[3] % elements == 0 and all(step % ALIGNMENT == 0 for step in addresses)
    dtypes = (outs[0].dtype.name, out.dtype.name)
    return Instance(SPEC.name, dtypes, (elements if whole else 1,))


def _steps(array: Array) -> list[int]:
    return [t for n, t in zip(array.shape[:3], array.strides[:3], strict=True) if n > 1]


def parts_at(outs: Sequence[Array], lses: Sequence[Array]) -> np.ndarray:
    """Return where the parts lie."""
    parts = np.zeros(len(outs), PART)
    parts["out"] = [array.data.ptr for array in outs]
    parts["lse"] = [array.data.ptr for array in lses]
    return parts


def filled(outs: Sequence[Array], lses: Sequence[Array], out: Array, lse: Array) -> np.ndarray:
    """Return the kernel's parameter, but where the parts lie."""
    parameter = np.zeros(1, SPEC.params)
    p = parameter[0]
    p["out"], p["lse"] = out.data.ptr, lse.data.ptr
    for name, array in (("of_out", out), ("of_parts", outs[0]), ("of_part_lses", lses[0])):
        p[name] = tuple(step // array.itemsize for step in array.strides[:3])
    batch, heads, seq, head_dim = out.shape
    p["rows"], p["heads"], p["seq"], p["head_dim"] = batch * heads * seq, heads, seq, head_dim
    p["parts"] = len(outs)
    return parameter
