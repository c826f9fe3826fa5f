"""tuned.py: which table a plan follows, and files that are not as they should be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import devices
from test_problem import problems

from cufa import device, disk_cache, tuned
from cufa.compiler import source
from cufa.device import Device
from cufa.features.causal import Causal
from cufa.features.parts import PARTS
from cufa.features.softcap import Softcap
from cufa.features.window import Window
from cufa.planner.plan import Plan, plan_tiles
from cufa.planner.problem_class import ProblemClass, problem_class
from cufa.planner.tuned_table import VERSION, Entry, Table, dump, parse
from cufa.problem.problem import Problem
from cufa.specs import KERNELS
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

H200 = device.named("h200")
PROBLEM = Problem("bfloat16", 4, 32, 8, 4000, 4096, 128, 128, 0.1, (Causal(),))
CLASS = ProblemClass(2, 128, 128, ("Causal",), 4096, 4096, 8)
ENTRY = Entry("fa2_mma", TileShape(64, 32, 2, 4, 3))
FP32_PROBLEM = PROBLEM._replace(dtype="float32")
FP32_CLASS = CLASS._replace(element_bytes=4)
FA1_ENTRY = Entry("fa1_fp32", TileShape(64, 32, 1, 8, 1))


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Let only those warnings pass that a test expects."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def table_of(entries: dict[ProblemClass, Entry], **changes: Any) -> Table:
    return Table(
        device="NVIDIA H200",
        sources=source.digest(),
        date="2026-11-21",
        command="python -m cufa tune",
        entries=entries,
    )._replace(**changes)


def write_user(table: Table) -> None:
    disk_cache.write(tuned.user_path(H200), dump(table).encode())
    tuned.forget()


def planned(problem: Problem = PROBLEM, gpu: Device = H200, kernel: str | None = None) -> Plan:
    """Return the plan of a call, which follows the user's table."""
    return plan_tiles(problem, gpu, kernel, tuned.user_table(gpu))


# --- classes of problems ---


def test_problem_class() -> None:
    assert problem_class(PROBLEM, H200) == CLASS
    half = PROBLEM._replace(dtype="float16", heads_kv=32, scale=2.0)
    assert problem_class(half, H200) == CLASS
    assert problem_class(FP32_PROBLEM, H200) == FP32_CLASS
    small = PROBLEM._replace(head_dim=72, head_dim_v=40, features=())
    head_dims = KERNELS["fa2_mma"].padded(H200, 72, 40)
    assert problem_class(small, H200)[1:4] == (*head_dims, ())


def test_scores_have_classes_of_their_own() -> None:
    softcap = PROBLEM.having(Softcap(5.0))
    assert problem_class(softcap, H200).score == ("Softcap", "Causal")
    assert problem_class(softcap.having(Softcap(9.0)), H200) == problem_class(softcap, H200)
    window = PROBLEM.having(Window(1000, None))
    assert problem_class(window, H200) == CLASS._replace(
        score=("Causal", "WindowLeft"), seq_kv=1024
    )


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        *[(0, 64), (1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (4095, 4096)],
        *[(8193, 16384), (16384, 16384), (16385, 16384), (2**40, 16384)],
    ],
)
def test_lengths_are_powers_of_two(length: int, expected: int) -> None:
    key = problem_class(PROBLEM._replace(seq_q=length, seq_kv=1), H200)
    assert (key.seq_q, key.seq_kv) == (expected, 64)
    key = problem_class(PROBLEM._replace(seq_q=1, seq_kv=length), H200)
    assert (key.seq_q, key.seq_kv) == (64, expected)


@pytest.mark.parametrize(
    ("tiles", "waves"),
    [
        *[(0, 0), (1, 0), (66, 0), (67, 1), (132, 1), (133, 2), (264, 2)],
        *[(265, 4), (528, 4), (529, 8), (10**6, 8)],
    ],
)
def test_waves(tiles: int, waves: int) -> None:
    """Row tiles of 128 for each of 132 multiprocessors."""
    assert H200.sm_count == 132
    heads = PROBLEM._replace(batch=1, heads_q=tiles, heads_kv=tiles, seq_q=100)
    assert problem_class(heads, H200).waves == waves
    rows = PROBLEM._replace(batch=1, heads_q=1, heads_kv=1, seq_q=128 * tiles)
    assert problem_class(rows, H200).waves == waves


@given(problems(st.integers(0, 2**33)), devices)
def test_every_problem_has_a_class(problem: Problem, gpu: Device) -> None:
    key = problem_class(problem, gpu)
    assert key.head_dim >= problem.head_dim
    assert key.head_dim_v >= problem.head_dim_v
    assert {key.seq_q, key.seq_kv} <= {2**n for n in range(6, 15)}
    assert key.waves in (0, 1, 2, 4, 8)


# --- names and files ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA H200 MIG 1g.18gb", "h200-mig-1g-18gb"),
        ("../Ünix/", "nix"),
    ],
)
def test_table_name(name: str, expected: str) -> None:
    assert tuned.table_name(name) == expected
    path = tuned.user_path(H200._replace(name=name))
    assert path == disk_cache.folder() / "tuned" / f"{expected}.json"


entries = st.dictionaries(
    st.builds(
        ProblemClass,
        *[st.integers(0, 300)] * 3,
        st.lists(st.sampled_from(list(PARTS))).map(tuple),
        *[st.integers()] * 3,
    ),
    st.builds(Entry, st.text(), st.builds(TileShape, *[st.integers()] * 5, st.booleans())),
    max_size=5,
)


@given(st.builds(Table, st.text(), st.text(), st.text(), st.text(), entries))
def test_what_is_written_can_be_read(table: Table) -> None:
    assert parse(dump(table)) == table


def test_a_row_may_leave_out_what_has_a_default() -> None:
    text = dump(table_of({CLASS: ENTRY}))
    older = text.replace(', "ping_pong": false', "")
    assert older != text
    assert parse(older) == parse(text)


def test_one_entry_a_line_in_order() -> None:
    keys = [CLASS._replace(seq_q=n, score=c) for n in (512, 64, 4096) for c in (("Causal",), ())]
    text = dump(table_of(dict.fromkeys(keys, ENTRY)))
    rows = [line for line in text.splitlines() if "element_bytes" in line]
    assert len(rows) == len(keys)
    read = [json.loads(row.rstrip(",")) for row in rows]
    found = [(tuple(r["score"]), r["seq_q"]) for r in read]
    assert found == sorted((k.score, k.seq_q) for k in keys)
    assert read[0] == {
        **min(keys)._asdict(),
        "score": [],
        "kernel": "fa2_mma",
        **ENTRY.shape._asdict(),
    }
    assert json.loads(text)["version"] == VERSION
    assert dump(table_of(dict.fromkeys(reversed(keys), ENTRY))) == text


def test_store() -> None:
    path = tuned.store(H200._replace(name="NVIDIA H200"), {CLASS: ENTRY}, "a command")
    assert path == tuned.user_path(H200)
    table = tuned.load(path)
    assert table is not None
    assert table[:2] == ("NVIDIA H200", source.digest())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", table.date)
    assert (table.command, table.entries) == ("a command", {CLASS: ENTRY})


def test_store_keeps_what_was_there() -> None:
    other = CLASS._replace(score=())
    newer = ENTRY._replace(shape=ENTRY.shape._replace(bm=128))
    tuned.store(H200, {CLASS: ENTRY, other: ENTRY}, "first")
    tuned.store(H200, {CLASS: newer}, "second")
    table = tuned.load(tuned.user_path(H200))
    assert table is not None
    assert table.entries == {CLASS: newer, other: ENTRY}
    assert table.command == "second"


@pytest.mark.parametrize("old", ["of other kernels", "damaged", "of no text"])
def test_store_replaces_what_no_longer_holds(old: str) -> None:
    write_user(table_of({CLASS._replace(score=()): ENTRY}, sources="0" * 16))
    path = tuned.user_path(H200)
    if old != "of other kernels":
        path.write_bytes(b"{" if old == "damaged" else b"\xff")
    tuned.store(H200, {CLASS: ENTRY}, "now")
    table = tuned.load(path)
    assert table is not None
    assert table.entries == {CLASS: ENTRY}


def test_what_is_stored_holds_at_once() -> None:
    assert "default" in planned().reason
    tuned.store(H200, {CLASS: ENTRY}, "a command")
    assert "tuned" in planned().reason


# --- plans ---


def test_the_table_first_then_the_rules() -> None:
    usual = plan_tiles(PROBLEM, H200)
    assert usual.reason == "default for bfloat16"
    assert planned() == usual
    write_user(table_of({CLASS: ENTRY}, date="2026-12-01"))
    chosen = planned()
    assert chosen.variant == Variant(
        "fa2_mma", "bfloat16", 128, 128, 64, 32, 2, 4, 3, score=("Causal",)
    )
    assert chosen.reason == "tuned on 2026-12-01 (user's table)"
    assert chosen.q_tiles == 63
    assert chosen.grid == 4 * 32 * 63


def test_plans_follow_the_table_that_they_are_given() -> None:
    """None but that: whoever calls reads the user's."""
    write_user(table_of({CLASS: ENTRY}))
    assert plan_tiles(PROBLEM, H200).reason == "default for bfloat16"
    assert plan_tiles(PROBLEM, H200, table=table_of({CLASS: ENTRY})) == planned()
    assert plan_tiles(PROBLEM, H200, table=table_of({})) == plan_tiles(PROBLEM, H200)


def test_what_no_table_names_follows_the_rules() -> None:
    write_user(table_of({CLASS: ENTRY}))
    for change in ({"features": ()}, {"seq_q": 100}, {"head_dim": 200}, {"dtype": "float32"}):
        problem = PROBLEM._replace(**change)  # type: ignore[arg-type]
        assert planned(problem) == plan_tiles(problem, H200)
    for gpu in (device.named("h100"), device.named("a100")):
        assert planned(PROBLEM, gpu) == plan_tiles(PROBLEM, gpu)


def test_the_variant_is_the_problems() -> None:
    """Type, mask and head dims are not the table's; what the class leaves open is filled in."""
    write_user(table_of({CLASS: ENTRY, CLASS._replace(score=()): ENTRY}))
    for dtype in ("float16", "bfloat16"):
        for features in ((), (Causal(),)):
            for head_dim in (100, 128):
                problem = PROBLEM._replace(dtype=dtype, features=features, head_dim=head_dim)
                chosen = planned(problem).variant
                assert chosen == ENTRY.variant(problem, H200)
                assert chosen[1:4] == (dtype, 128, 128)
                assert chosen.causal == bool(features)


def test_a_forced_kernel_takes_only_its_own_entries() -> None:
    write_user(table_of({CLASS: ENTRY, FP32_CLASS: FA1_ENTRY}))
    chosen = planned(PROBLEM, kernel="fa2_mma")
    assert chosen.variant == ENTRY.variant(PROBLEM, H200)
    assert chosen.reason == "forced kernel, tuned on 2026-11-21 (user's table)"
    assert planned(FP32_PROBLEM, kernel="fa1_fp32").variant.bn == 32
    chosen = planned(FP32_PROBLEM, kernel="fa2_fp32")
    assert chosen == plan_tiles(FP32_PROBLEM, H200, "fa2_fp32")
    # Unforced, the table may choose between kernels, too.
    assert planned(FP32_PROBLEM).variant == FA1_ENTRY.variant(FP32_PROBLEM, H200)
    usual = plan_tiles(PROBLEM, H200).variant
    chosen = plan_tiles(PROBLEM, H200, usual, table_of({CLASS: ENTRY}))
    assert (chosen.variant, chosen.reason) == (usual, "forced variant")


ILLEGAL = {
    "too large": ENTRY._replace(shape=TileShape(256, 256, 2, 4, 1)),
    "odd": ENTRY._replace(shape=TileShape(63, 32, 2, 4, 3)),
    "zero": ENTRY._replace(shape=TileShape(0, 0, 0, 0, 0)),
    "unknown": ENTRY._replace(kernel="fa9"),
    "of another type": FA1_ENTRY,
    "of decode": ENTRY._replace(kernel="decode"),
}


@pytest.mark.parametrize("case", sorted(ILLEGAL))
def test_illegal_entries_are_passed_over(case: str) -> None:
    write_user(table_of({CLASS: ILLEGAL[case]}))
    assert planned() == plan_tiles(PROBLEM, H200)


@pytest.mark.parametrize(
    "gpu",
    [H200._replace(compiles_sm90a=False), *map(device.named, ("a100", "rtx3090", "b200"))],
    ids=["an old compiler", "a100", "rtx3090", "b200"],
)
def test_an_entry_of_a_kernel_that_is_not_for_this_gpu_is_passed_over(gpu: Device) -> None:
    entry = Entry("fa3_wgmma", TileShape(128, 128, 2, 12, 1, True))
    assert plan_tiles(PROBLEM, H200, table=table_of({CLASS: entry})).variant.kernel == entry.kernel
    table = table_of({problem_class(PROBLEM, gpu): entry})
    for kernel in (None, "fa2_mma"):
        assert plan_tiles(PROBLEM, gpu, kernel, table) == plan_tiles(PROBLEM, gpu, kernel)


def test_more_blocks_than_a_grid_has() -> None:
    """Where the rules' larger tile is within the limit."""
    write_user(table_of({CLASS: ENTRY}))
    problem = PROBLEM._replace(batch=2**16, heads_q=2**10, heads_kv=1, seq_q=31 * 128)
    assert plan_tiles(problem, H200).variant.bm > ENTRY.shape.bm
    assert planned(problem) == plan_tiles(problem, H200)


# --- switching off, and files that are ignored ---


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("", True), ("no", True)])
def test_switch(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    write_user(table_of({CLASS: ENTRY}))
    monkeypatch.setenv("CUFA_TUNED", value)
    assert ("user's table" in planned().reason) == on


def test_a_switched_off_table_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.write(tuned.user_path(H200), b"damaged")
    monkeypatch.setenv("CUFA_TUNED", "0")
    assert "default" in planned().reason


def test_tables_are_read_once() -> None:
    write_user(table_of({CLASS: ENTRY}))
    before = planned()
    tuned.user_path(H200).unlink()
    assert planned() == before
    tuned.forget()
    assert planned() == plan_tiles(PROBLEM, H200)


GOOD: dict[str, Any] = json.loads(dump(table_of({CLASS: ENTRY})))
ROW: dict[str, Any] = GOOD["entries"][0]


def without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


#: The content of the file, and the text of the warning.
DAMAGED: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "empty": (b"", "Expecting value"),
    "cut off": (json.dumps(GOOD).encode()[:-5], "line 1"),
    "no text": (b"\xff\xfe", "decode"),
    "deep": (b"[" * 100_000, ""),
    "list": (b"[]", "no table"),
    "older": ({**GOOD, "version": 1}, "version is 1, not 2"),
    "newer": ({**GOOD, "version": 3}, "version is 3, not 2"),
    "no version": (without(GOOD, "version"), "version is None"),
    "no entries": (without(GOOD, "entries"), "entries is None"),
    "no date": (without(GOOD, "date"), "date is None"),
    "entries of another kind": ({**GOOD, "entries": {}}, "entries is {}"),
    "an entry of another kind": ({**GOOD, "entries": [3]}, "an entry is 3"),
    "text for a number": ({**GOOD, "entries": [{**ROW, "bm": "64"}]}, "bm is '64'"),
    "fraction": ({**GOOD, "entries": [{**ROW, "bm": 64.0}]}, "bm is 64.0"),
    "bool for a number": ({**GOOD, "entries": [{**ROW, "waves": True}]}, "waves is True"),
    "number for a bool": ({**GOOD, "entries": [{**ROW, "ping_pong": 1}]}, "ping_pong is 1"),
    "no such score": ({**GOOD, "entries": [{**ROW, "score": ["Moon"]}]}, "score is ['Moon']"),
    "text for scores": ({**GOOD, "entries": [{**ROW, "score": "Causal"}]}, "score is 'Causal'"),
    "no kernel": ({**GOOD, "entries": [without(ROW, "kernel")]}, "kernel is None"),
    "of other kernels": ({**GOOD, "sources": "0" * 16}, "the kernels have changed"),
}


@pytest.mark.parametrize("case", sorted(DAMAGED))
def test_a_file_that_is_ignored_gives_one_warning(case: str) -> None:
    content, why = DAMAGED[case]
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    disk_cache.write(tuned.user_path(H200), data)
    with pytest.warns(RuntimeWarning) as caught:
        chosen, again = (planned() for _ in range(2))
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"{tuned.user_path(H200)} is ignored: ")
    assert why in message
    assert "python -m cufa tune" in message
    assert again == chosen == plan_tiles(PROBLEM, H200)


@pytest.mark.skipif(os.name == "nt", reason="has no modes")
def test_a_table_that_others_may_write_is_ignored_and_replaced() -> None:
    path = tuned.store(H200, {CLASS: ENTRY}, "a command")
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="others may write it") as caught:
        chosen = [planned() for _ in range(2)]
    assert len(caught) == 1
    assert chosen == [plan_tiles(PROBLEM, H200)] * 2
    tuned.store(H200, {FP32_CLASS: FA1_ENTRY}, "a command")
    table = tuned.load(path)
    assert table is not None
    assert table.entries == {FP32_CLASS: FA1_ENTRY}


@pytest.mark.parametrize("place", ["a file above", "a folder", "no home"])
def test_a_table_that_cannot_be_read_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    if place == "a folder":
        tuned.user_path(H200).mkdir(parents=True)
    elif place == "a file above":
        (tmp_path / "file").touch()
        monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file"))
    else:

        def folder() -> Path:
            raise OSError("no home")

        monkeypatch.setattr(disk_cache, "folder", folder)
    assert planned() == plan_tiles(PROBLEM, H200)
    with pytest.raises(OSError):  # noqa: PT011 - the system's own words
        tuned.store(H200, {CLASS: ENTRY}, "a command")


def test_planning_with_tables_imports_no_cupy() -> None:
    write_user(table_of({CLASS: ENTRY}))
    code = (
        "import sys\n"
        "from cufa import device\nfrom cufa.planner.plan import plan_tiles\n"
        "from cufa.tuned import user_table\n"
        "from cufa.features.causal import Causal\n"
        "from cufa.problem.problem import Problem\n"
        "gpu = device.named('h200')\n"
        f"chosen = plan_tiles({PROBLEM!r}, gpu, table=user_table(gpu))\n"
        'assert "user\'s table" in chosen.reason, chosen\n'
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
