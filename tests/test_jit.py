"""jit.py: kernels made ready on the current device, compiled there or ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from forgetting import forget_calls

import cufa
from cufa import device
from cufa.compiler import cubins, jit, nvrtc, source
from cufa.compiler.dependent import Dependent
from cufa.device import Device
from cufa.planner.rules import all_variants
from cufa.specs import KERNELS
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
H200 = device.named("h200")

SMALL = Variant("fa2_mma", "float16", 32, 32, 64, 16, 1, 4, 1)

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
    registers: int | None = None  # as the code needs it

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

    def get_attribute(attribute: int, function: _Function) -> int:
        assert attribute == cupy.cuda.driver.CU_FUNC_ATTRIBUTE_NUM_REGS
        if function.registers is not None:
            return function.registers
        variant = Variant.parse(function.name)
        needed = KERNELS[variant.kernel].launch_registers
        return 100 if needed is None else needed(variant)

    monkeypatch.setattr(cupy.cuda.driver, "funcGetAttribute", get_attribute)
    monkeypatch.setattr(cupy.cuda.driver, "funcSetAttribute", set_attribute)
    monkeypatch.setattr(cupy, "RawModule", _RawModule)
    monkeypatch.setattr(_RawModule, "made", [])
    jit.module.cache_clear()
    jit._kernel.cache_clear()
    yield _RawModule
    jit.module.cache_clear()
    jit._kernel.cache_clear()


@pytest.mark.parametrize("gpu", [device.of_arch(arch) for arch in ARCHS], ids=lambda gpu: gpu.arch)
def test_options_are_the_same_for_all_variants(raw_module: type[_RawModule], gpu: Device) -> None:
    variants = all_variants(gpu)
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
    assert raw_module.made[0].options == nvrtc.common_options()


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
        assert info.value.options == (*nvrtc.common_options(), "-arch=sm_90a")
        assert "error: no" in info.value.log
        assert info.value.__cause__ is failure
    monkeypatch.setattr(raw_module, "failure", None)
    assert jit.kernel(SMALL, H200, 0).name == SMALL.name_expression


# --- kernels that overlap the one in front ---

DECODE = Variant("decode", "bfloat16", 64, 64, 16, 32, 2, 4, 1, kv="Contiguous")
VARLEN = Variant("fa3_wgmma", "bfloat16", 64, 64, 128, 64, 2, 12, 1, kv="Varlen")
#: Each with whether it waits for the kernel in front itself.
WAITS: list[tuple[Variant | Instance, bool]] = [
    (SMALL, False),
    (VARLEN, True),
    (DECODE, True),
    (Instance("block_lists", (), (128,)), True),
]


def loaded(kernel: Any) -> Any:
    """Return the function that a kernel launches so that it overlaps the one in front."""
    assert isinstance(kernel, Dependent)
    return kernel._function


@pytest.mark.parametrize(("variant", "waits"), WAITS, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_launchable(arch: str, variant: Variant | Instance, waits: bool) -> None:
    gpu, function = device.of_arch(arch), _Function("")
    found = jit.launchable(function, variant, gpu)
    if waits and gpu.compute_capability >= 90:
        assert loaded(found) is function
    else:
        assert found is function


def test_kernels_are_made_ready_to_be_launched_so(raw_module: type[_RawModule]) -> None:
    assert loaded(jit.kernel(VARLEN, H200, 0)).smem_bytes == VARLEN.smem_bytes
    # Launches that decode ask for more than the kernel uses.
    assert loaded(jit.kernel(DECODE, H200, 0)).smem_bytes == H200.smem_per_block
    a100 = device.named("a100")
    assert jit.kernel(DECODE, a100, 0).smem_bytes == a100.smem_per_block


# --- registers ---

#: Has 65536 // 384 // 8 * 8 = 168 registers a thread at launch, which its warpgroups share out.
SHARING = Variant("fa3_wgmma", "bfloat16", 64, 64, 128, 64, 2, 12, 1)


@pytest.mark.parametrize("registers", [160, 176])
def test_a_kernel_with_other_registers_than_it_shares_out_is_an_error(
    raw_module: type[_RawModule], monkeypatch: pytest.MonkeyPatch, registers: int
) -> None:
    """With fewer it would wait for ever."""
    monkeypatch.setattr(_Function, "registers", registers)
    with pytest.raises(cufa.CompileError, match=rf"counts on 168 .* gave it {registers}$") as info:
        jit.kernel(SHARING, H200, 0)
    assert info.value.variant == SHARING
    assert info.value.options == (*nvrtc.common_options(), "-arch=sm_90a")
    jit.kernel(SMALL, H200, 0)  # it shares nothing out
    monkeypatch.setattr(_Function, "registers", 168)
    assert loaded(jit.kernel(SHARING, H200, 0)).smem_bytes == SHARING.smem_bytes


# --- kernels that were compiled ahead of time ---


class _Module:
    """Stands for `cupy.cuda.Module`."""

    loaded: list[bytes] = []  # noqa: RUF012
    failure: Exception | None = None
    registers = 168

    def load(self, cubin: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        self.loaded.append(cubin)

    def get_function(self, name: str) -> _Function:
        function = _Function(name)
        function.registers = self.registers
        return function


@pytest.fixture
def module(
    cupy: Any, raw_module: type[_RawModule], monkeypatch: pytest.MonkeyPatch
) -> type[_Module]:
    monkeypatch.setattr(cupy.cuda, "Module", _Module)
    monkeypatch.setattr(_Module, "loaded", [])
    return _Module


@pytest.fixture(scope="module")
def cubin() -> bytes:
    return nvrtc.compile_variant(SMALL, H200.arch).cubin


def test_a_kernel_compiled_ahead_of_time_is_loaded_on_each_device(
    module: type[_Module], raw_module: type[_RawModule], cubin: bytes
) -> None:
    cubins.store(SMALL, H200.arch, nvrtc.version(), cubin)
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


def test_as_much_shared_memory_is_allowed_as_asked(module: type[_Module], cubin: bytes) -> None:
    assert jit.load(cubin, 1000).smem_bytes == 1000
    assert jit.load(cubin, 100_000).smem_bytes == 100_000


@pytest.mark.parametrize("keep", [0, 10, 63, 200, 0.5, -1])
def test_a_damaged_file_is_ignored_with_one_warning(
    module: type[_Module], raw_module: type[_RawModule], cubin: bytes, keep: float
) -> None:
    """It must not come to the driver, which reads on behind its end."""
    part = cubin[: int(len(cubin) * keep) if isinstance(keep, float) else keep]
    path = cubins.store(SMALL, H200.arch, nvrtc.version(), part)
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

    path = cubins.store(SMALL, H200.arch, nvrtc.version(), cubin)
    monkeypatch.setattr(module, "failure", Refusal())
    with pytest.warns(RuntimeWarning, match="no kernel image") as caught:
        assert jit.kernel(SMALL, H200, 0).name == SMALL.name_expression
    (warning,) = caught
    assert str(path) in str(warning.message)


def test_a_file_with_other_registers_is_ignored_with_one_warning(
    module: type[_Module],
    raw_module: type[_RawModule],
    monkeypatch: pytest.MonkeyPatch,
    cubin: bytes,
) -> None:
    path = cubins.store(SHARING, H200.arch, nvrtc.version(), cubin)
    monkeypatch.setattr(_Module, "registers", 128)
    with pytest.warns(RuntimeWarning, match=r"counts on 168 .* gave it 128") as caught:
        assert loaded(jit.kernel(SHARING, H200, 0)).name == SHARING.name_expression
    (warning,) = caught
    assert str(path) in str(warning.message)
    assert len(raw_module.made) == 1


def test_a_file_of_another_compiler_is_not_loaded(
    module: type[_Module], raw_module: type[_RawModule], cubin: bytes
) -> None:
    major, minor = nvrtc.version()
    for other in ((major - 1, minor), (major, minor + 1)):
        cubins.store(SMALL, H200.arch, other, cubin)
    assert jit.kernel(SMALL, H200, 0).name == SMALL.name_expression
    assert module.loaded == []


#: Needs more shared memory than a launch may use unasked.
LARGE = Variant("fa2_mma", "float16", 128, 128, 64, 64, 2, 4, 1)


@pytest.fixture
def gpu(cupy: Any) -> Iterator[Device]:
    """Return the current GPU, for which nothing is compiled yet."""

    def forget() -> None:
        forget_calls()
        jit.module.cache_clear()
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
    forget_calls()
    jit._kernel.cache_clear()
    cubin = nvrtc.compile_variant(LARGE, gpu.arch).cubin
    cubins.store(LARGE, gpu.arch, nvrtc.version(), cubin)
    monkeypatch.setattr(jit, "source", None)  # there is nothing to compile
    monkeypatch.setattr(cupy, "RawModule", None)
    assert (attend(cupy) == usual).all()


@pytest.mark.gpu
def test_a_kernel_of_another_architecture_is_ignored(cupy: Any, gpu: Device) -> None:
    usual = attend(cupy)
    forget_calls()
    jit._kernel.cache_clear()
    other = "sm_80" if gpu.compute_capability >= 90 else "sm_120"
    cubin = nvrtc.compile_variant(LARGE, other).cubin
    path = cubins.store(LARGE, gpu.arch, nvrtc.version(), cubin)
    with pytest.warns(RuntimeWarning, match="does not load") as caught:
        out = attend(cupy)
    assert str(path) in str(caught[0].message)
    assert (out == usual).all()


@pytest.mark.gpu
def test_load(cupy: Any, gpu: Device) -> None:
    compiled = nvrtc.compile_variant(LARGE, gpu.arch)
    function = jit.load(compiled.cubin, LARGE.smem_bytes)
    assert isinstance(function, cupy.cuda.Function)
    driver = cupy.cuda.driver

    def attribute(number: int) -> int:
        return driver.funcGetAttribute(number, function.ptr)

    assert attribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS) == compiled.registers
    allowed = attribute(driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    assert allowed == LARGE.smem_bytes
