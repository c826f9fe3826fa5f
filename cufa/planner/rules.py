"""Which variant of a kernel a problem takes where no table knows better. Numbers only, no CuPy."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from cufa.device import Device
from cufa.kernel import ATTENTION_KERNELS, Kernel
from cufa.planner import scheduler
from cufa.planner.tiles import all_head_dims, padded, tiles
from cufa.problem import Problem
from cufa.variant import Variant


class _Candidate(NamedTuple):
    """A variant, and what the choice needs of it.

    Attributes
    ----------
    variant : Variant
    bm, bn : int
    cost : float, optional
        As of its tile.
    keys : range
        The numbers of keys for which it is one.
    step : int
        The greatest common divisor of `bm` and `bn`.
    """

    variant: Variant
    bm: int
    bn: int
    cost: float | None
    keys: range
    step: int


class Choice:
    """The choice between the variants of a kernel, for problems that differ in sizes only.

    Where costs were measured, it is the one that leaves the busiest multiprocessor the least to do.
    Else it is the tile of fewer rows for short queries, and where multiprocessors would be idle.

    Parameters
    ----------
    kernel : Kernel
    dtype : str
    head_dims : tuple of int
        Of a problem; those of the variants hold them.
    score : tuple of str
    device : Device
    """

    def __init__(
        self,
        kernel: Kernel,
        dtype: str,
        head_dims: tuple[int, int],
        score: tuple[str, ...],
        device: Device,
    ) -> None:
        self._kernel, self._sm_count = kernel, device.sm_count
        self._candidates: list[_Candidate] = []
        compiled = padded(kernel.name, device, *head_dims)
        for tile in tiles(kernel.name, compiled, device):
            variant = Variant(kernel.name, dtype, *compiled, **tile.shape._asdict(), score=score)
            keys = tile.causal if variant.causal else tile.full
            bm, bn = variant.bm, variant.bn
            if keys and variant.illegal(device) is None:
                step = math.gcd(bm, bn)
                self._candidates.append(_Candidate(variant, bm, bn, tile.cost, keys, step))

    @property
    def variants(self) -> list[Variant]:
        """All that can be chosen."""
        return [each.variant for each in self._candidates]

    def of(self, problem: Problem) -> Variant:
        """Return the variant that a problem takes."""
        _, batch, heads_q, heads_kv, rows, keys, _, _, causal, _ = problem
        heads, sm_count = batch * heads_q, self._sm_count
        if self._candidates[0].cost is None:
            long, *short = self._candidates
            few = heads * -(-rows // long.bm) < sm_count
            return next((each.variant for each in short if few or rows <= each.bm), long.variant)
        packable = scheduler.packable(heads_q, heads_kv, self._kernel)
        best, least = self._candidates[0].variant, math.inf
        for variant, bm, bn, cost, some_keys, step in self._candidates:
            if cost is None or keys not in some_keys:
                continue
            pack = packable if rows < bm else 1
            if causal and pack == 1:
                time = cost * busiest_causal(heads, rows, keys, bm, bn, step, sm_count)
            else:
                time = cost * busiest(heads // pack, rows * pack, keys, bm, bn, sm_count)
            if time < least:
                best, least = variant, time
        return best


@functools.lru_cache(maxsize=4096)
def choice(
    kernel: str, dtype: str, head_dims: tuple[int, int], score: tuple[str, ...], device: Device
) -> Choice:
    """Return the choice between the variants of a kernel."""
    return Choice(ATTENTION_KERNELS[kernel], dtype, head_dims, score, device)


def all_variants(device: Device) -> list[Variant]:
    """Return every variant that can be chosen for `attention` on a device."""
    return [
        variant
        for kernel in ATTENTION_KERNELS.values()
        if kernel.runs_on(device)
        for dtype in kernel.dtypes
        for head_dims in all_head_dims(kernel.name, device)
        for score in ((), ("Causal",))
        for variant in choice(kernel.name, dtype, head_dims, score, device).variants
    ]


def busiest(heads: int, rows: int, keys: int, bm: int, bn: int, sm_count: int) -> int:
    """Return how many rows times keys the busiest multiprocessor computes: a tile of each wave.

    Parameters
    ----------
    heads, rows, keys : int
        Rows and keys of each head.
    bm, bn : int
    sm_count : int
    """
    tiles = heads * -(-rows // bm)
    return -(-tiles // sm_count) * bm * (-(-keys // bn) * bn)


def busiest_causal(
    heads: int, rows: int, keys: int, bm: int, bn: int, step: int, sm_count: int
) -> float:
    """Return the same for a causal mask, whose tiles come longest first.

    The busiest multiprocessor has its share of all; or as many tiles as there are waves, of the
    length that the last wave begins with; or the longest alone: whichever is most.

    Parameters
    ----------
    heads, rows, keys, bm, bn, sm_count
        As for `busiest`.
    step : int
        The greatest common divisor of `bm` and `bn`.
    """
    rows = min(rows, keys)  # of more, the first see no key
    row_tiles = -(-rows // bm)
    tiles = heads * row_tiles
    if tiles == 0:
        return 0.0
    before = keys - rows  # keys that all rows see
    longest = -(-keys // bn) * bn
    fill = -before % step + (bn - step) / 2  # from a tile's last row to its last key, on average
    shortest = min(longest, before + bm + fill)
    total = heads * (longest + (row_tiles - 1) * (before + bm * row_tiles / 2 + fill))
    waves = -(-tiles // sm_count)
    last = longest - (longest - shortest) * (waves - 1) * sm_count / tiles
    return bm * max(longest, total / sm_count, waves * last)
