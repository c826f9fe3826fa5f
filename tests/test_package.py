"""The wheel holds what a user needs, and importing the package does no work."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

import cufa
from cufa.specs import ATTENTION_KERNELS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cufa"
SETUPTOOLS_OF_LICENSE_FILES = 77  # as in pyproject.toml


def files_of(folder: Path) -> set[str]:
    """Files below a folder, counted from its parent, without what Python makes of them."""
    return {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def has_setuptools() -> bool:
    if importlib.util.find_spec("setuptools") is None:
        return False
    return int(metadata.version("setuptools").split(".")[0]) >= SETUPTOOLS_OF_LICENSE_FILES


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because setuptools writes next to what it builds."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(PACKAGE, copy / "cufa", ignore=shutil.ignore_patterns("__pycache__"))
    outdir = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(outdir), str(copy)]
    if has_setuptools():
        command.append("--no-isolation")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = outdir.iterdir()
    return built


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    expected = files_of(PACKAGE)
    for suffix in (".py", ".cu", ".cuh", ".csv"):
        assert any(name.endswith(suffix) for name in expected), suffix
    assert "cufa/py.typed" in expected
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {n for n in names if ".dist-info/" not in n} == expected
        for name in expected:
            assert archive.read(name) == (ROOT / name).read_bytes(), name
        (license_name,) = (n for n in names if n.endswith("/LICENSE"))
        assert archive.read(license_name) == (ROOT / "LICENSE").read_bytes()


def test_wheel_is_small_and_for_every_machine(wheel: Path) -> None:
    assert wheel.stat().st_size < 680_000
    assert wheel.name.endswith("-py3-none-any.whl")


def test_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)([^;\n]*)$", text, re.MULTILINE)
    assert sorted(name for name, _ in required) == ["ml_dtypes", "numpy"]
    for cuda in ("12", "13"):
        pattern = rf"^Requires-Dist: cupy-cuda{cuda}x\[ctk\]>=14.2; extra == .cuda{cuda}.$"
        assert re.search(pattern, text, re.MULTILINE), cuda
    assert re.search(r"^Requires-Python: >=3.10$", text, re.MULTILINE)
    assert re.search(r"^License-Expression: MIT$", text, re.MULTILINE)


def test_wheel_has_the_version_of_the_package(wheel: Path) -> None:
    assert wheel.name.startswith(f"cufa-{cufa.__version__}-")


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_import_imports_neither_cupy_nor_what_few_functions_need() -> None:
    run_python(
        "import sys, cufa\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = loaded & {'cupy', 'matplotlib', 'rich', 'concurrent', 'argparse'}\n"
        "assert not heavy, heavy\n"
    )


def test_numpy_arrays_need_no_cupy() -> None:
    run_python(
        "import sys\n"
        "sys.modules['cupy'] = None  # importing it fails from here on\n"
        "import numpy as np, cufa\n"
        "x = np.ones((3, 8), np.float32)\n"
        "assert (cufa.attention(x, x, x) == 1).all()\n"
        "str(cufa.explain(x, x, x))\n"
    )


@pytest.mark.parametrize("folder", ["cufa", "scripts"])
def test_nobody_is_told_to_install_a_name_that_is_not_published(folder: str) -> None:
    files = [f for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".sh")]
    assert files
    found = [f.name for f in files if re.search(r"\bcufa\[", f.read_text(encoding="utf-8"))]
    assert found == []


def test_public_names() -> None:
    assert cufa.__doc__
    assert sorted(cufa.__all__) == [
        *(
            "BlockMask",
            "CacheFullError",
            "CompileError",
            "Exploration",
            "KVCache",
            "PagedKVCache",
            "Problem",
            "Quantized",
        ),
        *("Rotary", "Variant"),
        *("attention", "attention_backward", "attention_varlen", "attention_varlen_backward"),
        *("decode", "dropout_mask"),
        *("explain", "explain_backward", "explain_varlen", "explore", "merge"),
        *("quantize", "quantize_qkv"),
    ]
    for name in cufa.__all__:
        assert getattr(cufa, name).__doc__, name


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_the_guide_says_how_far_a_nan_of_v_reaches(kernel: str) -> None:
    assert "docs/guide/numerics.md" in (cufa.attention.__doc__ or "")
    page = (ROOT / "docs" / "guide" / "numerics.md").read_text(encoding="utf-8")
    about = [p for p in page.split("\n\n") if "infinity or NaN in v" in " ".join(p.split())]
    assert f"`{kernel}`" in "".join(about)


ROOMS = [
    {"warned"},
    {"device", "dtypes", "arrays", "disk_cache", "optional", "remembered"},
    {"checks"},
    {"features"},
    {"specs", "quantized"},
    {"problem"},
    {"cpu", "planner"},
    {"compiler"},
    {"tuned"},
    {"launch"},
    {"api"},
    {"caches"},
    {"explorer"},
    {"cli"},
    {"__init__", "__main__"},
]
"""Each module or folder of the package imports from sets further up, and from its own file."""


def imports(path: Path) -> set[str]:
    """Return which modules and folders of the package a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "cufa":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cufa."):
            found.add((node.module or "").split(".")[1])
    return {name for name in found if not name.startswith("_")}


def test_rooms_import_in_one_direction() -> None:
    order = {name: i for i, names in enumerate(ROOMS) for name in names}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ("__init__", "kernels"):
            continue
        wrong = [name for name in imports(path) - {room} if order[name] >= order[room]]
        assert not wrong, f"{path} imports {wrong}"


def test_modules_import_in_no_circle() -> None:
    """Not in functions, and not for types alone."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        found = graph[module] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cufa":
                named = (f"{node.module}.{name.name}" for name in node.names)
                found |= {name if name in files else str(node.module) for name in named}
    assert len(graph) > 100
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


def test_files_of_kernels_are_short() -> None:
    """A reader of a kernel sees one purpose in a file; clang-format limits its columns."""
    lines = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in (PACKAGE / "kernels").glob("*.cu*")
    }
    assert len(lines) > 100
    assert not {name: count for name, count in lines.items() if count > 350}
