"""From the times of `bench.py costs` to the variants that the planner has, and what each costs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import model_shapes
from benchmarks.cells import Cell
from cufa import device
from cufa.compiler import nvrtc
from cufa.planner import scheduler
from cufa.specs import ATTENTION_KERNELS
from cufa.specs.costs import Cost, Work, copies, memory_us, work
from cufa.specs.fa3_wgmma import q_slots
from cufa.specs.hopper_costs import COLUMNS, Key
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

KERNEL = "fa3_wgmma"
"""The kernel whose costs are measured."""

CHOSEN = 18
"""Variants at most of a pair of head dims, with and without a mask."""

DTYPE = "bfloat16"
"""The dtype of the measurements."""

MOST_SPILLED = 80
"""Bytes a thread: registers that are not looked at in each tile of keys."""

LEFT_OUT = 1.7
"""Variants that take this many times as long as the fastest have no time in a row."""

_NEAR = 1.1  # one that never comes as near to the fastest is not chosen
_ROUNDS = 7
_SWEEPS = 300
_LEAST = 0.02  # deviations below are as good
_HARDLY = 0.4  # of a time, that what multiprocessors do takes at least
_SOME_US = 1e-3
_SPARSE = 7e-5  # of each sample, what a cost must give to be
_PRIOR = 10  # samples that the family of a variant counts
_GAIN = 5e-5  # of each row, what a variant must lessen the losses by
_USUAL = 6.0  # what the standard table's problems and models' prompts count
_DEAR = 1.07  # losses beyond count several times
_TOO_DEAR = 4.0

Row = Mapping[str, Any]
Costs = dict[Key, dict[TileShape, Cost]]


def shape_of(name: str) -> TileShape:
    """Return the tile that a result row calls so."""
    *numbers, ping_pong = (int(x) for x in name.split())
    return TileShape._make((*numbers, bool(ping_pong)))


def name_of(shape: TileShape) -> str:
    """Return what a result row calls a tile."""
    return " ".join(str(int(x)) for x in shape)


def key_of(row: Row, gpu: device.Device) -> Key:
    """Return whose costs predict a row."""
    return *ATTENTION_KERNELS[KERNEL].padded(gpu, row["d"], row["dv"]), row["causal"]


def work_of(row: Row, shape: TileShape, gpu: device.Device) -> Work:
    """Return what a row's problem asks of a variant."""
    d, dv, causal = key_of(row, gpu)
    b, sq, sk = row["b"], row["sq"], row["sk"]
    packable = scheduler.packable(row["hq"], row["hk"], ATTENTION_KERNELS[KERNEL])
    pack = packable if sq < shape.bm else 1
    megabytes = b * (row["hq"] * sq + row["hk"] * sk) * (row["d"] + row["dv"]) * 2e-6
    rows = copies((row["d"], row["dv"]), (d, dv))
    tile = shape.bm, shape.bn, shape.blocks_per_sm
    return work(b * row["hq"], sq, sk, pack, causal, megabytes, rows, tile, gpu.sm_count)


def fitted(rows: Sequence[Row], gpu: device.Device) -> dict[TileShape, Cost]:
    """Return the costs of all variants of some rows, which have one key.

    Variants that differ only in the keys of a tile and in stages, and have as many slots of Q, are
    a family: their costs are proportional to keys, or have a constant part too, and are found
    together. A factor says how each differs from its family.
    """
    families: dict[tuple[int, int, bool, int], list[TileShape]] = {}
    d, dv, _ = key_of(rows[0], gpu)
    for name in sorted({name for row in rows for name in row["us"]}):
        shape = shape_of(name)
        slots = q_slots(Variant(KERNEL, "bfloat16", d, dv, **shape._asdict()))
        family = shape.bm, shape.blocks_per_sm, shape.ping_pong, slots
        families.setdefault(family, []).append(shape)
    found: dict[TileShape, Cost] = {}
    for shapes in families.values():
        samples = [(row, s) for row in rows for s in shapes if name_of(s) in row["us"]]
        works = [(work_of(row, s, gpu), s.bn) for row, s in samples]
        asked = np.array([_features(each, bn) for each, bn in works])
        memory = np.array([memory_us(each.megabytes) for each, _ in works])
        us = np.array([row["us"][name_of(s)] for row, s in samples])
        count = np.array([_count(row) for row, _ in samples])
        costs = _least_deviating(asked, memory, us, count)
        deviations = np.log(_without_memory(us, memory) / np.maximum(asked @ costs, _SOME_US))
        for shape in shapes:
            own = [s == shape for _, s in samples]
            weight = float(count[own].sum())
            factor = math.exp(_median(deviations[own], count[own]) * weight / (weight + _PRIOR))
            found[shape] = _cost(costs * factor, shape)
    return found


def _median(numbers: np.ndarray, count: np.ndarray) -> float:
    """Return the median of numbers that count differently."""
    order = np.argsort(numbers)
    total = np.cumsum(count[order])
    return float(numbers[order][np.searchsorted(total, total[-1] / 2)])


def _count(row: Row) -> float:
    """Return what a row counts: users run some problems more than others."""
    heads = 2048 // max(row["d"], row["dv"])
    tokens = row["sq"] == row["sk"] == 16384 // row["b"]
    is_standard = tokens and row["hq"] == row["hk"] == heads
    return _USUAL if is_standard or _cell(row) in _prompts() else 1.0


@functools.cache
def _prompts() -> frozenset[Cell]:
    return frozenset(shape.cell for shape in model_shapes.chosen(None))


def _features(work: Work, bn: int) -> list[float]:
    """Return what a family's costs are multiplied with."""
    wide = bn / 64
    per_tile = work.waves, work.unaligned, *work.keys
    once = work.blank, work.fetched, work.ragged, work.sustained
    return [1.0, *once, *per_tile, *(x * wide for x in per_tile)]


def _cost(costs: np.ndarray, shape: TileShape) -> Cost:
    """Return those of a variant from those of its family."""
    launch, blank, fetched, ragged, sustained, *more = (float(x) for x in costs)
    half = len(more) // 2
    each = [x + y * shape.bn / 64 for x, y in zip(more[:half], more[half:], strict=True)]
    wave, unaligned, *keys = each
    return Cost(launch, wave, tuple(keys), blank, fetched, ragged, unaligned, sustained)


def _without_memory(us: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Return what multiprocessors take of a time, so far as memory's lets it be known."""
    return np.cbrt(np.maximum(us**3 - memory**3, (_HARDLY * us) ** 3))


def _least_deviating(
    asked: np.ndarray, memory: np.ndarray, us: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Return costs of which none is negative, by least deviations of quotients.

    By Newton's method: near the last costs, the time is linear in them.
    """
    once = np.sqrt(count) / us
    weights, costs = once, np.zeros(asked.shape[1])
    target = _without_memory(us, memory)
    for _ in range(_ROUNDS):
        scaled = asked * weights[:, None]
        square, towards = scaled.T @ scaled, scaled.T @ (target * weights) - _SPARSE * len(us)
        diagonal = np.diag(square) + 1e-12
        for _ in range(_SWEEPS):
            for i in range(len(costs)):
                costs[i] = max(0.0, costs[i] + (towards[i] - square[i] @ costs) / diagonal[i])
        own = np.maximum(asked @ costs, _SOME_US)
        time = np.cbrt(own**3 + memory**3)
        slope = (own / time) ** 2
        off = np.abs(time / us - 1)
        weights = once * slope / np.sqrt(np.maximum(off, _LEAST) / _LEAST)
        target = own + (us - time) / np.maximum(slope, _HARDLY**2)
    return costs


class Forecast(NamedTuple):
    """Microseconds of a problem's variants, by their names: predicted of some, and measured."""

    predicted: dict[str, float]
    measured: Mapping[str, float]

    def loss(self, names: Iterable[str] | None = None) -> float:
        """Return the time of what is predicted to be fastest, by that of what is.

        Parameters
        ----------
        names : iterable of str, optional
            Variants that can be chosen; all by default.
        """
        some = self.predicted if names is None else [x for x in names if x in self.predicted]
        if not some:
            return LEFT_OUT
        chosen = min(some, key=self.predicted.__getitem__)
        fastest = min(self.measured.values())
        return self.measured.get(chosen, LEFT_OUT * fastest) / fastest


def forecasts(
    rows: Sequence[Row], costs: Mapping[TileShape, Cost], gpu: device.Device
) -> list[Forecast]:
    """Return what costs predict of each row, for the variants that its run tried at all."""
    tried: dict[int, set[str]] = {}
    for row in rows:
        tried.setdefault(row["seed"], set()).update(row["us"])
    return [
        Forecast(
            {
                name_of(shape): cost.of(work_of(row, shape, gpu))
                for shape, cost in costs.items()
                if name_of(shape) in tried[row["seed"]]
            },
            row["us"],
        )
        for row in rows
    ]


def chosen(rows: Sequence[Row], costs: Mapping[TileShape, Cost], gpu: device.Device) -> list[str]:
    """Return the names of the variants by which the least is lost, in rows of one key.

    One after the other is taken, and then replaced by others as long as that is better.
    """
    found = forecasts(rows, costs, gpu)
    weights = [_count(row) for row in rows]
    near = {
        name
        for row in rows
        for name, us in row["us"].items()
        if us <= _NEAR * min(row["us"].values()) and shape_of(name) in costs
    }

    def lost(names: Sequence[str]) -> float:
        return sum(
            weight * (math.log(x) + _TOO_DEAR * max(0.0, x - _DEAR))
            for weight, x in zip(weights, (each.loss(names) for each in found), strict=True)
        )

    taken: list[str] = []
    before = math.inf
    while len(taken) < min(CHOSEN, len(near)):
        more = min(sorted(near - set(taken)), key=lambda x: lost([*taken, x]))
        after = lost([*taken, more])
        if before - after < _GAIN * len(rows):
            break
        taken, before = [*taken, more], after
    while True:
        swaps = (
            [*taken[:i], x, *taken[i + 1 :]]
            for i in range(len(taken))
            for x in sorted(near - set(taken))
        )
        best = min(swaps, key=lost, default=taken)
        if lost(best) >= lost(taken) - 1e-9:
            return taken
        taken = best


def _cell(row: Row) -> Cell:
    return Cell(**{name: row[name] for name in Cell._fields})


def by_key(rows: Iterable[Row], gpu: device.Device) -> dict[Key, list[Row]]:
    """Return rows by whose costs predict them, in order."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key_of(row, gpu), []).append(row)
    return dict(sorted(found.items()))


def costs_of(
    rows: Iterable[Row],
    gpu: device.Device,
    is_lean: Callable[[Key, TileShape], bool] = lambda key, shape: True,
) -> Costs:
    """Return the chosen variants of each key, and their costs.

    Parameters
    ----------
    rows : iterable of dict
    gpu : Device
    is_lean : callable, optional
        Whether a variant keeps to its registers; others are not chosen.
    """
    found: Costs = {}
    for key, some in by_key(rows, gpu).items():
        costs = fitted(some, gpu)
        while True:
            shapes = sorted(map(shape_of, chosen(some, costs, gpu)), reverse=True)
            spilling = {shape for shape in shapes if not is_lean(key, shape)}
            if not spilling:
                break
            costs = {shape: cost for shape, cost in costs.items() if shape not in spilling}
        found[key] = {shape: costs[shape] for shape in shapes}
    return found


def keeps_to_registers(key: Key, shape: TileShape) -> bool:
    """Return whether the compiler at hand spills hardly any: it may be another than measured."""
    d, dv, causal = key
    score = ("Causal",) if causal else ()
    variant = Variant(KERNEL, DTYPE, d, dv, **shape._asdict(), score=score)
    return nvrtc.compile_variant(variant, "sm_90a").spill_bytes <= MOST_SPILLED


def gpu_of(result: Mapping[str, Any]) -> device.Device:
    """Return the GPU of a result."""
    return device.named(result["device"].split()[1])


def table(result: Mapping[str, Any]) -> str:
    """Return the text of `cufa/specs/hopper_costs.csv` from a result file."""
    lines = [
        f"# Measured on an {result['device']} on {result['date'][:10]} by scripts/bench.py costs,",
        "# and written by scripts/bench.py fit",
        ",".join(COLUMNS),
    ]
    costs = costs_of(result["rows"], gpu_of(result), keeps_to_registers)
    lines += (
        row(key, shape, cost) for key, tiles in costs.items() for shape, cost in tiles.items()
    )
    return "\n".join([*lines, ""])


def row(key: Key, shape: TileShape, cost: Cost) -> str:
    """Return the row of a tile and its cost."""
    keys = " ".join(f"{x:.4g}" for x in cost.keys)
    prices = [keys if x is cost.keys else f"{x:.4g}" for x in cost]
    return ",".join([*(str(int(x)) for x in (*key, *shape)), *prices])


def write(result: Mapping[str, Any], root: Path) -> Path:
    """Write the table into a checkout, and return its path; ValueError for another benchmark's."""
    if result["bench"] != "costs":
        raise ValueError(f"the file is a result of {result['bench']}, not of costs")
    path = root / "cufa" / "specs" / "hopper_costs.csv"
    path.write_text(table(result))
    return path
