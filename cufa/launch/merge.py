"""Arrays -> launch of ``kernels/merge.cu``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cufa import device as devices
from cufa.arrays import ALIGNMENT, Array
from cufa.compiler import jit
from cufa.instance import Instance
from cufa.launch.argument import Prepared
from cufa.launch.counters import is_capturing

THREADS = 256
MAX_PARTS = 128
"""Of a launch: what its parameter, of 4 KiB at most, has room for."""

_STRIDES = [("batch", "i8"), ("head", "i8"), ("seq", "i8")]
PARAMS = np.dtype(
    [
        ("out", "u8"),
        ("lse", "u8"),
        ("of_out", _STRIDES),
        ("of_parts", _STRIDES),
        ("of_part_lses", _STRIDES),
        *((name, "i4") for name in ("rows", "heads", "seq", "head_dim", "parts")),
        ("part", [("out", "u8"), ("lse", "u8")], MAX_PARTS),
    ],
    align=True,
)
"""The layout of ``MergeParams`` in ``kernels/merge.cu``."""


def merge(outs: Sequence[Array], lses: Sequence[Array], out: Array, lse: Array) -> None:
    """Merge parts on the current device and stream.

    Parameters
    ----------
    outs : sequence of cupy.ndarray, (batch, heads, seq, head_dim)
    lses : sequence of cupy.ndarray, (batch, heads, seq) float32
    out : cupy.ndarray
        Where the result goes; of any strides.
    lse : cupy.ndarray
        The same; contiguous.
    """
    import cupy

    if out.size == 0:
        lse[...] = -np.inf  # of no rows, or of rows of no elements
        return
    if len(outs) > MAX_PARTS:
        _refuse_capture("outs", f"more than {MAX_PARTS} are merged in steps, and what these give")
    while len(outs) > MAX_PARTS:  # as many at once as a launch takes, without rounding them
        groups = [slice(i, i + MAX_PARTS) for i in range(0, len(outs), MAX_PARTS)]
        merged = [tuple(cupy.empty(x.shape, np.float32) for x in (out, lse)) for _ in groups]
        for group, (group_out, group_lse) in zip(groups, merged, strict=True):
            _launch(outs[group], lses[group], group_out, group_lse)
        outs, lses = ([each[i] for each in merged] for i in (0, 1))
    _launch(outs, lses, out, lse)


def _launch(outs: Sequence[Array], lses: Sequence[Array], out: Array, lse: Array) -> None:
    import cupy

    outs = _alike("outs", outs, rows=True)
    lses = _alike("lses", lses, rows=False)
    direct = out.shape[3] == 1 or out.strides[3] == out.itemsize
    if not direct:
        _refuse_capture("out", f"of strides {out.strides} the result")
    written = out if direct else cupy.empty(out.shape, out.dtype)
    device_id = cupy.cuda.runtime.getDevice()
    instance = instance_of(outs, written)
    function = jit.kernel(instance, devices.of_id(device_id), device_id)
    parameter = filled(outs, lses, written, lse)
    rows = THREADS // (out.shape[3] // instance.arguments[0])
    Prepared(function, (-(-lse.size // rows), 1, 1), THREADS, parameter)()
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
    return Instance("merge", dtypes, (elements if whole else 1,))


def _steps(array: Array) -> list[int]:
    return [t for n, t in zip(array.shape[:3], array.strides[:3], strict=True) if n > 1]


def filled(outs: Sequence[Array], lses: Sequence[Array], out: Array, lse: Array) -> np.ndarray:
    """Return the kernel's parameter."""
    parameter = np.zeros(1, PARAMS)
    p = parameter[0]
    p["out"], p["lse"] = out.data.ptr, lse.data.ptr
    for name, array in (("of_out", out), ("of_parts", outs[0]), ("of_part_lses", lses[0])):
        p[name] = tuple(step // array.itemsize for step in array.strides[:3])
    batch, heads, seq, head_dim = out.shape
    p["rows"], p["heads"], p["seq"], p["head_dim"] = batch * heads * seq, heads, seq, head_dim
    p["parts"] = len(outs)
    p["part"]["out"][: len(outs)] = [array.data.ptr for array in outs]
    p["part"]["lse"][: len(outs)] = [array.data.ptr for array in lses]
    return parameter
