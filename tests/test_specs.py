"""specs/: one spec a kernel, which agrees with its source and has all that the others ask for."""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cufa import device
from cufa.compiler import source
from cufa.specs import (
    AUXILIARY_KERNELS,
    BACKWARD_KERNELS,
    FP8_KERNELS,
    KERNELS,
    default_kernel,
    quantize,
)
from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS as BACKWARD_PARAMS
from cufa.specs.kernel_spec import KernelSpec
from cufa.specs.params import PARAMS
from cufa.specs.structs import numbers_of
from cufa.specs.template_arguments import NUMBERS, SWITCHES
from cufa.specs.variant import Variant

PACKAGE = Path(source.__file__).parents[1]
H200 = device.named("h200")
NO_SM90A = H200._replace(compiles_sm90a=False)

ALL: dict[str, KernelSpec | AuxiliarySpec] = {
    **KERNELS,
    **BACKWARD_KERNELS,
    **FP8_KERNELS,
    **AUXILIARY_KERNELS,
}

#: Where kernels have names besides their specs: the package, some of whose functions have one.
BY_NAME = {"__init__.py"}


def strings(path: Path) -> Iterator[str]:
    """Yield the string literals of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    texts = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_nothing_else_asks_for_a_kernel_by_name(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    if relative.parent.name != "specs" and str(relative) not in BY_NAME:
        assert set(KERNELS).isdisjoint(strings(path))


def test_every_kernel_has_its_spec() -> None:
    """A file of the same stem each, and in its order of preference."""
    sources = {path.stem for path in (PACKAGE / "kernels").glob("*.cu")}
    assert sources == set(ALL)
    for name, spec in ALL.items():
        assert spec.name == name
        assert importlib.import_module(f"cufa.specs.{name}").SPEC is spec


def text_of(name: str) -> str:
    return (PACKAGE / "kernels" / f"{name}.cu").read_text()


def template_of(name: str) -> list[str]:
    """Return the kinds and names of a kernel's template parameters."""
    (found,) = re.findall(rf"template <([^>]*)>\s*__global__[^{{;]*\b{name}\(", text_of(name))
    return [" ".join(each.split()) for each in found.split(",")]


@pytest.mark.parametrize("name", KERNELS)
def test_spec_agrees_with_the_source(name: str) -> None:
    spec, text = KERNELS[name], text_of(name)
    switches = {f"bool {argument.upper()}" for argument in SWITCHES}
    kinds = [f"int {argument.upper()}" for argument in spec.arguments]
    kinds = [
        kind.replace("int", "bool") if kind.replace("int", "bool") in switches else kind
        for kind in kinds
    ]
    schedule = ["class SCHEDULE"] * bool(spec.schedules)
    assert template_of(name) == ["class T", *kinds, *schedule, "class SCORE", "class KV"]
    assert set(spec.arguments) <= set(Variant._fields)
    assert ("const __grid_constant__ TmaArguments" in text) == spec.tma
    decodes = "Decode" if spec.kv_dtype is None else "Scaled"
    assert (f"const __grid_constant__ {decodes}Arguments" in text) == spec.decodes
    assert ("registers_decrease" in text) == (spec.launch_registers is not None)


@pytest.mark.parametrize("name", BACKWARD_KERNELS)
def test_backward_spec_agrees_with_the_source(name: str) -> None:
    kinds = [f"int {argument.upper()}" for argument in NUMBERS]
    assert template_of(name) == ["class T", *kinds, "class SCORE", "class KV"]


@pytest.mark.parametrize("name", FP8_KERNELS)
def test_fp8_spec_agrees_with_the_source(name: str) -> None:
    names = [each.split()[-1].lower() for each in template_of(name)]
    assert names == ["out", *FP8_KERNELS[name].arguments, "score", "kv"]


def test_schedules_are_structs_of_the_source() -> None:
    for name, spec in KERNELS.items():
        assert bool(spec.schedules) == (spec.schedule is not None)
        for schedule in spec.schedules:
            assert f"struct {schedule} " in source.text(name)


@pytest.mark.parametrize("name", AUXILIARY_KERNELS)
def test_auxiliary_spec_agrees_with_the_source(name: str) -> None:
    spec, text = AUXILIARY_KERNELS[name], source.text(name)
    (bound,) = re.findall(r"__launch_bounds__\(([\w *]*)", text)
    given = {"THREADS": spec.threads}  # by a launch of block_lists
    assert product_of(bound, text, given) == spec.threads
    if spec.params is not BACKWARD_PARAMS:
        assert members_of(text) == list(spec.params.names or ())


def product_of(factors: str, text: str, given: dict[str, int]) -> int:
    """Return the product of constants of a source, template arguments and numbers."""
    known = given | {name: int(n) for name, n in re.findall(r"constexpr int (\w+) = (\d+);", text)}
    return math.prod(known[f] if f in known else int(f) for f in factors.split(" * "))


def test_threads_of_quantize_agree_with_the_source() -> None:
    text = source.text("quantize")
    assert "__launch_bounds__(THREADS, BLOCKS)" in text
    (threads,) = re.findall(r"THREADS = ([^,;]*);", text)
    assert product_of(threads, text, {}) == quantize.SPEC.threads


def members_of(text: str) -> list[str]:
    """Return the members of the struct of parameters."""
    found = re.findall(r"^struct \w+Params(?: : Params)? {(.*?)^};", text, re.MULTILINE | re.DOTALL)
    (body,) = found
    declared = re.sub(r"//.*|\[\w+\]|^ +__device__.*$|[*]|const", "", body, flags=re.MULTILINE)
    return [
        member.split()[-1]
        for declaration in declared.split(";")
        if declaration.strip()
        for member in declaration.split(",")
    ]


def test_backward_params_agree_with_the_source() -> None:
    text = (PACKAGE / "kernels" / "bwd_params.cuh").read_text()
    assert [*(PARAMS.names or ()), *members_of(text)] == list(BACKWARD_PARAMS.names or ())
    *_, (_, offset, last) = numbers_of(BACKWARD_PARAMS)
    assert offset + last.itemsize == BACKWARD_PARAMS.itemsize, "C++ would use the padding"


@pytest.mark.parametrize("name", KERNELS)
def test_shared_memory_is_the_sum_of_what_it_holds(name: str) -> None:
    bm, warps = (64, 8) if KERNELS[name].archs else (16, 2)
    dtype = KERNELS[name].dtypes[-1]
    variant = Variant(name, dtype, 64, 64, bm, 32, 1, warps, 1)
    parts = KERNELS[name].shared_memory(variant)
    assert min(parts.values()) >= 0
    assert variant.smem_bytes == sum(parts.values())
    assert any("Q" in part for part in parts)
    assert any("V" in part for part in parts)


@pytest.mark.parametrize(
    ("dtype", "gpu", "keys", "name"),
    [
        ("bfloat16", H200, True, "fa3_wgmma"),
        ("float16", H200, True, "fa3_wgmma"),
        ("bfloat16", H200, False, "fa2_mma"),
        ("bfloat16", NO_SM90A, True, "fa2_mma"),
        ("float16", device.named("a100"), True, "fa2_mma"),
        ("float16", device.named("b200"), True, "fa2_mma"),
        ("float32", H200, True, "fa2_fp32"),
        ("float32", device.named("rtx4090"), False, "fa2_fp32"),
    ],
)
def test_default(dtype: str, gpu: device.Device, keys: bool, name: str) -> None:
    assert default_kernel(dtype, gpu, keys).name == name


def test_registers_at_launch() -> None:
    """What __launch_bounds__ leaves to a thread: only kernels that move registers count on it."""
    kernel = KERNELS["fa3_wgmma"]
    assert kernel.launch_registers is not None
    for warps, blocks, registers in ((16, 1, 128), (12, 1, 168), (8, 2, 128), (8, 3, 80)):
        variant = Variant("fa3_wgmma", "float16", 64, 64, 64, 64, 2, warps, blocks)
        assert kernel.launch_registers(variant) == registers
    assert {k.name for k in KERNELS.values() if k.launch_registers} == {"fa3_wgmma"}
