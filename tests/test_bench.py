"""The benchmark scripts, as far as they go without a GPU."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
import numpy as np
import pytest
from benchmarks import accuracy, environment, jit, options, plain, results, summary
from benchmarks.cells import Cell, standard_cells
from benchmarks.jit import Case, feature_cases, standard_cases
from benchmarks.report import markdown, write_report


def _row(sq: int, cufa: float, peers: dict[str, float], **more: Any) -> dict[str, Any]:
    cell = Cell("bfloat16", 16384 // sq, 16, 16, sq, sq, 128, 128, False)
    return {
        **cell.row(),
        "kernel": "fa2_mma",
        "unit": "TFLOP/s",
        "cufa": cufa,
        "peers": peers,
        **more,
    }


#: The head of all result files.
HEAD = {
    "command": "python scripts/bench.py prefill",
    "commit": "0" * 40,
    "date": "2026-01-02T03:04:05+00:00",
    "device": "NVIDIA H200",
    "driver": "580.1",
    "versions": {"cupy": "14.2.0", "torch": "2.11.0"},
    "ceilings": {"read_gbs": 4000.0, "copy_gbs": 4100.0, "gemm_bf16_tflops": 700.0},
}


def _result(rows: list[dict[str, Any]], bench_name: str = "prefill") -> dict[str, Any]:
    return {"bench": bench_name, **copy.deepcopy(HEAD), "rows": rows}


@pytest.fixture
def result() -> dict[str, Any]:
    """Return a result of three cells; one peer could not run the last."""

    def errors() -> dict[str, Any]:
        return {"cufa_maxerr": 0.0012, "peers_maxerr": {"fa2": 0.0011, "cupy": 0.002}}

    return _result(
        [
            _row(512, 200.0, {"fa2": 100.0, "cupy": 20.0}, **errors()),
            _row(1024, 300.0, {"fa2": 600.0, "cupy": 10.0}, **errors()),
            _row(2048, 400.0, {"fa2": 50.0}, **errors()),
        ]
    )


# cells


def test_standard_table_has_36_cells() -> None:
    cells = standard_cells("bfloat16", (64, 128, 256))
    assert len(cells) == len(set(cells)) == 36
    for cell in cells:
        assert cell.hq * cell.d == cell.hk * cell.dv == 2048
        assert cell.b * cell.sq == cell.b * cell.sk == 16384


def test_default_runs() -> None:
    prefill = options.cells_of(options.parser().parse_args(["prefill"]))
    for dtype in ("bfloat16", "float16"):
        assert [cell.d for cell in prefill if cell.dtype == dtype] == [64] * 12 + [128] * 12 + [
            256
        ] * 12
    fp32 = options.cells_of(options.parser().parse_args(["fp32"]))
    assert len(fp32) == 24
    assert {(cell.dtype, cell.d) for cell in fp32} == {("float32", 64), ("float32", 128)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prefill --head-dim 96", "96"),
        ("prefill --seq 500", "500"),
        ("prefill --dtype float32", "float32"),
        ("gqa --seq 0", "0 is not positive"),
        ("headdims --rounds 0", "--rounds: must be at least 1, not '0'"),
        ("gqa --timing stopwatch", "stopwatch"),
        ("models --models lama", "--models: unknown lama"),
        ("decode --before no-such-revision", "is no folder and no revision"),
        ("backward --only table tables", "tables"),
        ("backward --only gqa --head-dim 64", "--head-dim: --only has [128]"),
        ("fp8 --head-dim 100", "100"),
        ("generate --new 5", "--new must be at least"),
        ("generate --batch 0", "--batch and --prompt must be at least 1"),
        ("jit --at-once 0", "--at-once: must be at least 1, not '0'"),
        ("regret --part 3/2", "'3/2' is not like 2/3"),
        ("regret --kernels fa2_fp32", "fa2_fp32"),
        ("regret --problems 1 --part 1/2", "--problems and --part leave none"),
        ("refactor", "--before"),
        (f"refactor --before {bench.ROOT} --tables gqa", "gqa"),
        (f"refactor --before {bench.ROOT} --seq 500", "500"),
        ("nonsense", "nonsense"),
        ("report no-such-file.json", "no-such-file.json"),
    ],
)
def test_bad_arguments(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(words.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


MEASUREMENTS = (
    *("prefill", "gqa", "headdims", "fp32", "models", "decode", "decode8", "masks", "backward"),
    "generate",
    *("fp8", "fp8-error", "regret", "costs", "host", "jit", f"refactor --before {bench.ROOT}"),
)


def stops_with_one_line(capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(name.split())
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_without_a_gpu(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime

    def fail() -> None:
        raise runtime.CUDARuntimeError(100)

    monkeypatch.setattr(runtime, "getDevice", fail)
    stops_with_one_line(capsys, name, "error: no GPU here (")


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_without_cupy(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    stops_with_one_line(capsys, name, "error: CuPy is missing (")


def test_flops() -> None:
    full = Cell("float16", 2, 3, 3, 5, 7, 11, 11, False)
    assert full.flops == 4 * 2 * 3 * 5 * 7 * 11
    assert full._replace(causal=True).flops == full.flops / 2
    assert full._replace(dv=22).flops == 2 * 2 * 3 * 5 * 7 * (11 + 22)
    assert full._replace(b=10**9).tflops(2.0) == pytest.approx(4 * 3 * 5 * 7 * 11 / 2e-3 / 1e3)


def test_standard_variants() -> None:
    cases = standard_cases(["auto", "fa2_mma"])
    assert len(set(map(str, cases))) == 2 * 6 + 4
    assert cases[0].arguments() == ["bfloat16", "64", "0", "auto"]


def test_first_calls_with_each_feature() -> None:
    pytest.importorskip("cupy")
    cases = feature_cases([128])
    assert len(set(map(str, cases))) == len(cases) > 12
    assert {case.head_dim for case in cases} == {128}
    softcap = next(case for case in cases if case.feature == "softcap")
    assert softcap.arguments() == ["bfloat16", "128", "1", "auto", "softcap"]
    assert str(softcap) == "bfloat16 d128 softcap auto"


@pytest.mark.parametrize("at_once", [1, 3])
def test_first_calls_are_the_least_of_all_rounds(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    cases = standard_cases([])
    found: dict[Case, list[str]] = {case: [] for case in cases}

    def seconds(case: Case, cache: str) -> float:
        assert Path(cache).is_dir()
        warm = cache in found[case]
        found[case].append(cache)
        return case.head_dim + (0.1 if warm else 1 / len(set(found[case])))

    monkeypatch.setattr(jit, "_first_call_s", seconds)
    rows = list(jit.rows(cases, rounds=4, at_once=at_once))
    assert [row["variant"] for row in rows] == [str(case) for case in cases]
    # The first case has a process before the others; the last two rounds have no warm ones.
    of_first, *of_others = (len(found[case]) for case in cases)
    assert (of_first, set(of_others)) == (7, {6})
    for case, row in zip(cases, rows, strict=True):
        caches = len(set(found[case]))
        assert row["cold_s"] == pytest.approx(case.head_dim + 1 / caches, abs=1e-4)
        assert row["warm_s"] == pytest.approx(case.head_dim + 0.1)


# plain attention and the float64 reference


def _naive(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k.astype(np.float64)) * scale
    if causal:
        scores = np.where(np.tri(q.shape[2], k.shape[2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bhkd->bhqd", weights, v.astype(np.float64))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "below"), [("float32", 0), ("float16", 0), ("float16", 99)])
def test_plain_attention(
    dtype: str, below: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "CHUNK_ELEMENTS", 2 * 37 * 37)
    monkeypatch.setattr(plain, "BATCHED_BELOW", below)
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 5, 37, 16)).astype(dtype) for _ in "qkv")
    out = plain.attention(np, q, k, v, causal=causal, scale=0.25)
    assert out.dtype == q.dtype
    assert out.shape == v.shape
    tolerance = 1e-6 if dtype == "float32" else 4e-3
    np.testing.assert_allclose(out, _naive(q, k, v, causal, 0.25), atol=tolerance, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_errors_against_float64(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHUNK_ROWS", 7)
    cell = Cell("float32", 2, 3, 3, 20, 20, 8, 8, causal)
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((2, 3, 20, 8)).astype(np.float32) for _ in "qkv")
    exact = _naive(q, k, v, causal, cell.scale)
    off = exact.copy()
    off[1, 2, 19, 7] += 0.5
    wrong = exact.copy()
    wrong[0, 0, 3] = np.nan
    found = accuracy.max_errors(np, cell, (q, k, v), {"a": exact, "b": off, "c": wrong})
    assert found["a"] < 1e-6
    assert found["b"] == pytest.approx(0.5, abs=1e-6)
    assert np.isnan(found["c"])


def test_checked_heads_hold_enough_rows() -> None:
    for cell in standard_cells("float32", (64, 128)):
        heads = accuracy.checked_heads(cell)
        assert len(heads) == len(set(heads)) >= 2
        assert len(heads) * cell.sq >= accuracy.ROWS
        assert heads[0] == (0, 0)
        assert heads[-1] == (cell.b - 1, cell.hq - 1)
    assert accuracy.checked_heads(Cell("float32", 1, 1, 1, 8, 8, 8, 8, False)) == [(0, 0)]


# result files


def test_results_are_written_and_read(tmp_path: Path, result: dict[str, Any]) -> None:
    path = tmp_path / "new" / "h200-prefill.json"
    results.write(path, result)
    assert results.read(path) == result == json.loads(path.read_text())
    results.write(path, {**result, "rows": []})
    assert results.read(path)["rows"] == []
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: r.pop("commit"), "result.commit is missing"),
        (lambda r: r.update(rows={}), "result.rows"),
        (lambda r: r["ceilings"].pop("copy_gbs"), "ceilings.copy_gbs"),
        (lambda r: r["rows"][1].pop("kernel"), r"rows\[1\].kernel is missing"),
        (lambda r: r["rows"][0].update(b=True), r"rows\[0\].b is True"),
        (lambda r: r["rows"][0].update(unit="furlongs"), "furlongs"),
        (lambda r: r["rows"][0].update(cufa=float("nan")), r"rows\[0\].cufa"),
        (lambda r: r["rows"][2]["peers"].update(fa2=None), r"rows\[2\].peers.fa2"),
        (lambda r: r["rows"][2].pop("peers_maxerr"), r"rows\[2\] has one of"),
        (lambda r: r.update(bench="jit"), r"rows\[0\].variant is missing"),
    ],
)
def test_other_shapes_are_refused(
    damage: Callable[[dict[str, Any]], Any],
    message: str,
    tmp_path: Path,
    result: dict[str, Any],
) -> None:
    damage(result)
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match=message):
        results.write(path, result)
    assert not path.exists()


def test_reading_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json"):
        results.read(path)


def test_default_paths() -> None:
    def name(bench_name: str, kernel: str | None) -> str:
        return results.default_path(Path(), "NVIDIA H200", bench_name, kernel).name

    assert name("prefill", "fa2_mma") == "h200-prefill-mma.json"
    assert name("prefill", None) == "h200-prefill.json"
    assert name("fp32", "fa2_fp32") == "h200-fp32.json"
    assert name("host", None) == "h200-host.json"
    assert results.gpu_slug("NVIDIA GeForce RTX 4090") == "rtx-4090"


def test_recorded_command_runs_again() -> None:
    words = ["fp32", "--out", "/tmp/x/r.json", "--commit", "abc", "--seq", "512"]
    expected = "python scripts/bench.py fp32 --out docs/benchmarks/r.json --seq 512"
    assert environment.command_line(words) == expected
    words = ["fp32", "--out=/tmp/x/r.json", "--commit=abc", "--seq", "512"]
    assert environment.command_line(words) == expected


# ratios and reports


def test_ratios(result: dict[str, Any]) -> None:
    found = summary.summarise(result["rows"])
    fa2, cupy = found["fa2"], found["cupy"]
    assert (fa2.cells, cupy.cells) == (3, 2)
    assert fa2.geomean == pytest.approx((2 * 0.5 * 8) ** (1 / 3))
    assert fa2.minimum == 0.5
    assert fa2.worst["sq"] == 1024
    assert cupy.geomean == pytest.approx((10 * 30) ** 0.5)


def test_ratio_of_times_is_the_other_way_round() -> None:
    row = _row(512, 10.0, {"sdpa": 30.0}, unit="us")
    assert summary.ratio(row, "sdpa") == 3.0


def test_error_summary(result: dict[str, Any]) -> None:
    result["rows"][1]["cufa_maxerr"] = 0.0033
    del result["rows"][2]["peers_maxerr"]["cupy"]
    found = summary.summarise_errors(result["rows"])
    assert found["fa2"] == (0.0011, 0.0033, pytest.approx(3.0))
    assert found["cupy"] == (0.002, 0.0033, pytest.approx(1.65))


def test_markdown(result: dict[str, Any]) -> None:
    page = markdown(result, "r.json", "r.png")
    assert page.startswith("# Prefill on NVIDIA H200\n")
    assert "![prefill](r.png)" in page
    assert "| bfloat16 | fa2 | 3 | 2.000 | 0.500 | D 128, full, S 1024 |" in page
    assert "| bfloat16 | cupy | 2 | 17.321 | 10.000 | D 128, full, S 512 |" in page
    # The peer that could not run the cell leaves its places empty.
    assert "| 2048 | 8 | 16 | fa2_mma | 400.0 | 50.0 |  | 8.00 |  |" in page
    assert "| bfloat16 | fa2 | 1.20e-03 | 1.10e-03 | 1.09 |" in page
    assert "| 512 | 32 | 16 | 1.20e-03 | 1.10e-03 | 2.00e-03 |" in page
    tables = [block for block in page.split("\n\n") if block.startswith("| ")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_reports_are_written_beside_the_results(tmp_path: Path, result: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    peers = {"sdpa": 30.0, "floor": 5.0}
    cases = ("same", "new_lengths")
    host = _result([{"case": case, **_row(512, 10.0, peers, unit="us")} for case in cases], "host")
    of_jit = _result([{"variant": "bfloat16 d64 full auto", "cold_s": 0.5, "warm_s": 0.05}], "jit")
    for name, content in {"prefill": result, "host": host, "jit": of_jit}.items():
        path = tmp_path / f"h200-{name}.json"
        results.write(path, content)
        page, plot = write_report(path)
        assert page == tmp_path / f"h200-{name}.md"
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert f"({path.name})" in page.read_text()
    assert "| **longest** | 0.500 | 0.050 |" in page.read_text()
    text = (tmp_path / "h200-host.md").read_text()
    assert "| new_lengths | sdpa | 1 | 3.000 | 3.000 |" in text
    assert "| same | bfloat16 | " in text


def test_children_have_caches_of_their_own(tmp_path: Path) -> None:
    found = environment.of_child(str(tmp_path))
    for name in ("CUFA_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert Path(found[name]).parent == tmp_path
    code = "import benchmarks.cells, cufa; print(cufa.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=found, cwd=tmp_path, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).parent == bench.ROOT / "cufa", done.stderr
