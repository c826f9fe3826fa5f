"""jit.py: every variant compiled for every architecture without a GPU, and kernels made ready."""

from __future__ import annotations

import pickle
import re
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cufa
from cufa import device
from cufa.compiler import cache, elf, jit, source
from cufa.device import Device
from cufa.kernel import ELEMENT_BYTES, KERNELS
from cufa.launch import launch
from cufa.planner import plan, tuned
from cufa.planner.tiles import all_head_dims
from cufa.problem import Problem
from cufa.variant import Variant

SOURCES = Path(cufa.__file__).parent / "kernels"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
H200 = device.named("h200")

SMALL = Variant("fa2_mma", "float16", 32, 32, 64, 16, 1, 4, 1)
#: Passes for a variant, but its source asserts that tiles are not prefetched.
BROKEN = Variant("fa1_fp32", "float32", 32, 32, 64, 64, 2, 8, 1)

kernels = pytest.mark.parametrize("kernel", sorted(KERNELS))


# --- every variant that a plan can choose, on every architecture ---

ENTRIES = [
    (arch, kernel, head_dims)
    for arch in ARCHS
    for kernel in KERNELS
    if KERNELS[kernel].runs_on(device.of_arch(arch))
    for head_dims in all_head_dims(kernel, device.of_arch(arch))
]

#: What ptxas says when it puts wgmma instructions one after the other, or waits between them.
SERIALIZED = re.compile(r"\bC75\d\d\b|serializ", re.IGNORECASE)


def assert_lean(variant: Variant, gpu: Device) -> None:
    """Compile a variant, which must fit the GPU without anything that costs speed."""
    compiled = jit.compile(variant, gpu.arch)
    assert compiled.spill_bytes == 0, variant
    assert compiled.stack_bytes == 0, variant
    assert compiled.dynamic_smem_bytes == variant.smem_bytes
    smem_bytes = compiled.static_smem_bytes + compiled.dynamic_smem_bytes
    assert smem_bytes <= gpu.smem_per_block, variant
    assert 0 < compiled.registers * variant.threads * variant.blocks_per_sm <= 65536, variant
    # Whatever the compiler warns of costs speed or worse.
    assert "warning" not in compiled.log.lower(), compiled.log
    assert not SERIALIZED.search(compiled.log), compiled.log


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
        assert_lean(variant, gpu)


def builtin_entries() -> list[tuple[Device, Variant]]:
    """Return what the built-in tables choose beyond the rules, each once."""
    found: dict[tuple[Device, Variant], None] = {}
    for path in sorted((Path(cufa.__file__).parent / "tables").glob("*.json")):
        gpu, table = device.named(path.stem), tuned.load(path)
        assert table is not None, path
        for key, entry in table.entries.items():
            for dtype in KERNELS[entry.kernel].dtypes:
                if ELEMENT_BYTES[dtype] == key.element_bytes:
                    lengths = (key.seq_q, key.seq_kv, key.head_dim, key.head_dim_v)
                    problem = Problem(dtype, 1, 1, 1, *lengths, key.causal, 1.0)
                    found[gpu, entry.variant(problem, gpu)] = None
    return [(gpu, v) for gpu, v in found if v not in plan.all_variants(gpu)]


@pytest.mark.parametrize(
    ("gpu", "variant"), builtin_entries(), ids=lambda x: x.name if isinstance(x, Device) else str(x)
)
def test_builtin_tables_compile_without_spills(gpu: Device, variant: Variant) -> None:
    assert variant.illegal(gpu) is None
    assert_lean(variant, gpu)


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
    crowded = Variant("fa2_mma", "float16", 256, 256, 128, 32, 1, 4, 1)
    assert crowded.illegal(H200) is None
    compiled = jit.compile(crowded, "sm_90a")
    assert compiled.registers == 255
    assert compiled.spill_bytes > 0


def test_code_bytes_are_those_of_the_instructions() -> None:
    """Of 16 bytes each; more of them where loops are unrolled further."""
    small = jit.compile(SMALL, "sm_90a")
    large = jit.compile(SMALL._replace(bn=64), "sm_90a")
    assert small.code_bytes % 16 == 0
    assert 1000 < small.code_bytes < large.code_bytes < len(large.cubin)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_ptx(arch: str) -> None:
    text = jit.ptx(SMALL, arch)
    assert re.search(rf"^\.target {arch}$", text, re.MULTILINE)
    assert re.findall(r"\.entry (\w+)", text) == [elf.symbol(jit.compile(SMALL, arch).cubin)]
    assert "mma.sync" in text
    assert "\0" not in text


def test_waits_can_be_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a GPU have a wait that does not end stop the kernel."""
    variant = Variant("fa3_wgmma", "float16", 64, 64, 64, 64, 2, 8, 1, score=("Causal",))
    traps = [jit.ptx(variant, H200.arch).count("trap;")]
    text = source.text("fa3_wgmma")
    monkeypatch.setattr(source, "text", lambda kernel: f"#define BOUNDED_WAITS\n{text}")
    traps.append(jit.ptx(variant, H200.arch).count("trap;"))
    assert traps[1] > traps[0]


def test_ptx_of_what_does_not_compile() -> None:
    with pytest.raises(cufa.CompileError, match="tiles are not prefetched") as info:
        jit.ptx(BROKEN, "sm_90a")
    assert "-arch=compute_90a" in info.value.options


def test_threads_compile_at_once() -> None:
    variants = [SMALL, SMALL._replace(score=("Causal",))]
    alone = [jit.compile(variant, "sm_80") for variant in variants]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda variant: jit.compile(variant, "sm_80"), variants))
    assert [c.registers for c in together] == [c.registers for c in alone]
    assert [c.code_bytes for c in together] == [c.code_bytes for c in alone]


def test_compile_error() -> None:
    with pytest.raises(cufa.CompileError) as info:
        jit.compile(BROKEN, "sm_86")
    error = info.value
    assert error.variant == BROKEN
    assert "-arch=sm_86" in error.options
    assert "tiles are not prefetched" in error.log
    # The message points at the line of the real file.
    lines = (SOURCES / "fa1_fp32.cu").read_text().splitlines()
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
    """Stands for `cupy.RawKernel` and for the `cupy.cuda.Function` in it."""

    smem_bytes = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.ptr = self  # so that the driver's part can find it

    @property
    def kernel(self) -> Any:
        return self


@pytest.fixture
def raw_module(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_RawModule]]:
    def set_attribute(function: _Function, attribute: int, value: int) -> None:
        assert attribute == cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        function.smem_bytes = value

    monkeypatch.setattr(cupy.cuda.driver, "funcSetAttribute", set_attribute)
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
    assert [m.code for m in raw_module.made] == [source.text(v.kernel) for v in variants]
    (options,) = {m.options for m in raw_module.made}
    # CuPy adds the plain architecture itself.
    arch = [option for option in options if "arch" in option]
    assert arch == (["-arch=sm_90a"] if gpu.arch == "sm_90a" else [])


def test_nvrtc_that_takes_one_architecture_only(raw_module: type[_RawModule]) -> None:
    jit.kernel(SMALL, H200._replace(compiles_sm90a=False), 0)
    assert raw_module.made[0].options == ("-std=c++17",)


def test_kernels_are_compiled_once_and_made_ready_on_each_device(
    raw_module: type[_RawModule],
) -> None:
    first = jit.kernel(SMALL, H200, 0)
    assert first.smem_bytes == SMALL.smem_bytes
    assert jit.kernel(SMALL, H200, 0) is first
    other = jit.kernel(SMALL, H200, 1)
    assert other is not first
    assert other.smem_bytes == SMALL.smem_bytes
    assert len(raw_module.made) == 1
    jit.kernel(SMALL._replace(score=("Causal",)), H200, 0)
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
        "error: no", source.text("fa2_mma"), "x.cu", ("-x",), "nvrtc"
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


# --- kernels that were compiled ahead of time ---


class _Module:
    """Stands for `cupy.cuda.Module`."""

    loaded: list[bytes] = []  # noqa: RUF012
    failure: Exception | None = None

    def load(self, cubin: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        self.loaded.append(cubin)

    def get_function(self, name: str) -> _Function:
        return _Function(name)


@pytest.fixture
def module(
    cupy: Any, raw_module: type[_RawModule], monkeypatch: pytest.MonkeyPatch
) -> type[_Module]:
    monkeypatch.setattr(cupy.cuda, "Module", _Module)
    monkeypatch.setattr(_Module, "loaded", [])
    return _Module


@pytest.fixture(scope="module")
def cubin() -> bytes:
    return jit.compile(SMALL, H200.arch).cubin


def test_a_kernel_compiled_ahead_of_time_is_loaded_on_each_device(
    module: type[_Module], raw_module: type[_RawModule], cubin: bytes
) -> None:
    cache.store_cubin(SMALL, H200.arch, cubin)
    kernels = [jit.kernel(SMALL, H200, device_id) for device_id in (0, 1)]
    assert module.loaded == [cubin, cubin]
    assert raw_module.made == []
    for kernel in kernels:
        assert kernel.name.startswith("_Z7fa2_mmaI")
        assert kernel.smem_bytes == SMALL.smem_bytes
    assert jit.kernel(SMALL, H200, 0) is kernels[0]
    # Others are compiled as ever.
    jit.kernel(SMALL._replace(score=("Causal",)), H200, 0)
    jit.kernel(SMALL, device.named("a100"), 0)
    assert len(raw_module.made) == 2


def test_shared_memory_is_allowed_only_when_asked(module: type[_Module], cubin: bytes) -> None:
    assert jit.load(cubin).smem_bytes == 0
    assert jit.load(cubin, 100_000).smem_bytes == 100_000


@pytest.mark.parametrize("keep", [0, 10, 63, 200, 0.5, -1])
def test_a_damaged_file_is_ignored_with_one_warning(
    module: type[_Module], raw_module: type[_RawModule], cubin: bytes, keep: float
) -> None:
    """It must not come to the driver, which reads on behind its end."""
    part = cubin[: int(len(cubin) * keep) if isinstance(keep, float) else keep]
    path = cache.store_cubin(SMALL, H200.arch, part)
    with pytest.warns(RuntimeWarning) as caught:
        first, second = (jit.kernel(SMALL, H200, 0) for _ in range(2))
    (warning,) = caught
    assert second is first
    assert str(path) in str(warning.message)
    assert module.loaded == []
    assert first.name == SMALL.name_expression
    assert first.smem_bytes == SMALL.smem_bytes
    assert len(raw_module.made) == 1


def test_a_file_that_the_driver_refuses_is_ignored_with_one_warning(
    cupy: Any, module: type[_Module], monkeypatch: pytest.MonkeyPatch, cubin: bytes
) -> None:
    class Refusal(cupy.cuda.driver.CUDADriverError):  # type: ignore[misc]
        def __init__(self) -> None:
            RuntimeError.__init__(self, "no kernel image for this device")

    path = cache.store_cubin(SMALL, H200.arch, cubin)
    monkeypatch.setattr(module, "failure", Refusal())
    with pytest.warns(RuntimeWarning, match="no kernel image") as caught:
        assert jit.kernel(SMALL, H200, 0).name == SMALL.name_expression
    (warning,) = caught
    assert str(path) in str(warning.message)


#: Needs more shared memory than a launch may use unasked.
LARGE = Variant("fa2_mma", "float16", 128, 128, 64, 64, 2, 4, 1)


@pytest.fixture
def gpu(cupy: Any) -> Iterator[Device]:
    """Return the current GPU, for which nothing is compiled yet."""

    def forget() -> None:
        launch._ready.clear()
        jit._module.cache_clear()
        jit._kernel.cache_clear()

    forget()
    yield device.of_id(cupy.cuda.runtime.getDevice())
    forget()


def attend(cupy: Any) -> Any:
    x = cupy.random.default_rng(0).standard_normal((1, 3, 237, 128), dtype="f4").astype("f2")
    return cufa.attention(x, x, x, kernel=LARGE)


@pytest.mark.gpu
def test_a_kernel_compiled_ahead_of_time_runs(
    cupy: Any, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = attend(cupy)
    launch._ready.clear()
    jit._kernel.cache_clear()
    cache.store_cubin(LARGE, gpu.arch, jit.compile(LARGE, gpu.arch).cubin)
    monkeypatch.setattr(jit, "source", None)  # there is nothing to compile
    monkeypatch.setattr(cupy, "RawModule", None)
    assert (attend(cupy) == usual).all()


@pytest.mark.gpu
def test_a_kernel_of_another_architecture_is_ignored(cupy: Any, gpu: Device) -> None:
    usual = attend(cupy)
    launch._ready.clear()
    jit._kernel.cache_clear()
    other = "sm_80" if gpu.compute_capability >= 90 else "sm_120"
    path = cache.store_cubin(LARGE, gpu.arch, jit.compile(LARGE, other).cubin)
    with pytest.warns(RuntimeWarning, match="does not load") as caught:
        out = attend(cupy)
    assert str(path) in str(caught[0].message)
    assert (out == usual).all()


@pytest.mark.gpu
def test_load(cupy: Any, gpu: Device) -> None:
    compiled = jit.compile(LARGE, gpu.arch)
    function = jit.load(compiled.cubin, LARGE.smem_bytes)
    assert isinstance(function, cupy.cuda.Function)
    driver = cupy.cuda.driver

    def attribute(number: int) -> int:
        return driver.funcGetAttribute(number, function.ptr)

    assert attribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS) == compiled.registers
    allowed = attribute(driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    assert allowed == LARGE.smem_bytes
