"""Arrays -> launches of ``kernels/quantize.cu``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cufa import device as devices
from cufa.arrays import Array, Ints
from cufa.launch.auxiliary import address, are_aligned, tensor
from cufa.launch.auxiliary import prepared as launch_of
from cufa.launch.capture import refuse_memory
from cufa.launch.decode import divisor
from cufa.launch.launch import Launch
from cufa.launch.signature import Key
from cufa.quantized.scales import shape_of_scales
from cufa.quantized.sequences import blocks_of
from cufa.quantized.transform import columns_of, sign_bits
from cufa.remembered import remember
from cufa.specs import quantize as spec
from cufa.specs.structs import numbers_of

_WAY_OUT = "quantize it before the capture, or"
_CHUNK = 8  # columns; rows have a multiple of it
_ALL = 31  # log2 of the rows of a block that is all of a head
_REMEMBERED = 128  # quantizers

_ADDRESSES = "x.data", "values", "scales", "largest", "cu_seqlens", "used"
_WORDS = {name: offset // 8 for name, offset, _ in numbers_of(spec.SPEC.params)}
_PLACES = tuple((_WORDS[name], i) for i, name in enumerate(_ADDRESSES))


class Quantizer(NamedTuple):
    """The launches that quantize arrays of one shape, dtype and set of options.

    Each launch is given the addresses of `Launches.arrays`.

    Attributes
    ----------
    values_shape, scales_shape : tuple of int
    passes : tuple of Launch
        One after the other; none if there is nothing to read.
    overlapping : tuple of Launch
        The same behind launches for another array: a launch of one pass begins before they end.
    """

    values_shape: Ints
    scales_shape: Ints
    passes: tuple[Launch, ...]
    overlapping: tuple[Launch, ...]


class Launches(NamedTuple):
    """A quantizer, and the arrays of its launches, which must live until these are queued."""

    quantizer: Quantizer
    x: Array
    values: Array
    scales: Array
    largest: Array | None = None
    cu_seqlens: Array | None = None
    used: Array | None = None

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """Those whose addresses a launch is given, as `_ADDRESSES` names them."""
        return self[1:]


_quantizers: dict[Key, Quantizer] = {}


def run(launches: Iterable[Launches]) -> None:
    """Quantize arrays on the current device and stream.

    All memory of all arrays must exist before. Then no array depends on the launch of another one.
    A launch of one pass begins while the one in front still runs, and ends after it, where launches
    may overlap at all (`cufa.compiler.dependent`). So memory is busy from one array to the next.
    """
    is_first = True
    for each in launches:
        addresses = [*map(address, each.arrays)]
        quantizer = each.quantizer
        for launch in quantizer.passes if is_first else quantizer.overlapping:
            launch(*addresses)
            is_first = False


def prepare(
    name: str,
    x: Array,
    granularity: str,
    block: int | None,
    hadamard: bool,
    seed: int,
    transposed: bool,
    cu_seqlens: Array | None = None,
    used: Array | None = None,
) -> Launches:
    """Return the launches that quantize an array, with the bytes and scales that they will write.

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

    device_id = cupy.cuda.runtime.getDevice()
    device = devices.of_id(device_id)
    if device.compute_capability < spec.FIRST_CAPABILITY:
        raise ValueError(
            f"{name} is on a GPU of compute capability {device.compute_capability / 10}: 8.9 or "
            f"later is needed for 8 bits; cufa.quantize(cupy.asnumpy({name})) runs on the CPU"
        )
    sequences = None if cu_seqlens is None else cu_seqlens.size - 1
    if x.size and sequences != 0:
        x = _readable(name, x)
    how = granularity, block, hadamard, seed, transposed
    key = device_id, x.dtype, x.shape, x.strides, *how, sequences
    quantizer = _quantizers.get(key) or remember(
        _quantizers, key, _made(device, x, *how, sequences), _REMEMBERED
    )
    largest = None
    if len(quantizer.passes) > 1:
        shown = f"granularity={granularity!r}" if block is None else f"block={block}"
        way_out = f"{_WAY_OUT} in blocks of {spec.ROWS} rows or fewer"
        refuse_memory(f"{shown} needs memory of its own", way_out)
        largest = cupy.zeros(quantizer.scales_shape, np.uint32)
    launches = launches_for(quantizer, x, cu_seqlens, used, largest)
    if not quantizer.passes:
        launches.scales.fill(1)
        launches.values.fill(0)
    return launches


def launches_for(
    quantizer: Quantizer,
    x: Array,
    cu_seqlens: Array | None = None,
    used: Array | None = None,
    largest: Array | None = None,
) -> Launches:
    """Return the launches for an array, with memory for its values and scales.

    `largest` is the memory that two passes need.
    """
    import cupy

    values = cupy.empty(quantizer.values_shape, np.uint8)
    scales = cupy.empty(quantizer.scales_shape, np.float32)
    return Launches(quantizer, x, values, scales, largest, cu_seqlens, used)


def _made(
    device: devices.Device,
    x: Array,
    granularity: str,
    block: int | None,
    hadamard: bool,
    seed: int,
    transposed: bool,
    sequences: int | None,
) -> Quantizer:
    """Return the quantizer of arrays like this one."""
    batch, heads, rows, head_dim = x.shape
    columns, blocks, seq = columns_of(head_dim), -(-rows // spec.ROWS), rows
    if sequences is not None:
        blocks = blocks_of(rows, sequences)
        seq = blocks * spec.ROWS
    stored = (blocks, columns, spec.ROWS) if transposed else (seq, columns)
    values_shape = batch, heads, *stored
    scales_shape = shape_of_scales(granularity, block, (batch, heads, seq))
    if x.size == 0 or sequences == 0:
        return Quantizer(values_shape, scales_shape, (), ())
    parameter = np.zeros(1, spec.SPEC.params)
    p = parameter[0]
    p["x"] = tensor(x)
    words = sign_bits(seed, columns)
    p["signs"][: len(words)] = words
    p["heads"], p["blocks"] = divisor(heads), divisor(blocks)
    p["tiles"] = tiles = batch * heads * blocks
    p["rows"], p["seq"], p["head_dim"] = rows, seq, head_dim
    p["sequences"] = batch if sequences is None else sequences
    p["block_log2"] = _ALL if block is None else block.bit_length() - 1
    p["scales_a_head"] = 0 if granularity == "tensor" else scales_shape[2]
    grid = min(tiles, device.sm_count * spec.blocks_per_sm(x.dtype.name, columns))
    is_whole = block is not None and block <= spec.ROWS
    parts = (spec.WHOLE,) if is_whole else (spec.LARGEST, spec.CONVERT)
    kernels = [spec.instance(x.dtype.name, columns, hadamard, transposed, part) for part in parts]

    def passes(overlaps: bool) -> tuple[Launch, ...]:
        p["overlaps"] = overlaps
        return tuple(launch_of(each, grid, parameter, _PLACES) for each in kernels)

    return Quantizer(values_shape, scales_shape, passes(False), passes(is_whole))


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
