"""bench.py decode8: cells, caches of 8 bits, rows and pages, with a played GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from benchmarks.cells import Cell
from benchmarks.race import Budget
from eight_bits import Cache, quantized8
from test_bench_decode import VARIANT
from test_bench_tables import PlayedClock, page_of

from cufa.explorer.clock import Call

ONE = Cell("bfloat16", 16, 32, 8, 1, 8192, 128, 128, False)


def test_cells() -> None:
    pytest.importorskip("cupy")
    from benchmarks.decode8 import cells

    found = cells()
    assert len(found) == len(set(found)) == 10
    assert ONE in found
    # More than 256 MB of K and V.
    assert all(cell.b * cell.hk * cell.sk * (cell.d + cell.dv) > 256e6 for cell in found)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_caches_of_8_bits(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("cupy")
    from benchmarks import decode8

    monkeypatch.setattr(decode8, "cupy", np)
    x = rng.standard_normal((2, 3, 50, 64), np.float32)
    found = Cache(*decode8.quantized(x, kind))
    expected = quantized8(x, "uint8" if kind == "fp8" else "int8")
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-6)
    assert found.values.dtype == expected.values.dtype
    error, least = (np.abs(cache.numbers - x).max() for cache in (found, expected))
    assert error <= least * 1.001


def test_rows_and_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """16 bits take 200 us, 210 in pages; all others 100."""
    pytest.importorskip("cupy")
    from benchmarks import contestants, decode8

    ms = {"cufa": 0.2, "pages of 16": 0.21, "pages of 64": 0.21}
    ms |= {way.name: 0.1 for way in decode8.WAYS}

    def capture(call: Call, calls: int) -> Call:
        found = call()
        return lambda: found * calls

    def ready(*sets: Cell) -> Any:
        calls: dict[str, Any] = {name: lambda x=x: x for name, x in ms.items()}
        return contestants.Ready(sets[0], VARIANT, calls, dict.fromkeys(ms, 1e-3))

    monkeypatch.setattr(decode8, "cupy", MagicMock())
    current = SimpleNamespace(l2_bytes=50 << 20)
    monkeypatch.setattr(decode8.devices, "current", lambda: current)
    monkeypatch.setattr(decode8, "Operands", lambda cell, rng: cell)
    monkeypatch.setattr(decode8.graphs, "capture", capture)
    monkeypatch.setattr(decode8, "free_memory", lambda: None)
    field: Any = SimpleNamespace(ready=ready)
    rows = list(decode8.rows(field, [ONE], PlayedClock(), Budget(rounds=2), 1, 4000.0))
    assert [(row["mode"], row["page_size"]) for row in rows] == [
        (kind, size) for size in (0, 16, 64) for kind in ("fp8", "int8")
    ]
    gbs = 16 * 8 * 8192 * (256 + 8) / 100e3
    assert rows[0]["cufa_gbs"] == pytest.approx(gbs, rel=1e-4)
    assert rows[0]["of_read"] == pytest.approx(gbs / 4000, rel=1e-3)
    assert [row["peers"] for row in rows[:3]] == [{"16_bits": 200.0}] * 2 + [{"16_bits": 210.0}]
    text = page_of(tmp_path, "decode8", rows)
    assert text.startswith("# Decoding over 8 bits on NVIDIA H200\n")
    assert "| fp8 | 0 | 16_bits | 1 | 2.000 | 2.000 |" in text
    assert "| 69.2% | graph |" in text


@pytest.mark.gpu
def test_contestants_compute_the_same(cupy: Any) -> None:
    from benchmarks import decode8

    from cufa.explorer.clock import CudaClock

    few = [ONE._replace(b=2, sk=1024), ONE._replace(b=2, sq=4, sk=512, causal=True)]
    clock, budget = CudaClock(rest_s=0), Budget(rounds=2)
    rows = list(decode8.rows(decode8.Decoders8(), few, clock, budget, 1, 4000.0))
    assert len(rows) == 12
    for row in rows:
        assert set(row["replayed"]) == {"cufa", "16_bits"}
        assert row["cufa_maxerr"] < 0.05
        assert row["peers_maxerr"]["16_bits"] < 0.03
