"""Result files: their shape, and how they are written and read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from cufa import disk_cache

_HEAD = {
    "bench": str,
    "command": str,
    "commit": str,
    "date": str,
    "device": str,
    "driver": str,
    "versions": dict,
    "ceilings": dict,
    "rows": list,
}
_CEILINGS = ("read_gbs", "copy_gbs", "gemm_bf16_tflops")
_CELL = {
    "dtype": str,
    "b": int,
    "hq": int,
    "hk": int,
    "sq": int,
    "sk": int,
    "d": int,
    "dv": int,
    "causal": bool,
}
_FIGURES = {
    "kernel": str,
    "unit": str,
    "cufa": (int, float),
    "peers": dict,
}
_JIT = {"variant": str, "cold_s": (int, float), "warm_s": (int, float)}
_REGRET = {
    **_CELL,
    "seed": int,
    "variants": int,
    "planned": str,
    "planned_us": (int, float),
    "best": str,
    "best_us": (int, float),
}
_GENERATE = {
    "model": str,
    "dtype": str,
    "batch": int,
    "prompt": int,
    "new": int,
    "unit": str,
    "cufa": (int, float),
    "bound": (int, float),
    "bound_share": (int, float),
    "attention_share": (int, float),
    "peers": dict,
}
_MORE_FIGURES: dict[str, dict[str, Any]] = {
    "decode8": {"cufa_gbs": (int, float), "of_read": (int, float)},
    "fp8": {
        "s": int,
        **dict.fromkeys(("rmse", "max_error", "from_16_bits"), (int, float)),
        **dict.fromkeys(("quantize_gbs", "copy_gbs"), (int, float)),
        "peers_rmse": dict,
    },
}
_OTHER_ROWS: dict[str, dict[str, Any]] = {
    "generate": _GENERATE,
    "jit": _JIT,
    "regret": _REGRET,
    "costs": {**_CELL, "us": dict},
    "fp8-error": {
        **{"data": str, "d": int, "s": int, "kernel": str, "granularity": str, "hadamard": bool},
        **dict.fromkeys(("rmse", "relative"), (int, float)),
    },
}
_OF_ONE_KERNEL = ("prefill", "gqa", "models")
_WITHOUT_CEILINGS = ("costs", "cpu")
"""Only quotients of the times of costs count, and those of cpu are not of a GPU."""
_MORE = ("family", "label", "kernel", "model", "seed", "page_size", "feature")
"""Fields that tell rows of one cell apart, where they have them."""

UNITS = ("TFLOP/s", "us")


def gpu_slug(device: str) -> str:
    """Return the short name of a GPU for file names: ``NVIDIA H200`` gives ``h200``."""
    words = re.sub(r"[^a-z0-9]+", " ", device.lower()).split()
    return "-".join(w for w in words if w not in ("nvidia", "geforce", "tesla")) or "gpu"


def default_path(folder: Path, device: str, bench: str, kernel: str | None) -> Path:
    """Return ``<gpu>-<bench>.json``; a 16-bit table of a forced kernel has its last word behind."""
    suffix = f"-{kernel.rpartition('_')[2]}" if bench in _OF_ONE_KERNEL and kernel else ""
    return folder / f"{gpu_slug(device)}-{bench}{suffix}.json"


def validate(result: Any) -> None:
    """Check a result object; ValueError says where it is not of the agreed shape, and why."""
    _check_fields("result", result, _HEAD)
    for name in () if result["bench"] in _WITHOUT_CEILINGS else _CEILINGS:
        _check_number(f"ceilings.{name}", result["ceilings"].get(name))
    for index, row in enumerate(result["rows"]):
        where = f"rows[{index}]"
        if result["bench"] in _OTHER_ROWS:
            _check_fields(where, row, _OTHER_ROWS[result["bench"]])
            continue
        more = _MORE_FIGURES.get(result["bench"], {})
        _check_fields(where, row, {**_CELL, **_FIGURES, **more})
        if row["unit"] not in UNITS:
            raise ValueError(f"{where}.unit is {row['unit']!r}, not one of {', '.join(UNITS)}")
        _check_number(f"{where}.cufa", row["cufa"])
        for peer, figure in row["peers"].items():
            _check_number(f"{where}.peers.{peer}", figure)
        if ("cufa_maxerr" in row) != ("peers_maxerr" in row):
            raise ValueError(f"{where} has one of cufa_maxerr and peers_maxerr without the other")
        unknown = set(row.get("replayed", ())) - {"cufa", *row["peers"]}
        if unknown:
            raise ValueError(f"{where}.replayed names {', '.join(sorted(unknown))}")


def figures(row: dict[str, Any]) -> str:
    """Return the figures of a row in a few words."""
    if "planned_us" in row:
        return f"planned {row['planned_us']:.4g} us | best {row['best_us']:.4g} us"
    if "relative" in row:
        return f"rmse {row['rmse']:.4g}, {row['relative']:.2%} of the result"
    if "us" in row:
        return f"{len(row['us'])} variants from {min(row['us'].values()):.4g} us"
    peers = " ".join(f"{name} {figure:.4g}" for name, figure in row["peers"].items())
    return f"cufa {row['cufa']:.4g} | {peers}"


def merged(earlier: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the rows that an earlier part of the same run has of other cells.

    ValueError where that is a part of another run. Versions of what only one part has imported are
    of both.
    """
    names = ("bench", "commit", "before", "device", "driver")
    pairs = {name: (earlier.get(name), result.get(name)) for name in names}
    was, now = earlier["versions"], result["versions"]
    pairs |= {name: (was[name], now[name]) for name in was if name in now}
    for name, (then, this) in pairs.items():
        if then != this:
            raise ValueError(f"{name} is {this!r}, and was {then!r} for the rows there")
    new = {_identity(row) for row in result["rows"]}
    kept = [row for row in earlier["rows"] if _identity(row) not in new]
    commands = dict.fromkeys([*earlier["command"].split(" && "), result["command"]])
    return {
        **result,
        "command": " && ".join(commands),
        "versions": {**was, **now},
        "rows": [*kept, *result["rows"]],
    }


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a row of a table from others."""
    return tuple(row.get(name) for name in (*_CELL, *_MORE))


def write(path: Path, result: dict[str, Any]) -> None:
    """Check a result, as `validate`, and put it in place whole: no reader sees half a file."""
    validate(result)
    disk_cache.write(path, _dump(result).encode())


def read(path: Path) -> dict[str, Any]:
    """Read and check a result file; ValueError names the file."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        validate(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return result


def _dump(result: dict[str, Any]) -> str:
    """Return JSON with one line a row, so that a change of a figure is a change of a line."""
    head = {key: value for key, value in result.items() if key != "rows"}
    text = json.dumps(head, indent=1, allow_nan=False)
    rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in result["rows"])
    return f'{text[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def _check_fields(where: str, value: Any, fields: dict[str, Any]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    for name, kind in fields.items():
        if name not in value:
            raise ValueError(f"{where}.{name} is missing")
        found = value[name]
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise ValueError(f"{where}.{name} is {found!r}")


def _check_number(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where} is {value!r}, not a number")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{where} is {value!r}, not a positive number")
