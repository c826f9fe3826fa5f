"""8-bit arrays -> launch of ``kernels/fp8_wgmma.cu``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cufa.arrays import Array, Ints
from cufa.features.parts import is_uneven
from cufa.launch import counters
from cufa.launch.auxiliary import address
from cufa.launch.auxiliary import prepared as launch_of
from cufa.launch.capture import is_capturing
from cufa.launch.launch import Launch
from cufa.launch.params import Layout, encoded_map, numbers_of_params, steps_of
from cufa.launch.signature import Key
from cufa.planner.fp8 import Fp8Plan
from cufa.problem.extras import NO_EXTRAS, Extras, placed
from cufa.problem.problem import Problem
from cufa.remembered import remember
from cufa.specs.fp8_wgmma import KEYS, parameter
from cufa.specs.kv import LENGTHS
from cufa.specs.tile import panel_columns

_PREPARED = 128  # calls that are remembered
_ADDRESSES = (
    *("maps.q", "maps.k", "maps.v", "params.o.data", "params.lse"),
    *("kv.scales_q.data", "kv.scales_k.data", "kv.scales_v.data"),
)

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


_prepared: dict[Key, Launch] = {}


def prepared(
    plan: Fp8Plan,
    problem: Problem,
    operands: Operands,
    out: Array,
    extras: Extras = NO_EXTRAS,
    ndim: int = 4,
) -> Launch:
    """Return the launch of attention of 8-bit arrays on the current device.

    It is given `addresses`, and then those of extras.

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
    extras : Extras
    ndim : int
        Axes of the caller's q.
    """
    import cupy

    device_id = cupy.cuda.runtime.getDevice()
    key = (
        *(plan, problem, device_id, ndim, extras.infos),
        *((each.values.shape, each.values.strides, each.numbers) for each in operands),
        *(out.shape, out.strides),
    )
    return _prepared.get(key) or remember(
        _prepared, key, _made(plan, problem, operands, out, extras, ndim, device_id), _PREPARED
    )


def addresses(
    values: Iterable[Array], scales: Iterable[Array], out: Array, lse: Array | None
) -> Ints:
    """Return the addresses that a launch is given first.

    Parameters
    ----------
    values, scales : iterable of array
        Those of q, k and v, see `Operand`.
    out : array
        As in `prepared`.
    lse : array of float32, (batch, heads_q, seq_q), optional
        C-contiguous.
    """
    return tuple(map(address, (*values, out, lse, *scales)))


def _made(
    plan: Fp8Plan,
    problem: Problem,
    operands: Operands,
    out: Array,
    extras: Extras,
    ndim: int,
    device_id: int,
) -> Launch:
    """Return the launch of calls like this one."""
    score, kv, extras = problem.score, problem.kv, extras.described(extras.infos)
    layout = Layout(parameter(score, kv), score, kv)
    arrays = {"o": out, **{name: each.values for name, each in operands._asdict().items()}}
    sections = plan.q_tiles, plan.section_heads, plan.late_rows
    known = numbers_of_params(problem, *sections) | steps_of(problem, arrays)
    known |= layout.of_score(problem, placed(problem.reads, ndim, problem.sizes, extras))
    for name, each in operands._asdict().items():
        known[f"scales_{name}.stride"], known[f"scales_{name}.block_log2"] = each.numbers
    content = _maps(operands) + layout.filled(known)
    tiles = problem.batch * problem.heads_q * plan.q_tiles
    memory = None
    if (is_uneven(score) or kv in LENGTHS) and tiles > 2 * plan.grid:
        drawn = counters.of_device(device_id)  # blocks draw the tiles that wait for them
        if not is_capturing():
            drawn.reserve()
        memory = layout.words["params.tiles_drawn"], drawn.take
    first = ((name, i) for i, name in enumerate(_ADDRESSES))
    places = layout.places(first, len(_ADDRESSES), extras)
    return launch_of(plan.variant, plan.grid, content, places, plan.block, memory)


def _maps(operands: Operands) -> bytes:
    """Return the tensor maps of Q, K and V, and none of O, as ``kernels/tile_sm90.cuh`` has them.

    A box holds a panel of a tile.
    """
    maps = b""
    for array, rows in ((operands.q.values, _ROWS), (operands.k.values, KEYS)):
        *axes, columns = array.shape
        box = rows, panel_columns(columns // _PAIR)
        maps += _map(array, (*axes, columns // _PAIR), array.strides, box)
    v = operands.v.values
    batch, heads, blocks, columns, _ = v.shape
    shape = batch, heads, blocks * columns, KEYS // _PAIR
    maps += _map(v, shape, (*v.strides[:2], KEYS, _PAIR), (columns, KEYS // _PAIR))
    return maps + bytes(len(maps) // 3)


def _map(array: Array, shape: Ints, strides: Ints, box: tuple[int, int]) -> bytes:
    return encoded_map(_TWO_BYTES, array.data.ptr, shape, strides, (1, *box))
