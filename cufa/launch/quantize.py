"""Arrays -> launches of ``kernels/quantize.cu``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cufa import device as devices
from cufa.arrays import Array, Ints
from cufa.launch.auxiliary import address, are_aligned, prepared, tensor
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
_PREPARED = 128  # kinds of arrays that are remembered

_OFFSETS = {name: offset // 8 for name, offset, _ in numbers_of(spec.SPEC.params)}
_PLACES = tuple(
    (_OFFSETS[name], i)
    for i, name in enumerate(("x.data", "values", "scales", "largest", "cu_seqlens", "used"))
)


class Prepared(NamedTuple):
    """What arrays of one kind have in common.

    Attributes
    ----------
    values, scales : tuple of int
        Shapes.
    passes : tuple of Launch
        The launches, one after the other. They are given the addresses of the array, its values,
        its scales, memory for the largest numbers, offsets and lengths.
    overlapping : tuple of Launch
        The same, to follow launches of another array: a single one does not wait for them before
        it begins.
    """

    values: Ints
    scales: Ints
    passes: tuple[Launch, ...]
    overlapping: tuple[Launch, ...]


class Launches(NamedTuple):
    """The launches that quantize an array, and the arrays whose addresses they are given.

    These must live until the launches are in the stream.
    """

    prepared: Prepared
    x: Array
    values: Array
    scales: Array
    largest: Array | None = None
    cu_seqlens: Array | None = None
    used: Array | None = None


_prepared: dict[Key, Prepared] = {}


def run(launches: Sequence[Launches]) -> None:
    """Quantize arrays on the current device and stream.

    All memory of all arrays must exist before. Then no array depends on the launch of another one.
    A launch of one pass begins while the one in front still runs, and ends after it, where launches
    may overlap at all (`cufa.compiler.dependent`). So memory is busy from one array to the next.
    """
    for i, (its, *arrays) in enumerate(launches):
        addresses = [*map(address, arrays)]
        for launch in its.overlapping if i else its.passes:
            launch(*addresses)


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

    device_id = cupy.cuda.runtime.getDevice()
    device = devices.of_id(device_id)
    if device.compute_capability < spec.FIRST_CAPABILITY:
        raise ValueError(
            f"{name} is on a GPU of compute capability {device.compute_capability / 10}: 8.9 or "
            f"later is needed for 8 bits; cufa.quantize(cupy.asnumpy({name})) runs on the CPU"
        )
    x = _readable(name, x)
    how = granularity, block, hadamard, seed, transposed
    sequences = None if cu_seqlens is None else cu_seqlens.size - 1
    key = device_id, x.dtype, x.shape, x.strides, *how, sequences
    its = _prepared.get(key)
    if its is None:
        its = remember(_prepared, key, _made(device, x, *how, sequences), _PREPARED)
    made = of_kind(its, x)
    if not its.passes:
        made.scales.fill(1), made.values.fill(0)
        return made.values, made.scales, []
    largest = None
    if block is None or block > spec.ROWS:
        shown = f"granularity={granularity!r}" if block is None else f"block={block}"
        way_out = f"{_WAY_OUT} in blocks of {spec.ROWS} rows or fewer"
        refuse_memory(f"{shown} needs memory of its own", way_out)
        largest = cupy.zeros(its.scales, np.uint32)
    made = made._replace(largest=largest, cu_seqlens=cu_seqlens, used=used)
    return made.values, made.scales, [made]


def of_kind(prepared: Prepared, x: Array) -> Launches:
    """Return the launches for an array whose kind is known, with memory for what they write."""
    import cupy

    values = cupy.empty(prepared.values, np.uint8)
    return Launches(prepared, x, values, cupy.empty(prepared.scales, np.float32))


def _made(
    device: devices.Device,
    x: Array,
    granularity: str,
    block: int | None,
    hadamard: bool,
    seed: int,
    transposed: bool,
    sequences: int | None,
) -> Prepared:
    """Return what arrays like this one have in common; no launches if there is nothing to do."""
    batch, heads, rows, head_dim = x.shape
    columns, blocks, seq = columns_of(head_dim), -(-rows // spec.ROWS), rows
    if sequences is not None:
        blocks = blocks_of(rows, sequences)
        seq = blocks * spec.ROWS
    stored = (blocks, columns, spec.ROWS) if transposed else (seq, columns)
    of_values, of_scales = (
        (batch, heads, *stored),
        shape_of_scales(granularity, block, (batch, heads, seq)),
    )
    if x.size == 0 or sequences == 0:
        return Prepared(of_values, of_scales, (), ())
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
    p["scales_a_head"] = 0 if granularity == "tensor" else of_scales[2]
    its = spec.shape(columns)
    grid = min(tiles, device.sm_count * its.blocks_per_sm)
    parts = (
        [spec.WHOLE] if block is not None and block <= spec.ROWS else [spec.LARGEST, spec.CONVERT]
    )
    kernels = [spec.instance(x.dtype.name, columns, hadamard, transposed, part) for part in parts]

    def launches() -> tuple[Launch, ...]:
        return tuple(prepared(each, grid, parameter, _PLACES, its.threads) for each in kernels)

    passes = launches()
    p["overlaps"] = len(passes) == 1
    return Prepared(of_values, of_scales, passes, launches())


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
