"""Arrays -> launches of ``kernels/quantize.cu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cufa import device as devices
from cufa.arrays import Array
from cufa.launch.auxiliary import address, are_aligned, prepared, tensor
from cufa.launch.capture import refuse_memory
from cufa.launch.decode import divisor
from cufa.quantized.scales import shape_of_scales
from cufa.quantized.sequences import blocks_of
from cufa.quantized.transform import columns_of, sign_bits
from cufa.specs import quantize as spec
from cufa.specs.instance import Instance

_WAY_OUT = "quantize it before the capture, or"
_CHUNK = 8  # columns; rows have a multiple of it
_ALL = 31  # log2 of the rows of a block that is all of a head


class Launches(NamedTuple):
    """The launches that quantize an array, one after the other.

    Attributes
    ----------
    passes : list of Instance
    grid, threads : int
        Blocks, and threads of a block.
    parameter : numpy.ndarray, (1,)
    memory : tuple of cupy.ndarray or None
        Arrays that the launches read: they must live until these are in the stream.
    """

    passes: list[Instance]
    grid: int
    threads: int
    parameter: np.ndarray
    memory: tuple[Array | None, ...]


def run(launches: Sequence[Launches]) -> None:
    """Quantize arrays on the current device and stream.

    All memory of all arrays must exist before. Then no array depends on the launch of another one.
    A launch of one pass begins while the one in front still runs, and ends after it, where launches
    may overlap at all (`cufa.compiler.dependent`). So memory is busy from one array to the next.
    """
    for i, each in enumerate(launches):
        each.parameter["overlaps"] = i > 0 and len(each.passes) == 1
        for kernel in each.passes:
            prepared(kernel, each.grid, each.parameter, threads=each.threads)()


def quantize(
    name: str,
    x: Array,
    granularity: str,
    block: int | None,
    hadamard: bool,
    seed: int,
    transposed: bool,
    cu_seqlens: Array | None = None,
    used: Array | None = None,
) -> tuple[Array, Array, list[Launches]]:
    """Return bytes and scales, as `cufa.Quantized` holds them, and the launches that write them.

    Parameters
    ----------
    name : str
        The array's name, for errors.
    x : cupy.ndarray, (batch, heads, seq, head_dim)
        Any strides.
    granularity, block, hadamard, seed, transposed
        As in `cufa.quantize`, checked.
    cu_seqlens : cupy.ndarray of int32, (sequences + 1,), optional
        Contiguous: where sequences begin that get blocks of their own.
    used : cupy.ndarray of int32, (batch,) or (sequences,), optional
        Contiguous: how many of their rows count; the others are zeros.

    Raises
    ------
    ValueError
        The device cannot convert to 8 bits; or it needs memory of its own in a capture.
    """
    import cupy

    device = devices.of_id(cupy.cuda.runtime.getDevice())
    if device.compute_capability < spec.FIRST_CAPABILITY:
        raise ValueError(
            f"{name} is on a GPU of compute capability {device.compute_capability / 10}: 8.9 or "
            f"later is needed for 8 bits; cufa.quantize(cupy.asnumpy({name})) runs on the CPU"
        )
    batch, heads, rows, head_dim = x.shape
    columns, blocks, seq, sequences = columns_of(head_dim), -(-rows // spec.ROWS), rows, batch
    if cu_seqlens is not None:
        sequences = cu_seqlens.size - 1
        blocks = blocks_of(rows, sequences)
        seq = blocks * spec.ROWS
    stored = (blocks, columns, spec.ROWS) if transposed else (seq, columns)
    values = cupy.empty((batch, heads, *stored), np.uint8)
    scales = cupy.empty(shape_of_scales(granularity, block, (batch, heads, seq)), np.float32)
    if x.size == 0 or sequences == 0:
        scales.fill(1), values.fill(0)
        return values, scales, []
    x = _readable(name, x)
    largest, passes = None, [spec.WHOLE]
    if block is None or block > spec.ROWS:
        how = f"granularity={granularity!r}" if block is None else f"block={block}"
        what = f"{how} needs memory of its own"
        refuse_memory(what, f"{_WAY_OUT} in blocks of {spec.ROWS} rows or fewer")
        largest, passes = cupy.zeros(scales.shape, np.uint32), [spec.LARGEST, spec.CONVERT]
    parameter = np.zeros(1, spec.SPEC.params)
    p = parameter[0]
    p["x"], p["values"], p["scales"] = tensor(x), address(values), address(scales)
    p["largest"], p["cu_seqlens"], p["used"] = map(address, (largest, cu_seqlens, used))
    words = sign_bits(seed, columns)
    p["signs"][: len(words)] = words
    p["heads"], p["blocks"] = divisor(heads), divisor(blocks)
    p["tiles"] = tiles = batch * heads * blocks
    p["rows"], p["seq"], p["head_dim"], p["sequences"] = rows, seq, x.shape[3], sequences
    p["block_log2"] = _ALL if block is None else block.bit_length() - 1
    p["scales_a_head"] = 0 if granularity == "tensor" else scales.shape[2]
    its = spec.shape(columns)
    grid = min(tiles, device.sm_count * its.blocks_per_sm)
    kernels = [spec.instance(x.dtype.name, columns, hadamard, transposed, each) for each in passes]
    memory = x, largest, cu_seqlens, used
    return values, scales, [Launches(kernels, grid, its.threads, parameter, memory)]


def _readable(name: str, x: Array) -> Array:
    """Return an array whose rows are aligned, contiguous and whole chunks: as it is or a copy.

    A chunk is `_CHUNK` columns. The end of the last one of a copy is 0.
    """
    if x.shape[3] % _CHUNK == 0 and x.strides[3] == x.itemsize and are_aligned(x):
        return x
    what = (
        f"{name} would be copied: its rows are not aligned and contiguous, or their length is no "
        f"multiple of {_CHUNK}"
    )
    refuse_memory(what, f"{_WAY_OUT} give rows that are")
    import cupy

    head_dim = -(-x.shape[3] // _CHUNK) * _CHUNK
    copy = cupy.zeros((*x.shape[:3], head_dim), x.dtype)
    copy[..., : x.shape[3]] = x
    return copy
