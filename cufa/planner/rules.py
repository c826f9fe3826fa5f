"""Which variant of a kernel a problem takes where no table knows better. Numbers only, no CuPy."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.parts import edges, kind_of, part_named
from cufa.features.user_functions import BLOCKS, OWN
from cufa.planner import scheduler
from cufa.planner.scheduler import KEY_STEP
from cufa.problem.problem import Problem
from cufa.remembered import remember
from cufa.specs import ATTENTION_KERNELS
from cufa.specs.costs import Cost, copies, least_pairs, with_memory, work
from cufa.specs.kernel_spec import TileShape
from cufa.specs.spec import Spec
from cufa.specs.variant import Variant

PACKED_ROWS = 192
"""Beyond this number no tile holds the rows of several heads."""

_ROW_STEP = 64  # that of the rows; with a causal mask what they see counts, in steps of keys
_ONE_LENGTH = ("Dense", "Padded")  # of `Problem.kv`, in which tiles are those of one length
_KNOWN = 4096  # choices that are remembered
_ROOM = 40  # registers: with less, functions of a few lines spill hundreds of bytes
_BUSY = ("softcap", "alibi_slopes", "bias", "mask", "dropout_p")
"""Arguments whose parts hold registers for each score; a bias and one more want room, or three."""

_BLOCK = 128
"""Queries and keys of a map's tiles, unless a caller wants others, as a power of two mostly."""

_DEARER = {"softcap": 1.07, "alibi_slopes": 1.05, "score_mod": 1.05}
"""The factor by which a tile of keys takes longer in some variants with such scores, a causal mask
and wide values: those with three consumers, or with two and more than 128 keys. They have fewer
registers, or less time next to the products, for the scores."""


class _Priced(NamedTuple):
    """A variant whose costs were measured, and a lower bound of its time for any problem.

    Attributes
    ----------
    variant : Variant
    tile : tuple of int
        As in `cufa.specs.costs.work`.
    cost : Cost
    per_row, per_pair, per_copy : float
        The least microseconds for each row, for each row and key, and for the copies that these
        need; a launch, its first tile of rows, and the keys of that one, cost what they cost.
    """

    variant: Variant
    tile: tuple[int, int, int]
    cost: Cost
    per_row: float
    per_pair: float
    per_copy: float


_Sizes = tuple[int, int, int, int, int, int | None]
"""Heads, K/V heads, heads whose rows a tile can hold, rows, keys, and the most that a row sees."""


class Choice:
    """The choice between the variants of a kernel, for problems that differ in sizes only.

    Where costs were measured, it is the one that takes the least time by them. Else it is the tile
    of fewer rows for short queries, and where multiprocessors would be idle.

    Parameters
    ----------
    kernel, dtype : str
    head_dims : tuple of int
        Head dims of a problem; those of the variants hold them.
    score : tuple of str
    device : Device
    kv : str
        As in a problem.

    Attributes
    ----------
    variants : list of Variant
        All that can be chosen.
    rounds : bool
        Whether lengths that `rounded` does not tell apart also have the same tiles, if there are
        more rows than `PACKED_ROWS`, or heads do not share tiles.
    """

    def __init__(
        self,
        kernel: str,
        dtype: str,
        head_dims: tuple[int, int],
        score: tuple[str, ...],
        device: Device,
        kv: str = "Dense",
    ) -> None:
        self._kernel, self._sm_count = ATTENTION_KERNELS[kernel], device.sm_count
        compiled = self._kernel.padded(device, *head_dims)
        self._element_mb = sum(head_dims) * DTYPES[dtype].bytes / 1e6  # of a row of Q and of O
        self._copies = copies(head_dims, compiled)
        self._uneven = edges(score) > 0
        # Where queries are more than keys, those in front see none; with other masks, they see all
        self._is_top_left = "TopLeft" in score
        self._hides_rows = "Causal" in score and "TopLeft" not in score
        costs = self._kernel.costs.get((*compiled, self._uneven), {})
        legal: dict[Variant, TileShape] = {}
        for tile in costs or self._kernel.tiles(device, compiled):
            shape = tile._replace(ping_pong=_turns(tile, score, compiled[1]))
            variant = Variant(*(kernel, dtype, *compiled, *shape), score=score, kv=kv)
            if variant.illegal(device) is None:
                legal[variant] = tile
        self.variants = _with_room(self._kernel, score, _within_blocks(score, list(legal)))
        self._priced: list[_Priced] = []
        for variant in self.variants if costs else ():
            cost = _with_scores(costs[legal[variant]], variant)
            sizes = bm, bn, blocks = variant.bm, variant.bn, variant.blocks_per_sm
            sm_rows = bm * device.sm_count
            # No block of a multiprocessor visits more keys than one before it
            shared = min(sum(cost.keys[: i + 1]) / (i + 1) for i in range(blocks))
            per_row, per_pair = cost.wave / (sm_rows * blocks), shared / (bn * sm_rows)
            per_copy = 1e-6 * self._copies.bytes * cost.fetched / sm_rows
            self._priced.append(_Priced(variant, sizes, cost, per_row, per_pair, per_copy))
        self._rows = {each.tile[0] for each in self._priced}
        whole_tiles = all(rows % _ROW_STEP == 0 for rows in self._rows)
        self.rounds = bool(self._priced) and whole_tiles and kv in _ONE_LENGTH
        self._known: dict[_Sizes, tuple[Variant, float]] = {}

    def of(self, problem: Problem) -> tuple[Variant, float]:
        """Return the variant that a problem takes, and the microseconds expected of it, or 0.0.

        For a problem with sequences of unequal lengths, give the one that is alike.
        """
        if not self._priced:
            long, *short = self.variants
            rows = problem.seq_q
            few = problem.batch * problem.heads_q * -(-rows // long.bm) < self._sm_count
            return next((each for each in short if few or rows <= each.bm), long), 0.0
        heads, heads_kv, packable, rows, keys, seen = self._sizes(problem)
        if packable == 1 or rows > PACKED_ROWS:
            rows, keys = self.rounded(rows, keys)
        elif not self._hides_rows or rows <= keys:
            keys = -(-keys // KEY_STEP) * KEY_STEP
        sizes = heads, heads_kv, packable, rows, keys, seen
        found = self._known.get(sizes)
        if found is None:
            found = remember(self._known, sizes, self._least(sizes), _KNOWN)
        return found

    def _sizes(self, problem: Problem) -> _Sizes:
        batch, heads_q, heads_kv = problem.batch, problem.heads_q, problem.heads_kv
        rows, keys = problem.seq_q, problem.seq_kv
        if self._is_top_left:  # no row sees more keys
            keys = min(keys, rows)
        packable = scheduler.packable(heads_q, heads_kv, self._kernel)
        return batch * heads_q, batch * heads_kv, packable, rows, keys, problem.most_seen

    def rounded(self, rows: int, keys: int) -> tuple[int, int]:
        """Return lengths rounded up to a step: then most new lengths have been seen before.

        Costs within a step are the same. Where rows see no keys, or few, exact lengths matter.
        """
        if self._hides_rows and rows > keys:
            return rows, keys
        step = KEY_STEP if self._uneven else _ROW_STEP
        return -(-rows // step) * step, -(-keys // KEY_STEP) * KEY_STEP

    def _least(self, sizes: _Sizes) -> tuple[Variant, float]:
        heads, heads_kv, packable, rows, keys, seen = sizes
        falls = self._falls(rows, keys, seen)
        visited = keys if seen is None else min(keys, seen)
        # By the rows of a tile: the rows of all tiles, and the pairs of rows and keys
        filled: dict[int, tuple[float, float]] = {}
        for bm in self._rows:
            is_packed = rows < bm and packable > 1
            each = rows if is_packed else -(-rows // bm) * bm
            if falls and rows > keys and not is_packed:
                filled[bm] = heads * each, heads * least_pairs(rows, keys, bm)
            else:
                filled[bm] = heads * each, heads * each * (visited - max(0, rows - bm) / 2 * falls)
        floors: list[tuple[float, int]] = []
        for i, (_, (bm, bn, _), cost, per_row, per_pair, per_copy) in enumerate(self._priced):
            all_rows, pairs = filled[bm]
            of_rows, of_pairs = all_rows * per_row, pairs * per_pair
            of_tiles = -(-visited // bn) * cost.keys[0]
            floor = (
                cost.launch
                + (of_rows if of_rows > cost.wave else cost.wave)
                + (of_pairs if of_pairs > of_tiles else of_tiles)
                + pairs * per_copy
            )
            floors.append((floor, i))
        megabytes = (heads * rows + heads_kv * keys) * self._element_mb
        megabytes -= 1e-6 * self._copies.read * heads * max(0, rows - keys) * falls
        best, least = self._priced[0].variant, math.inf
        # Most need not be looked at any closer
        for at_least, i in sorted(floors):
            if with_memory(at_least, megabytes) >= least:
                break
            priced = self._priced[i]
            time = self._time(priced, sizes)
            if time < least:
                best, least = priced.variant, time
        return best, least

    def _falls(self, rows: int, keys: int, seen: int | None) -> bool:
        """Return whether rows see ever more keys, up to all, from one to the next."""
        return self._uneven and seen is None and (rows <= keys or self._hides_rows)

    def _time(self, priced: _Priced, sizes: _Sizes) -> float:
        heads, heads_kv, packable, rows, keys, seen = sizes
        pack = packable if rows < priced.tile[0] else 1
        megabytes = (heads * rows + heads_kv * keys) * self._element_mb
        falls = self._falls(rows, keys, seen)
        if seen is not None:  # all rows of a tile, each one key later
            bm, bn, _ = priced.tile  # on average also keys at both ends that no row sees
            keys = min(keys, seen + min(rows, bm) - 1 + bn - math.gcd(bm, bn))
        return priced.cost.of(
            work(
                *(heads, rows, keys, pack, falls, megabytes),
                *(self._copies, priced.tile, self._sm_count),
            )
        )

    def times(self, problem: Problem) -> dict[Variant, float]:
        """Return the microseconds expected of each variant, if that is known."""
        sizes = self._sizes(problem)
        return {each.variant: self._time(each, sizes) for each in self._priced}


def _turns(tile: TileShape, score: tuple[str, ...], head_dim_v: int) -> bool:
    """Return whether a tile's consumers take turns where those of a plain problem may.

    With few keys, waiting costs a tile of rows more than it gains, in the tiles that were measured.
    """
    if tile.bm == 128 and head_dim_v >= 128 and any(part_named(name).left_edge for name in score):
        return False
    return tile.ping_pong


def _with_scores(cost: Cost, variant: Variant) -> Cost:
    """Return a variant's cost, with the additional time that its scores take."""
    consumers = variant.bm // 64
    is_dear = consumers > 2 or (consumers == 2 and variant.bn > 128)
    if not is_dear or variant.head_dim_v < 128 or not variant.causal:
        return cost
    arguments = (part_named(part).argument for part in variant.score)
    factor = max((_DEARER.get(argument, 1.0) for argument in arguments), default=1.0)
    return cost._replace(keys=tuple(factor * price for price in cost.keys))


def _within_blocks(score: tuple[str, ...], variants: list[Variant]) -> list[Variant]:
    """Return the variants whose tiles divide a map's own or are multiples of them, or else all.

    Other variants visit tiles that only their neighbours see, and ask for each pair there.
    """
    if BLOCKS not in score:
        return variants
    return [each for each in variants if _BLOCK % each.bm == _BLOCK % each.bn == 0] or variants


def _with_room(kernel: Spec, score: tuple[str, ...], variants: list[Variant]) -> list[Variant]:
    """Return the variants with enough registers for the parts of a score, or else all."""
    spare = kernel.spare_registers
    busy = [part_named(part).argument for part in score]
    busy = [argument for argument in busy if argument in _BUSY]
    crowded = len(busy) > 2 or (len(busy) == 2 and "bias" in busy)
    calls = any(kind_of(part) in OWN.values() and not part_named(part).tilts for part in score)
    if spare is None or not (crowded or calls):
        return variants
    return [each for each in variants if spare(each) >= _ROOM] or variants


choice = functools.lru_cache(maxsize=4096)(Choice)
"""Return the choice between the variants of a kernel, made once."""


def choice_of(problem: Problem, device: Device, kernel: str) -> Choice:
    """Return the choice between the variants of a kernel, for problems like one."""
    head_dims = problem.head_dim, problem.head_dim_v
    return choice(kernel, problem.dtype, head_dims, problem.score, device, problem.kv)


def times(problem: Problem, device: Device, kernel: str) -> dict[Variant, float]:
    """Return the microseconds expected of each of a kernel's variants, if that is known."""
    return choice_of(problem, device, kernel).times(problem.alike)


def all_variants(device: Device) -> list[Variant]:
    """Return every variant that can be chosen for `attention`, causal or without a mask."""
    return [
        variant
        for kernel in ATTENTION_KERNELS.values()
        if kernel.runs_on(device)
        for dtype in kernel.dtypes
        for head_dims in kernel.head_dims(device)
        for score in ((), ("Causal",))
        for variant in choice(kernel.name, dtype, head_dims, score, device).variants
    ]
