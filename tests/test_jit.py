"""jit.py: the bundled source, and every variant compiled for every architecture without a GPU."""

from __future__ import annotations

import pickle
import re
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cufa
from cufa import device, jit, plan
from cufa.device import Device
from cufa.tiles import all_head_dims
from cufa.variant import KERNEL_DTYPES, Variant

KERNELS = Path(cufa.__file__).parent / "kernels"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
H200 = device.named("h200")

SMALL = Variant("fa2_mma", "float16", 32, 32, 64, 16, 1, 4, 1, False)
#: Passes for a variant, but its source asserts that tiles are not prefetched.
BROKEN = Variant("fa1_fp32", "float32", 32, 32, 64, 64, 2, 8, 1, False)

kernels = pytest.mark.parametrize("kernel", sorted(KERNEL_DTYPES))


# --- every variant that a plan can choose, on every architecture ---

ENTRIES = [
    (arch, kernel, head_dims)
    for arch in ARCHS
    for kernel in KERNEL_DTYPES
    for head_dims in all_head_dims(kernel, device.of_arch(arch))
]


@pytest.mark.parametrize(
    ("arch", "kernel", "head_dims"), ENTRIES, ids=lambda x: str(x).replace(", ", "-")
)
def test_compiles_without_spills(arch: str, kernel: str, head_dims: tuple[int, int]) -> None:
    gpu = device.of_arch(arch)
    variants = [
        v
        for v in plan.all_variants(gpu)
        if v.kernel == kernel and (v.head_dim, v.head_dim_v) == head_dims
    ]
    assert variants
    for variant in variants:
        compiled = jit.compile(variant, gpu.arch)
        assert compiled.spill_bytes == 0, variant
        assert compiled.stack_bytes == 0, variant
        assert compiled.dynamic_smem_bytes == variant.smem_bytes
        smem_bytes = compiled.static_smem_bytes + compiled.dynamic_smem_bytes
        assert smem_bytes <= gpu.smem_per_block, variant
        assert 0 < compiled.registers * variant.threads * variant.blocks_per_sm <= 65536, variant
        # Whatever the compiler warns of (serialised wgmma: C75xx) costs speed or worse.
        assert "warning" not in compiled.log.lower(), compiled.log
        assert not re.search(r"\bC75\d\d\b", compiled.log), compiled.log


def test_entries_hold_every_variant() -> None:
    for arch in ARCHS:
        gpu = device.of_arch(arch)
        held = {(kernel, dims) for a, kernel, dims in ENTRIES if a == arch}
        chosen = {(v.kernel, (v.head_dim, v.head_dim_v)) for v in plan.all_variants(gpu)}
        assert held == chosen


# --- what compile returns ---


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_cubin_is_whole(arch: str) -> None:
    """An ELF file ends with its table of sections, or of segments; CuPy drops a last byte of 0."""
    cubin = jit.compile(SMALL, arch).cubin
    assert cubin[:5] == b"\x7fELF\x02"
    segments, sections = struct.unpack_from("<QQ", cubin, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<4H", cubin, 54)
    ends = (segments + segment_size * segment_count, sections + section_size * section_count)
    assert len(cubin) == max(ends)
    assert SMALL.kernel.encode() in cubin


def test_what_the_log_says() -> None:
    compiled = jit.compile(SMALL, "sm_90a")
    assert f"Used {compiled.registers} registers" in compiled.log
    assert "sm_90a" in compiled.log
    assert 16 <= compiled.registers <= 255


def test_spills_are_seen() -> None:
    """32 rows a warp of 256 columns need more registers than there are."""
    crowded = Variant("fa2_mma", "float16", 256, 256, 128, 32, 1, 4, 1, False)
    assert crowded.illegal(H200) is None
    compiled = jit.compile(crowded, "sm_90a")
    assert compiled.registers == 255
    assert compiled.spill_bytes > 0


def test_compile_error() -> None:
    with pytest.raises(cufa.CompileError) as info:
        jit.compile(BROKEN, "sm_86")
    error = info.value
    assert error.variant == BROKEN
    assert "-arch=sm_86" in error.options
    assert "tiles are not prefetched" in error.log
    # The message points at the line of the real file.
    lines = (KERNELS / "fa1_fp32.cu").read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if "tiles are not prefetched" in line)
    assert f"fa1_fp32.cu({number}): error" in error.log
    for part in (str(BROKEN), "-arch=sm_86", error.log):
        assert part in str(error)


def test_compile_error_can_be_pickled() -> None:
    error = cufa.CompileError(BROKEN, ("-std=c++17", "-arch=sm_86"), "a log\nof two lines")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cufa.CompileError
    assert isinstance(copy, RuntimeError)
    assert (copy.variant, copy.options, copy.log) == (error.variant, error.options, error.log)
    assert str(copy) == str(error)


def test_unknown_architecture() -> None:
    with pytest.raises(cufa.CompileError, match="sm_1"):
        jit.compile(SMALL, "sm_1")


# --- the bundled source ---

#: What lines begin with that the bundle has no use for.
REPLACED = ("#include", "#pragma once")


@kernels
def test_every_line_is_where_line_directives_say(kernel: str) -> None:
    files: dict[str, list[str]] = {}
    name, number, seen = "", 0, set()
    for line in jit.source(kernel).splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            number, name = int(directive[1]), directive[2]
            continue
        if name not in files:
            files[name] = (KERNELS / name).read_text().splitlines()
        if number > len(files[name]):  # the end of the last line, before the next directive
            assert line == ""
            continue
        original = files[name][number - 1]
        if original.startswith(REPLACED):
            assert line == ""
        else:
            assert line == original
            seen.add((name, number))
        number += 1
    assert f"{kernel}.cu" in files
    for name, lines in files.items():
        expected = {i for i, line in enumerate(lines, 1) if not line.startswith(REPLACED)}
        assert {number for file, number in seen if file == name} == expected, name


@kernels
def test_every_include_is_replaced_once(kernel: str) -> None:
    source = jit.source(kernel)
    assert "#include" not in source
    assert "#pragma once" not in source
    starts = re.findall(r'^#line 1 "(.+)"$', source, re.MULTILINE)
    assert len(set(starts)) == len(starts)
    assert starts[0] == f"{kernel}.cu"
    texts = [(KERNELS / name).read_text() for name in starts]
    included = {h for text in texts for h in re.findall(r'^#include "(.+)"$', text, re.MULTILINE)}
    assert set(starts[1:]) == included


def test_every_file_is_used() -> None:
    sources = {path.stem for path in KERNELS.glob("*.cu")}
    assert sources == set(KERNEL_DTYPES)
    bundled = "\n".join(jit.source(kernel) for kernel in KERNEL_DTYPES)
    for header in KERNELS.glob("*.cuh"):
        assert f'#line 1 "{header.name}"' in bundled, f"{header.name} is included by no kernel"


@kernels
def test_one_kernel_a_file(kernel: str) -> None:
    assert jit.source(kernel).count("__global__") == 1
    assert re.search(rf"__global__ [^;{{]*\b{kernel}\(", jit.source(kernel))


@kernels
def test_an_edited_header_changes_the_text(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's cache on disk goes by the text: an edit anywhere must show there."""
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy)
    monkeypatch.setattr(jit.resources, "files", lambda package: copy)
    bundle = jit.source.__wrapped__
    before = bundle(kernel)
    assert before == jit.source(kernel)
    for name in re.findall(r'^#line 1 "(.+)"$', before, re.MULTILINE):
        original = (copy / name).read_text()
        (copy / name).write_text(original + "// edited\n")
        assert bundle(kernel) != before, name
        (copy / name).write_text(original)
    assert bundle(kernel) == before


def test_unknown_kernel() -> None:
    with pytest.raises(FileNotFoundError):
        jit.source("fa9")


# --- compiling for the current device, with CuPy's part replaced ---


class _RawModule:
    """Stands for `cupy.RawModule`: it notes what it is asked for."""

    made: list[_RawModule] = []  # noqa: RUF012
    failure: Exception | None = None

    def __init__(
        self, *, code: str, options: tuple[str, ...], name_expressions: tuple[str, ...]
    ) -> None:
        self.code, self.options, self.names = code, options, name_expressions
        self.made.append(self)

    def compile(self) -> None:
        if self.failure is not None:
            raise self.failure

    def get_function(self, name: str) -> Any:
        assert (name,) == self.names
        return _Function(name)


class _Function:
    """Stands for `cupy.RawKernel`."""

    max_dynamic_shared_size_bytes = 0

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def kernel(self) -> Any:
        return self


@pytest.fixture
def raw_module(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_RawModule]]:
    monkeypatch.setattr(cupy, "RawModule", _RawModule)
    monkeypatch.setattr(_RawModule, "made", [])
    jit._module.cache_clear()
    jit._kernel.cache_clear()
    yield _RawModule
    jit._module.cache_clear()
    jit._kernel.cache_clear()


@pytest.mark.parametrize("gpu", [device.of_arch(arch) for arch in ARCHS], ids=lambda gpu: gpu.arch)
def test_options_are_the_same_for_all_variants(raw_module: type[_RawModule], gpu: Device) -> None:
    variants = plan.all_variants(gpu)
    for variant in variants:
        jit.kernel(variant, gpu, 0)
    assert [m.names for m in raw_module.made] == [(v.name_expression,) for v in variants]
    assert [m.code for m in raw_module.made] == [jit.source(v.kernel) for v in variants]
    (options,) = {m.options for m in raw_module.made}
    # CuPy adds the plain architecture itself.
    arch = [option for option in options if "arch" in option]
    assert arch == (["-arch=sm_90a"] if gpu.arch == "sm_90a" else [])


def test_nvrtc_that_takes_one_architecture_only(
    cupy: Any, raw_module: type[_RawModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (12, 3))
    jit.kernel(SMALL, H200, 0)
    assert raw_module.made[0].options == ("-std=c++17",)


def test_kernels_are_compiled_once_and_made_ready_on_each_device(
    raw_module: type[_RawModule],
) -> None:
    first = jit.kernel(SMALL, H200, 0)
    assert first.max_dynamic_shared_size_bytes == SMALL.smem_bytes
    assert jit.kernel(SMALL, H200, 0) is first
    other = jit.kernel(SMALL, H200, 1)
    assert other is not first
    assert other.max_dynamic_shared_size_bytes == SMALL.smem_bytes
    assert len(raw_module.made) == 1
    jit.kernel(SMALL._replace(causal=True), H200, 0)
    jit.kernel(SMALL, device.named("a100"), 2)
    assert len(raw_module.made) == 3


def test_first_calls_at_once_compile_once(raw_module: type[_RawModule]) -> None:
    barrier = threading.Barrier(8)
    found = []

    def call() -> None:
        barrier.wait()
        found.append(jit.kernel(SMALL, H200, 0))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(raw_module.made) == 1


def test_compile_error_of_a_call(
    cupy: Any, raw_module: type[_RawModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = cupy.cuda.compiler.CompileException(
        "error: no", jit.source("fa2_mma"), "x.cu", ("-x",), "nvrtc"
    )
    monkeypatch.setattr(raw_module, "failure", failure)
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(cufa.CompileError) as info:
            jit.kernel(SMALL, H200, 0)
        assert info.value.variant == SMALL
        assert info.value.options == ("-std=c++17", "-arch=sm_90a")
        assert "error: no" in info.value.log
        assert info.value.__cause__ is failure
    monkeypatch.setattr(raw_module, "failure", None)
    assert jit.kernel(SMALL, H200, 0).name == SMALL.name_expression
