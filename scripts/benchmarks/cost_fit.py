"""From the times of `bench.py costs` to the costs that the planner has, by least deviations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cufa import device
from cufa.kernel import ATTENTION_KERNELS
from cufa.planner import scheduler
from cufa.planner.costs import Cost
from cufa.planner.tiles import TileShape

KERNEL = "fa3_wgmma"
"""Whose costs are measured."""

_STARTS = ((1.0, 0.7, -1.0, -0.7), (0.7, 0.0, -0.3, -0.3))  # logarithms
_STEPS = 60
_LEAST = 0.01  # deviations below are as good

Sample = tuple[Callable[[Cost], float], float]
"""The time of a problem by costs, and the microseconds that were measured."""


def shape_of(name: str) -> TileShape:
    """Return the tile that a result row calls so."""
    *numbers, ping_pong = (int(x) for x in name.split())
    return TileShape._make((*numbers, bool(ping_pong)))


def prediction(row: Mapping[str, Any], shape: TileShape, sms: int) -> Callable[[Cost], float]:
    """Return the time that the planner finds from a tile's costs, for a row of the results."""
    bm, bn, sq = shape.bm, shape.bn, row["sq"]
    packable = scheduler.packable(row["hq"], row["hk"], ATTENTION_KERNELS[KERNEL])
    pack = packable if sq < bm else 1
    sizes = row["b"] * row["hq"], sq, row["sk"], bm, bn, math.gcd(bm, bn), sms, pack
    return lambda cost: cost.of(*sizes, row["causal"])


def fitted(samples: Sequence[Sample], blocks: int) -> Cost:
    """Return the costs whose times deviate least, in logarithms, from those that were measured."""
    wanted = np.log([us for _, us in samples])

    def deviations(z: np.ndarray) -> np.ndarray:
        cost = _cost(z)
        return np.log([time(cost) for time, _ in samples]) - wanted

    ends = (_descended(deviations, np.array([*s[:3], *s[3:] * (blocks - 1)])) for s in _STARTS)
    return _cost(min(ends, key=lambda z: float(np.abs(deviations(z)).sum())))


def _cost(z: np.ndarray) -> Cost:
    """Return costs from logarithms: of the three, and of what each block more adds to the last."""
    launch, tile, keys, *more = (float(x) for x in np.exp(z))
    of_keys = [keys]
    for each in more:
        of_keys.append(of_keys[-1] * (1 + each))
    return Cost(launch, tile, tuple(of_keys))


def _descended(deviations: Any, z: np.ndarray) -> np.ndarray:
    """Return where iteratively weighted least squares, damped, end."""
    found, damping = deviations(z), 1e-2
    for _ in range(_STEPS):
        slopes = np.stack([(deviations(z + 1e-4 * e) - found) / 1e-4 for e in np.eye(len(z))], 1)
        weights = 1 / np.maximum(np.abs(found), _LEAST)
        square = slopes.T @ (weights[:, None] * slopes)
        towards = slopes.T @ (weights * found)
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), towards)
        there = np.clip(z - step, -6, 6)
        nearer = deviations(there)
        if np.abs(nearer).sum() < np.abs(found).sum():
            z, found, damping = there, nearer, damping / 3
        else:
            damping *= 4
    return z


Costs = dict[tuple[str, int, int, bool], dict[TileShape, Cost]]


def costs_of(rows: Iterable[Mapping[str, Any]], sms: int) -> Costs:
    """Return the costs of each tile, for each pair of head dims, with and without a mask."""
    samples: dict[tuple[str, int, int, bool], dict[TileShape, list[Sample]]] = {}
    for row in rows:
        of_tiles = samples.setdefault((KERNEL, row["d"], row["dv"], row["causal"]), {})
        for name, us in row["us"].items():
            shape = shape_of(name)
            of_tiles.setdefault(shape, []).append((prediction(row, shape, sms), us))
    return {
        key: {shape: fitted(some, shape.blocks_per_sm) for shape, some in of_tiles.items()}
        for key, of_tiles in samples.items()
    }


class Forecast(NamedTuple):
    """Microseconds of a problem's variants, by their names in the row: predicted and measured."""

    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def loss(self) -> float:
        """The measured time of what is predicted to be fastest, by that of what is."""
        chosen = min(self.predicted, key=self.predicted.__getitem__)
        return self.measured[chosen] / min(self.measured.values())


def forecasts(rows: Iterable[Mapping[str, Any]], costs: Costs, sms: int) -> list[Forecast]:
    """Return what costs predict of each row."""
    found = []
    for row in rows:
        of_tiles = costs[KERNEL, row["d"], row["dv"], row["causal"]]
        times = {}
        for name in row["us"]:
            shape = shape_of(name)
            times[name] = prediction(row, shape, sms)(of_tiles[shape])
        found.append(Forecast(times, row["us"]))
    return found


def sm_count(result: Mapping[str, Any]) -> int:
    """Return the multiprocessors of the GPU of a result."""
    return device.named(result["device"].split()[1]).sm_count


def module(result: Mapping[str, Any]) -> str:
    """Return the source of `cufa/planner/hopper_costs.py` from a result file."""
    lines = [
        '"""What tiles cost a multiprocessor of Hopper, in microseconds.',
        "",
        f"Measured on an {result['device']} on {result['date'][:10]}",
        "by ``python scripts/bench.py costs``, and written by ``python scripts/bench.py fit``.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from cufa.planner.costs import Cost",
        "from cufa.planner.tiles import TileShape",
        "",
        "COSTS: dict[tuple[str, int, int, bool], dict[TileShape, Cost]] = {",
    ]
    for (kernel, d, dv, causal), of_tiles in costs_of(result["rows"], sm_count(result)).items():
        lines.append(f'    ("{kernel}", {d}, {dv}, {causal}): {{')
        for shape, (launch, tile, keys) in of_tiles.items():
            numbers = ", ".join(str(x) for x in shape)
            each = ", ".join(f"{x:.5g}" for x in keys) + ("," if len(keys) == 1 else "")
            lines.append(f"        TileShape({numbers}): Cost({launch:.4g}, {tile:.4g}, ({each})),")
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def write(result: Mapping[str, Any], root: Path) -> Path:
    """Write the module into a checkout, and return its path; ValueError for another benchmark's."""
    if result["bench"] != "costs":
        raise ValueError(f"the file is a result of {result['bench']}, not of costs")
    path = root / "cufa" / "planner" / "hopper_costs.py"
    path.write_text(module(result))
    return path
