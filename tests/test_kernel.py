"""kernel.py: one descriptor a kernel, which the rest of the package looks things up in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cufa import device
from cufa.compiler import source
from cufa.instance import BESIDE_ATTENTION
from cufa.kernel import KERNELS, default_kernel
from cufa.variant import Variant

PACKAGE = Path(source.__file__).parents[1]
H200 = device.named("h200")
NO_SM90A = H200._replace(compiles_sm90a=False)

#: Where kernels have names: their descriptors, their tiles, and the spaces that are explored; and
#: the package, one of whose functions has a kernel's name.
BY_NAME = {
    *("kernel.py", "explorer/space.py"),
    *("planner/tiles.py", "planner/hopper_costs.py"),
    *("planner/decode_variants.py", "planner/decode_whole.py"),
    "__init__.py",
}


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
    names = set() if str(path.relative_to(PACKAGE)) in BY_NAME else set(KERNELS)
    assert names.isdisjoint(strings(path))


def test_every_kernel_has_its_file_and_every_file_its_kernel() -> None:
    assert {path.stem for path in (PACKAGE / "kernels").glob("*.cu")} == {
        *KERNELS,
        *BESIDE_ATTENTION,
    }
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        text = (PACKAGE / "kernels" / f"{name}.cu").read_text()
        assert ("const __grid_constant__ TmaArguments" in text) == kernel.tma
        assert ("registers_decrease" in text) == (kernel.launch_registers is not None)


def test_template_arguments_are_those_of_the_source() -> None:
    for name, kernel in KERNELS.items():
        text = (PACKAGE / "kernels" / f"{name}.cu").read_text()
        (parameters,) = re.findall(
            rf"template <class T, ([^>]*)>\s*__global__[^{{;]*\b{name}\(", text
        )
        words = [each.split()[-1].lower() for each in parameters.split(",")]
        assert words == [*kernel.arguments, "score", "kv"]
        assert set(kernel.arguments) <= set(Variant._fields)


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
