"""README and docs quote the result files, their examples run, and the files they name exist."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.summary import summarise

import cufa
from cufa import cli
from cufa import device as devices
from cufa.specs import KERNELS, default_kernel
from cufa.specs.variant import Variant

ROOT = Path(__file__).resolve().parents[1]

PEERS = {
    "PyTorch SDPA, cuDNN": "cudnn",
    "PyTorch SDPA, FlashAttention-2": "fa2",
    "FlashAttention-3": "flash_attn_3_cache",
    "PyTorch SDPA, efficient, TF32 off": "efficient",
    "plain CuPy": "cupy",
}


FOLDERS = ("docs/guide", "docs/design")
BOOK = (
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).glob("*.md")),
    "docs/performance.md",
)
PAGES = (*BOOK, "CONTRIBUTING.md", "docs/exploring.md", "docs/benchmarks/README.md")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
EXPLORING = TEXTS["docs/exploring.md"]
TEXT = "\n".join(TEXTS[page] for page in BOOK)


def table() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the result file, the dtype, and the cells behind them, of each row of ratios."""
    name = dtype = ""
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or cells[1].split(" (")[0] not in PEERS:
            continue
        if cells[0]:
            link = re.search(r"\((?:docs/)?benchmarks/([\w-]+)\.md\)", cells[0])
            found = re.search(r"bfloat16|float16|float32", cells[0])
            assert link, line
            assert found, line
            name, dtype = f"{link[1]}.json", found[0]
        yield name, dtype, cells[1:]


def result(bench: str) -> list[dict[str, Any]]:
    """Return the rows of a result file."""
    rows: list[dict[str, Any]] = json.loads(
        (ROOT / f"docs/benchmarks/h200-{bench}.json").read_text(encoding="utf-8")
    )["rows"]
    return rows


def test_there_are_such_rows() -> None:
    assert len(list(table())) >= 23


@pytest.mark.parametrize(("name", "dtype", "cells"), list(table()))
def test_row(name: str, dtype: str, cells: list[str]) -> None:
    rows = [
        row
        for row in result(Path(name).stem.removeprefix("h200-"))
        if not row.get("page_size") and row.get("mode", "exact") == "exact"
    ]
    peer, number, *ratios = cells
    found = summarise([row for row in rows if row["dtype"] == dtype])[PEERS[peer.split(" (")[0]]]
    assert number == str(found.cells)
    for said, ratio in zip(ratios, (found.geomean, found.minimum), strict=True):
        decimals = len(said.partition(".")[2])
        assert said == f"{ratio:.{decimals}f}"


def test_tokens_a_second() -> None:
    row, _ = result("generate")
    assert (row["model"], row["batch"]) == ("Llama-3.1-8B", 1)
    cufa, bound, other = (row["cufa"], row["bound"], row["peers"]["transformers"])
    said = f"{cufa:.0f} tokens a second for one sequence, {cufa / bound:.0%} of what reading the"
    assert said in " ".join(TEXT.split())
    assert f"transformers with SDPA generates {other:.0f}" in " ".join(TEXT.split())


def line_with(text: str) -> str:
    """Return the one line of the page about performance with this text."""
    (found,) = (line for line in TEXTS["docs/performance.md"].splitlines() if text in line)
    return found


def test_host_cost() -> None:
    (row,) = (row for row in result("host") if row["case"] == "same")
    said = re.findall(r"([\d.]+) us", line_with("h200-host.md"))
    figures = (row["cufa"], row["peers"]["sdpa"], row["peers"]["floor"])
    assert said == [f"{figure:.1f}" for figure in figures]


@pytest.mark.parametrize(
    ("line", "case"),
    [
        ("with lengths that no call had before", "new_lengths"),
        ("on a cache that grows by a key a call", "growing_cache"),
        ("the same for `cufa.decode`", "decode"),
    ],
)
def test_host_cost_of_other_calls(line: str, case: str) -> None:
    (row,) = (row for row in result("host") if row["case"] == case)
    said = re.findall(r"([\d.]+) us", line_with(line))
    assert said == [f"{figure:.1f}" for figure in (row["cufa"], row["peers"]["sdpa"])]


@pytest.mark.parametrize(
    ("line", "variant", "key"),
    [
        ("h200-jit.md", "bfloat16 .* auto", "cold_s"),
        ("the same, `fa2_mma` or `fa2_fp32`", ".* fa2_mma|float32 .* auto", "cold_s"),
        ("the same, from CuPy's disk cache", ".*", "warm_s"),
    ],
)
def test_first_call(line: str, variant: str, key: str) -> None:
    seconds = [row[key] for row in result("jit") if re.fullmatch(variant, row["variant"])]
    range_ = dict.fromkeys((f"{min(seconds):.2f}", f"{max(seconds):.2f}"))
    assert f"| {' to '.join(range_)} s |" in line_with(line)


LEAD = re.findall(
    r"- \*\*([\d.]+) times\*\* as fast as (.*), in (\w+) \(\[(\d+) cells\]\((.*)\)\)", README
)
NAMES = {"cuDNN": "cudnn", "FlashAttention-2": "fa2", "the memory-efficient backend": "efficient"}


def test_the_three_ratios_that_lead() -> None:
    assert len(LEAD) == 3
    for said, peer, dtype, cells, page in LEAD:
        rows = result(Path(page).stem.removeprefix("h200-"))
        assert {row["dtype"] for row in rows} == {dtype}
        found = summarise(rows)[NAMES[peer]]
        assert (said, cells) == (f"{found.geomean:.2f}", str(found.cells))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page: str) -> None:
    """Paths in backticks that begin with a folder of the project, and links."""
    text = TEXTS[page]
    named = re.findall(r"`((?:cufa|docs|scripts|tests)/[\w./-]*)`", text)
    for path in named:
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 180
    assert "(docs/index.md)" in README


CALLS: tuple[Callable[..., Any], ...] = (cufa.attention, cufa.attention_varlen, cufa.decode)


def test_the_support_matrix_is_that_of_the_signatures() -> None:
    """A call has an argument that a row names, unless its cell says TypeError."""
    known = {name for call in CALLS for name in inspect.signature(call).parameters}
    _, matrix = README.split("| `decode`, caches |")
    checked = 0
    for line in matrix.partition("\n\n")[0].splitlines()[2:]:
        feature, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        named = set(re.findall(r"`(\w+)", feature.replace("cufa.BlockMask", "block_mask"))) & known
        for call, cell in zip(CALLS, cells[:3], strict=True):
            own = set(re.findall(r"`(\w+)", cell)) & known
            given = set(inspect.signature(call).parameters)
            assert own <= given, line
            if '"' not in feature:  # of a value, and not of the argument
                assert (named & given) == (set() if cell == "TypeError" else named), line
            checked += len(named | own)
    assert checked > 50


@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "rtx4090", "h100", "b200", "rtx5090"])
def test_the_page_on_gpus_names_the_kernels_that_they_get(gpu: str) -> None:
    device = devices.named(gpu)
    capability = f"({device.compute_capability / 10:.1f})"
    (row,) = (line for line in TEXTS["docs/guide/gpus.md"].splitlines() if capability in line[:60])
    _, half, single, decode, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    assert half == f"`{default_kernel('bfloat16', device).name}`"
    assert single == f"`{default_kernel('float32', device).name}`"
    decoding = [spec.name for spec in KERNELS.values() if spec.decodes and spec.runs_on(device)]
    assert decode == ", ".join(f"`{name}`" for name in decoding)


def test_the_index_links_to_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = (page.removeprefix("docs/") for page in PAGES if page.startswith("docs/"))
    assert [page for page in pages if f"({page})" not in index] == []


def on_the_page(command: str) -> tuple[list[str], str]:
    """Return the words of docs/exploring.md's first such command, and what it prints there.

    `command` is a pattern that its line begins with.
    """
    block = rf"^\$ python -m cufa ({command} (?:.*\\\n)*.*)\n((?:.*\n)*?)```$"
    match = re.search(block, EXPLORING, re.MULTILINE)
    assert match
    return shlex.split(match[1]), match[2]


@pytest.mark.parametrize("command", ["explain", "explain .*--backward"])
def test_the_page_shows_what_explain_prints(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words, shown = on_the_page(command)
    assert cli.main(words) == 0
    assert capsys.readouterr().out == shown


def test_the_page_shows_the_shared_memory_that_variants_have() -> None:
    """The other figures are the compiler's, and differ with its version."""
    words, shown = on_the_page("inspect")
    variant = Variant.parse(words[1])
    assert f"shared memory  {variant.smem_bytes} bytes a block" in shown
    _, shown = on_the_page("explore")
    rows = [line.split() for line in shown.splitlines() if line.startswith("fa2_mma ")]
    assert len(rows) == 5
    for row in rows:
        bm, bn = map(int, row[2].split("x"))
        smem_bytes = variant._replace(bm=bm, bn=bn).smem_bytes
        assert row[8] == f"{smem_bytes / 1024:.1f}"


def test_every_room_is_on_the_map() -> None:
    package = ROOT / "cufa"
    rooms = {p.name for p in package.iterdir() if p.is_dir() and p.name != "__pycache__"}
    modules = {p.name for p in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    mapped = set(re.findall(r"`cufa/([\w.]+)/?`", TEXTS["docs/design/architecture.md"]))
    assert rooms | modules == mapped


def test_every_environment_variable_is_named() -> None:
    read = set()
    for path in (ROOT / "cufa").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text))
    assert read >= {"CUFA_CACHE_DIR", "CUFA_TUNED"}
    assert read == set(re.findall(r"^\| `([A-Z_]+)` \|", EXPLORING, re.MULTILINE))


CONSOLE = re.findall(r"```console\n\$ python (.*)\n([^`]*)```", TEXT)


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", TEXTS[page], re.DOTALL)


ON_EITHER = "import cupy as xp  # on a GPU"
TOUR = "import numpy as xp\nimport cufa\n"
"""The imports of the README's first snippet, which those of the tour go on from."""

SNIPPETS = [snippet for page in BOOK if page != "README.md" for snippet in snippets(page)]
SNIPPETS += [snippet for snippet in snippets("docs/exploring.md") if "cufa.Problem" in snippet]
ON_A_GPU = [snippet for snippet in SNIPPETS if snippet.startswith("import cupy")]
ON_THE_HOST = [snippet for snippet in SNIPPETS if snippet not in ON_A_GPU]
FRAMEWORKS = ("torch", "jax", "autograd")


def of_the_readme(module: str) -> list[str]:
    """Return the README's snippets, for arrays of NumPy or of CuPy."""
    first, *tour = snippets("README.md")
    assert first.startswith(ON_EITHER)
    found = [first.replace(ON_EITHER, "import numpy as xp  #"), *(TOUR + each for each in tour)]
    return [snippet.replace("import numpy as xp", f"import {module} as xp") for snippet in found]


def run(*command: str) -> str:
    """Return what Python writes to standard output, with scripts on the path."""
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("command", "output"), CONSOLE)
def test_commands_print_what_is_shown(command: str, output: str) -> None:
    assert run(*shlex.split(command)) == output


@pytest.mark.parametrize("snippet", of_the_readme("numpy"))
def test_the_readme_runs_on_numpy(snippet: str) -> None:
    assert run("-c", snippet).strip()


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", of_the_readme("cupy"))
def test_the_readme_runs_on_cupy(snippet: str) -> None:
    assert run("-c", snippet).strip()


@pytest.mark.parametrize("snippet", ON_THE_HOST)
def test_snippets_run(snippet: str) -> None:
    for name in FRAMEWORKS:
        if f"import {name}" in snippet and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    printed = run("-c", snippet).strip()
    assert printed
    assert "False" not in printed  # of a comparison


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", ON_A_GPU)
def test_snippets_run_on_a_gpu(snippet: str) -> None:
    assert run("-c", snippet).strip()


def test_there_are_commands_and_snippets() -> None:
    assert len(of_the_readme("numpy")) == 6
    assert (len(CONSOLE), len(ON_THE_HOST), len(ON_A_GPU)) == (2, 31, 1)


DOCTESTS = [name for name in cufa.__all__ if ">>> " in (getattr(cufa, name).__doc__ or "")]


@pytest.mark.parametrize("name", DOCTESTS)
def test_examples_of_docstrings_print_what_they_show(name: str) -> None:
    finder = doctest.DocTestFinder(recurse=True)
    runner = doctest.DocTestRunner(verbose=False)
    for each in finder.find(getattr(cufa, name), name, globs={}):
        runner.run(each)
    assert runner.tries > 0
    assert runner.failures == 0


def test_the_reference_has_every_public_name() -> None:
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs/reference").glob("*.rst")]
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(listed) == sorted(cufa.__all__)


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {cufa.__version__}\n" in citation
