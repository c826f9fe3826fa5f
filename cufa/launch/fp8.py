"""8-bit arrays -> launch of ``kernels/fp8_wgmma.cu``."""

from __future__ import annotations

from typing import NamedTuple

from cufa import device as devices
from cufa.arrays import Array, Ints
from cufa.compiler import jit
from cufa.features.parts import is_uneven
from cufa.launch import counters
from cufa.launch.launch import PreparedLaunch, launcher
from cufa.launch.params import ScoreLayout, free_buffers, packed, scale_log2, taken_buffer
from cufa.launch.signature import Key, remember
from cufa.planner.fp8 import Fp8Plan
from cufa.problem.extras import NO_EXTRAS, Extras, placed
from cufa.problem.problem import Problem
from cufa.specs.fp8_wgmma import KEYS, SPEC, parameter
from cufa.specs.kv import LENGTHS
from cufa.specs.structs import numbers_of
from cufa.specs.template_arguments import TemplateArguments
from cufa.specs.tile import panel_columns

_PREPARED = 128  # calls that are remembered
_TENSORS = ("maps.q", "maps.k", "maps.v", "params.o.data", "params.lse")
_SCALES = ("kv.scales_q.data", "kv.scales_k.data", "kv.scales_v.data")
_ADDRESSES = *_TENSORS, *_SCALES

# To TMA, two bytes are a number of 16 bits; and as many rows of Q come at once.
_TWO_BYTES, _PAIR, _ROWS = "float16", 2, 64
_ONE_BLOCK = 31  # log2 of the rows of a block that is all of a head


class Operand(NamedTuple):
    """Q, K or V in 8 bits.

    Attributes
    ----------
    values : array of uint8
        Q and K are (batch, heads, seq, columns), with contiguous rows and with other strides that
        are multiples of 16. V is (batch, heads, blocks, columns, KEYS), C-contiguous: each block is
        transposed, with keys in the order of ``VTile8`` in ``kernels/fp8_config.cuh``, and with
        zeros behind the last one. Where sequences follow each other, they are as
        `cufa.quantized.sequences` has them.
    scales : array of float32
        C-contiguous and positive: (batch, heads, blocks), (batch, heads, 1) or (1, 1, 1).
    block : int or None
        Rows of a block, a power of two, of K and V at least KEYS; None where heads are not cut into
        blocks.
    """

    values: Array
    scales: Array
    block: int | None

    @property
    def numbers(self) -> tuple[int, int]:
        """Steps from head to head, and log2 of a block."""
        log2 = _ONE_BLOCK if self.block is None else self.block.bit_length() - 1
        return self.scales.shape[2] if self.scales.size > 1 else 0, log2


class Operands(NamedTuple):
    """Q, K and V of a call."""

    q: Operand
    k: Operand
    v: Operand


_prepared: dict[Key, PreparedLaunch] = {}


def attention(
    plan: Fp8Plan,
    problem: Problem,
    operands: Operands,
    out: Array,
    lse: Array | None,
    extras: Extras = NO_EXTRAS,
    ndim: int = 4,
) -> None:
    """Compute attention of 8-bit arrays on the current device and stream.

    Parameters
    ----------
    plan : Fp8Plan
        The problem's.
    problem : Problem
        With at least one query and key, and a scale that is not negative.
    operands : Operands
        With compiled head dims: columns behind those of the problem are 0.
    out : array, (batch, heads_q, seq_q, head_dim_v)
        With contiguous rows of a multiple of 16 bytes, and with such strides.
    lse : array of float32, (batch, heads_q, seq_q), optional
        C-contiguous.
    extras : Extras
    ndim : int
        Axes of the caller's q.
    """
    import cupy

    device_id = cupy.cuda.runtime.getDevice()
    arrays = [each.values for each in operands] + [out]
    infos = tuple(a if a is None else (a.shape, a.strides, a.dtype) for a in extras.flat)
    key = (
        *(plan, problem, device_id, ndim, infos),
        *((array.shape, array.strides) for array in arrays),
        *(each.numbers for each in operands),
    )
    launch = _prepared.get(key)
    if launch is None:
        launch = _made(plan, problem, operands, out, extras.described(infos), ndim, device_id)
        remember(_prepared, key, launch, _PREPARED)
    launch(
        *(array.data.ptr for array in arrays),
        0 if lse is None else lse.data.ptr,
        *(each.scales.data.ptr for each in operands),
        *(0 if array is None else array.data.ptr for array in extras.flat),
        *(() if extras.seed is None else (extras.seed,)),
    )


def _made(
    plan: Fp8Plan,
    problem: Problem,
    operands: Operands,
    out: Array,
    extras: Extras,
    ndim: int,
    device_id: int,
) -> PreparedLaunch:
    """Return the launch of calls like this one."""
    device, tile, kv = devices.of_id(device_id), plan.tile, problem.kv
    columns, columns_v = operands.q.values.shape[3], operands.v.values.shape[3]
    dtype = parameter(problem.score, kv)
    offsets = {name: offset for name, offset, _ in numbers_of(dtype)}
    variant = TemplateArguments(
        *(SPEC.name, problem.dtype, columns, columns_v, tile.bm, tile.bn, tile.stages),
        *(tile.threads // 32, 1),
        score=problem.score,
        kv=kv,
    )
    score = ScoreLayout(variant, dtype)
    reads = problem.reads
    known = _numbers(plan, problem, operands, out)
    values = [
        *(known.get(name[len("params.") :], 0) for name in offsets if name.startswith("params.")),
        *score.values(problem, placed(reads, ndim, problem.sizes, extras) if reads else ()),
    ]
    for each in operands:
        values += 0, *each.numbers
    numbers = ((offset, kind) for _, offset, kind in numbers_of(dtype))
    start = offsets["params.q.data"]
    content = _maps(operands, tile.bn) + packed(numbers, start, dtype.itemsize).pack(*values)
    places = [(offsets[name] // 8, i) for i, name in enumerate(_ADDRESSES)]
    places += (
        (word, which if which < 0 else len(_ADDRESSES) + extras.place(which))
        for word, which in score.places
    )
    tiles = problem.batch * problem.heads_q * plan.q_tiles
    memory = None
    if (is_uneven(problem.score) or kv in LENGTHS) and tiles > 2 * plan.grid:
        drawn = counters.of_device(device_id)  # blocks draw the tiles that wait for them
        drawn.reserve()
        memory = offsets["params.tiles_drawn"] // 8, drawn.take
    function = jit.kernel(plan.variant, device, device_id)
    launch = launcher(function, (plan.grid, 1, 1), plan.block, plan.smem_bytes)
    return PreparedLaunch(launch, content, tuple(places), memory)


def _numbers(plan: Fp8Plan, problem: Problem, operands: Operands, out: Array) -> dict[str, float]:
    """Return the numbers of ``Params`` that are not 0, by name."""
    known: dict[str, float] = {
        "scale_log2": scale_log2(problem.scale),
        "heads_q": problem.heads_q,
        "group": problem.group,
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "q_tiles": plan.q_tiles,
        "heads": problem.batch * problem.heads_q,
        "section_heads": plan.section_heads,
        "late_rows": plan.late_rows,
    }
    for name, array in zip("qkvo", (*(each.values for each in operands), out), strict=True):
        for axis, step in zip(("batch", "head", "seq"), array.strides[:3], strict=True):
            known[f"{name}.stride_{axis}"] = step // array.itemsize
        if problem.kv == "Varlen":  # the tiles' sequences are not along this axis
            known[f"{name}.stride_batch"] = 0
    return known


def _maps(operands: Operands, bn: int) -> bytes:
    """Return the tensor maps of Q, K and V, and none of O, as ``kernels/tile_sm90.cuh`` has them.

    A box holds a panel of a tile: of V, the keys of it that a block has.
    """
    maps = b""
    for array, rows in ((operands.q.values, _ROWS), (operands.k.values, bn)):
        *axes, columns = array.shape
        box = rows, panel_columns(columns // _PAIR)
        maps += _map(array, (*axes, columns // _PAIR), array.strides, box)
    v = operands.v.values
    batch, heads, blocks, columns, _ = v.shape
    shape = batch, heads, blocks * columns, KEYS // _PAIR
    maps += _map(v, shape, (*v.strides[:2], KEYS, _PAIR), (columns, min(KEYS, bn) // _PAIR))
    return maps + bytes(len(maps) // 3)


def _map(array: Array, shape: Ints, strides: Ints, box: tuple[int, int]) -> bytes:
    buffer = taken_buffer()
    found = buffer.maps.encoded(_TWO_BYTES, array.data.ptr, shape, strides, 1, *box)
    free_buffers.append(buffer)
    return found
