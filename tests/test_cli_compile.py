"""cli: `compile` and `inspect`."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forgetting import forget_calls
from played_gpu import on_gpu

import cufa
from cufa import cli, device, disk_cache, tuned
from cufa.cli import compile as compile_command
from cufa.cli import inspect
from cufa.compiler import cubins, elf, jit, nvrtc
from cufa.explorer import build
from cufa.explorer.build import Built
from cufa.features.causal import Causal
from cufa.planner.attention import Planner, decode_variants
from cufa.planner.decode import plan_splits
from cufa.planner.fp8 import kernels, plan_fp8
from cufa.planner.plan import plan_tiles
from cufa.planner.problem_class import ProblemClass, problem_class
from cufa.planner.rules import all_variants
from cufa.planner.tuned_table import Entry
from cufa.problem.problem import Problem
from cufa.specs import ATTENTION_KERNELS, AUXILIARY_KERNELS, BACKWARD_KERNELS, FP8_KERNELS, KERNELS
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import BackwardVariant, Variant

VARIANT = Variant("fa2_mma", "float16", 32, 32, 64, 64, 2, 4, 4, score=("Causal",))
OF_DECODE = Variant("decode", "bfloat16", 64, 64, 16, 16, 3, 4, 1, kv="Paged")
BACKWARD = BackwardVariant("bwd_wgmma", "float16", 64, 64, 128, 128, 2, 12, 1, score=("Causal",))
ONE = ("compile", "--arch", "sm_86", "--for", "1,1,64,32", "--dtype", "float16", "--causal")

Captured = pytest.CaptureFixture[str]


@functools.cache
def some_kernel() -> nvrtc.Compiled:
    return nvrtc.compile_variant(VARIANT, "sm_86")


class Builder:
    """In place of `build.compile_all`: one kernel stands for all; some fail or are interrupted."""

    def __init__(self) -> None:
        self.asked: list[Variant] = []
        self.arch = ""
        self.fail: BaseException | None = None
        self.after = 1

    def __call__(self, variants: list[Variant], arch: str, jobs: int | None) -> Iterator[Built]:
        """Yield what became of each variant."""
        self.asked, self.arch = variants, arch
        for number, variant in enumerate(variants):
            if self.fail is not None and number >= self.after:
                if not isinstance(self.fail, nvrtc.CompileError):
                    raise self.fail
                yield Built(variant, self.fail, 0.1)
            else:
                yield Built(variant, some_kernel(), 0.1)


@functools.cache
def known_of_decode(gpu: device.Device, causal: bool) -> list[Variant]:
    return decode_variants(gpu, [causal])


def of_decode(gpu: device.Device, masks: Iterable[bool] = (False, True)) -> list[Variant]:
    """Return `decode_variants`, which takes seconds: each is found once."""
    return [variant for causal in masks for variant in known_of_decode(gpu, causal)]


@pytest.fixture(autouse=True)
def variants_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_command, "decode_variants", of_decode)


@functools.cache
def planned(gpu: device.Device) -> list[Variant]:
    return [*all_variants(gpu), *of_decode(gpu)]


def causal_ones(gpu: device.Device, dtype: str) -> set[Variant]:
    """Return all variants that causal calls of `attention` take."""
    own = [v for v in all_variants(gpu) if v.causal]
    return {v for v in [*own, *of_decode(gpu, [True])] if v.dtype == dtype}


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    pytest.importorskip("cupy")
    found = Builder()
    monkeypatch.setattr(build, "compile_all", found)
    return found


def test_one_kernel_for_real(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    assert cli.main(ONE) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("1 kernel to compile for sm_86, about 4 s on 1 thread\n")
    assert f"[1/1] {VARIANT}  " in out
    assert "1 kernel for sm_86 (rtx3090) written" in out
    assert str(disk_cache.folder() / "kernels") in out
    cubin = cubins.find(VARIANT, "sm_86", nvrtc.version())
    assert cubin is not None
    assert cubin.startswith(b"\x7fELF")
    assert cli.main(ONE) == 0
    out, _ = capsys.readouterr()
    assert "0 kernels for sm_86 (rtx3090) written" in out
    assert "1 there before" in out


@pytest.mark.parametrize("damage", [b"", b"no ELF", b"\x7fELF\x02\x01"])
def test_a_damaged_kernel_is_compiled_again(damage: bytes, builder: Builder) -> None:
    assert cli.main(ONE) == 0
    whole = cubins.find(VARIANT, "sm_86", nvrtc.version())
    cubins.store(VARIANT, "sm_86", nvrtc.version(), damage)
    assert cli.main(ONE) == 0
    assert builder.asked == [VARIANT]
    assert cubins.find(VARIANT, "sm_86", nvrtc.version()) == whole


def test_both_masks_and_all_dtypes_by_default(builder: Builder) -> None:
    words = ["compile", "--gpu", "h100", "--for", "1,1,64,32", "4,32,4096,128:4,8,4096,128"]
    assert cli.main(words) == 0
    assert builder.arch == "sm_90a"
    kinds = {(v.dtype, v.head_dim, v.causal) for v in builder.asked}
    assert len(builder.asked) == len(kinds) == 3 * 2 * 2
    assert all(cubins.find(v, "sm_90a", nvrtc.version()) for v in builder.asked)
    assert cli.main([*words, "--dtype", "float32", "--no-causal"]) == 0
    assert builder.asked == []  # they are there already


def test_without_problems_all_that_the_planner_can_choose(builder: Builder) -> None:
    gpu = device.named("a100")
    assert cli.main(["compile", "--gpu", "a100", "--dtype", "bfloat16", "--causal"]) == 0
    expected = causal_ones(gpu, "bfloat16")
    assert set(builder.asked) >= expected
    assert {v.dtype for v in builder.asked} == {"bfloat16"}
    one = Problem.of_shapes(*[(1, 8, n, 64) for n in (1, 99999, 99999)], causal=True)
    asked = [v for v in builder.asked if not v.causal]  # a single query sees all keys
    half = one._replace(dtype="bfloat16")
    assert Planner(half, gpu)(half).variant in asked
    assert {v.kernel for v in asked} == {"decode"}


@pytest.mark.parametrize("page_size", [0, 16])
def test_kernels_of_decode(builder: Builder, page_size: int) -> None:
    """For caches of both kinds, and with those of attention."""
    words = ["compile", "--gpu", "a100", "--dtype", "float16", "--for", "1,8,64,32"]
    words += ["--decode", "3,8,1,128:3,2,100,128", "3,8,4,64:3,2,100,64:3,2,100,40"]
    assert cli.main([*words, *(["--page-size", str(page_size)] if page_size else ())]) == 0
    attention = [v for v in builder.asked if v.kernel in ATTENTION_KERNELS]
    assert [v.score for v in attention] == [(), ("Causal",)]
    pages = 3 * -(-100 // page_size) if page_size else 0
    for seq, d, dv in ((1, 128, 128), (4, 64, 40)):
        for causal in (False, True):
            kv = "Paged" if page_size else "Contiguous"
            features = (Causal(),) if causal else ()
            problem = Problem("float16", 3, 8, 2, seq, 100, d, dv, d**-0.5, features, kv)
            problem = problem._replace(pages=pages, page_size=page_size or 0)
            assert plan_splits(problem, device.named("a100")).variant in builder.asked


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_kernels_of_caches_of_8_bits(builder: Builder, kind: str) -> None:
    words = ["compile", "--gpu", "h200", "--causal", "--cache-dtype", kind]
    assert cli.main([*words, "--decode", "3,8,1,128:3,2,100,128", "--page-size", "64"]) == 0
    kinds = {(v.kernel, v.dtype, v.kv) for v in builder.asked}
    kernel = f"decode_{kind}"
    assert kinds == {(kernel, "float16", "PagedTiles"), (kernel, "bfloat16", "PagedTiles")}


@pytest.mark.parametrize("lengths", ["", "padded", "varlen"])
def test_kernels_of_other_scores(builder: Builder, lengths: str) -> None:
    """The kernels that calls would take with a window and sinks, as gpt-oss has them."""
    words = ["compile", "--gpu", "h200", "--dtype", "bfloat16", "--causal", "--window", "127,0"]
    words += ["--array", "sinks", "--for", "2,64,300,64:2,8,300,64"]
    words += ["--decode", "2,64,1,64:2,8,4096,64"]
    assert cli.main([*words, *(["--lengths", lengths] if lengths else ())]) == 0
    score = ("Causal", "WindowLeft", "Sinks")
    kinds = {(v.score, v.kv) for v in builder.asked}
    kv = {"": "Dense", "padded": "Padded", "varlen": "Varlen"}[lengths]
    assert kinds == {(score, kv), (score[1:], "Contiguous")}


@pytest.mark.usefixtures("gpu")
def test_a_call_of_sequences_finds_its_kernel(builder: Builder) -> None:
    words = ["compile", "--gpu", "h200", "--dtype", "float16", "--no-causal"]
    assert cli.main([*words, "--lengths", "varlen", "--for", "4,2,100,64"]) == 0
    q = on_gpu(np.zeros((400, 2, 64), np.float16))
    offsets = on_gpu(np.arange(0, 401, 100, dtype=np.int32))
    found: Any = cufa.explain_varlen(q, q, q, offsets, offsets)
    assert [found.variant] == builder.asked


def test_one_kernel_of_decode_for_real(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    shapes = "1,4,1,64:1,1,512,64"
    words = ["compile", "--arch", "sm_86", "--decode", shapes, "--dtype", "bfloat16"]
    assert cli.main(words) == 0
    out, _ = capsys.readouterr()
    assert "1 kernel for sm_86 (rtx3090) written" in out
    printed = re.search(r"^\[1/1\] (\w+<.*>)  ", out, re.MULTILINE)
    assert printed
    cubin = cubins.find(Variant.parse(printed[1]), "sm_86", nvrtc.version())
    assert cubin is not None
    assert elf.symbol(cubin)


SHAPE = (4, 32, 4096, 128)


def test_an_architecture_is_all_of_its_gpus(builder: Builder, capsys: Captured) -> None:
    """Each may have a table of the user's."""
    words = ["compile", "--arch", "sm_90a", "--dtype", "bfloat16", "--causal"]
    problem = Problem.of_shapes(SHAPE, SHAPE, SHAPE, dtype="bfloat16", causal=True)
    gpus = [device.named(name) for name in ("h200", "h100")]
    entry = Entry("fa3_wgmma", TileShape(128, 96, 2, 12, 1))
    tuned.store(gpus[1], {problem_class(problem, gpus[1]): entry}, "a test")
    planned = [plan_tiles(problem, gpu, table=tuned.user_table(gpu)).variant for gpu in gpus]
    assert planned[0] != planned[1]
    assert cli.main([*words, "--for", ",".join(map(str, SHAPE))]) == 0
    assert builder.asked == planned
    assert "2 kernels for sm_90a (h200, h100) written" in capsys.readouterr().out
    assert cli.main(words) == 0
    assert not set(planned) & set(builder.asked)  # they are there already
    asked = {*planned, *builder.asked}
    for gpu in gpus:
        assert cli.main(["compile", "--gpu", gpu.name, *words[3:]]) == 0
        assert builder.asked == []
    assert len(asked) == len(list((disk_cache.folder() / "kernels").iterdir()))


def test_tuned_variants_are_compiled_too(builder: Builder) -> None:
    gpu = device.named("a100")
    entries = {
        ProblemClass(2, 64, 64, ("Causal",), 1024, 1024, 8): Entry(kernel, TileShape(*tile))
        for kernel, tile in (("fa2_mma", (64, 96, 2, 4, 2)),)
    }
    entries[ProblemClass(2, 64, 64, ("Causal",), 512, 512, 8)] = Entry(
        "fa2_mma", TileShape(256, 256, 9, 4, 2)
    )
    entries[ProblemClass(2, 999, -1, ("Causal",), 0, 0, 8)] = Entry(
        "fa2_mma", TileShape(64, 96, 2, 4, 2)
    )
    tuned.store(gpu, entries, "a test")
    assert cli.main(["compile", "--gpu", "a100", "--dtype", "float16"]) == 0
    assert (
        Variant("fa2_mma", "float16", 64, 64, 64, 96, 2, 4, 2, score=("Causal",)) in builder.asked
    )
    assert all(v.illegal(gpu) is None for v in builder.asked)


@pytest.mark.parametrize("kernel", ["fa3_wgmma", "decode", "fa9"])
def test_tuned_kernels_that_the_gpu_cannot_have_are_passed_over(
    builder: Builder, kernel: str
) -> None:
    gpu = device.named("a100")
    words = ["compile", "--gpu", "a100", "--dtype", "float16", "--causal"]
    problem = Problem.of_shapes(SHAPE, SHAPE, SHAPE, causal=True)
    entry = Entry(kernel, TileShape(128, 128, 2, 12, 1, True))
    tuned.store(gpu, {problem_class(problem, gpu): entry}, "a test")
    assert cli.main(words) == 0
    assert set(builder.asked) == causal_ones(gpu, "float16")
    assert cli.main([*words, "--for", ",".join(map(str, SHAPE))]) == 0
    assert builder.asked == []  # it is there already


def test_a_tuned_kernel_has_head_dims_of_its_own(builder: Builder) -> None:
    """A class has those of the default kernel, here 192 where fa2_mma has 160, too."""
    gpu = device.named("h200")
    problem = Problem.of_shapes(*[(1, 16, 8192, 150)] * 3, causal=True)
    entry = Entry("fa2_mma", TileShape(64, 48, 1, 4, 2))
    tuned.store(gpu, {problem_class(problem, gpu): entry}, "a test")
    assert cli.main(["compile", "--gpu", "h200", "--dtype", "float16", "--causal"]) == 0
    chosen = plan_tiles(problem, gpu, table=tuned.user_table(gpu)).variant
    assert chosen == entry.variant(problem, gpu)
    assert chosen in builder.asked


def test_a_kernel_that_does_not_compile_fails_the_command(
    builder: Builder, capsys: Captured
) -> None:
    builder.fail = nvrtc.CompileError(VARIANT, ("-arch=sm_86",), "error: no\n  such thing\n")
    assert cli.main(["compile", "--arch", "sm_86", "--for", "1,1,64,32", "--dtype", "float16"]) == 1
    out, _ = capsys.readouterr()
    assert "failed: error: no such thing\n" in out
    assert "1 kernel for sm_86 (rtx3090) written" in out
    assert "1 failed" in out


def test_ctrl_c_keeps_what_was_written(builder: Builder, capsys: Captured) -> None:
    builder.fail, builder.after = KeyboardInterrupt(), 2
    assert cli.main(["compile", "--arch", "sm_86", "--for", "1,1,64,32"]) == 130
    out, err = capsys.readouterr()
    assert "2 kernels for sm_86 (rtx3090) written" in out
    assert "interrupted" in err
    found = [cubins.find(v, "sm_86", nvrtc.version()) for v in builder.asked]
    assert sum(cubin is not None for cubin in found) == 2


def test_a_cache_that_cannot_be_written(
    builder: Builder, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file"))
    assert cli.main(ONE) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m cufa compile: error: the cache folder cannot be written")
    assert err.count("\n") == 1
    assert builder.asked == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_another_user(builder: Builder, capsys: Captured) -> None:
    (disk_cache.folder() / "kernels").mkdir(parents=True, mode=0o555)
    assert cli.main(ONE) == 2
    assert "the cache folder cannot be written" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="has no modes")
@pytest.mark.parametrize("name", [".", "kernels"])
def test_a_cache_that_would_be_ignored(builder: Builder, capsys: Captured, name: str) -> None:
    """It is refused before the work, not found out by the first call."""
    place = disk_cache.folder() / name
    place.mkdir(parents=True)
    place.chmod(0o775)
    assert cli.main(ONE) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "python -m cufa compile: error: what goes to the cache folder would not be used: "
        f"{place} is ignored: others may write it, see chmod go-w\n"
    )
    assert builder.asked == []
    assert list(place.iterdir()) == []
    place.chmod(0o755)
    assert cli.main(ONE) == 0


@pytest.mark.gpu
def test_what_was_compiled_ahead_runs(
    cupy: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = cupy.random.standard_normal((1, 2, 100, 32), dtype=cupy.float32).astype(cupy.float16)
    expected = cufa.attention(q, q, q, causal=True)
    words = ["compile", "--for", "1,2,100,32", "--dtype", "float16", "--causal"]
    assert cli.main(words) == 0
    assert "1 kernel for" in capsys.readouterr().out

    def refuse(*_: object) -> None:
        raise AssertionError("it was compiled again")

    jit._kernel.cache_clear()
    forget_calls()
    monkeypatch.setattr(jit, "module", refuse)
    assert (cufa.attention(q, q, q, causal=True) == expected).all()


# -- inspect ---------------------------------------------------------------------------------------


EIGHT_BITS = plan_fp8(Problem.of_shapes(*[(1, 1, 128, 64)] * 3), device.named("h200")).variant
EACH = {"attention": VARIANT, "decode": OF_DECODE, "gradients": BACKWARD, "8 bits": EIGHT_BITS}


@pytest.mark.parametrize("variant", EACH.values(), ids=EACH)
def test_figures(variant: Variant, capsys: Captured) -> None:
    pytest.importorskip("cupy")
    assert cli.main(["inspect", str(variant), "--gpu", "h100"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    compiled = nvrtc.compile_variant(variant, "sm_90a")
    assert f"registers      {compiled.registers} a thread" in out
    assert ("spills         none" in out) == (compiled.spill_bytes == 0)
    assert f"shared memory  {variant.smem_bytes} bytes a block" in out
    assert f"code           {compiled.code_bytes} bytes" in out
    assert "of 2048 threads" in out


def a_small_one(kernel: str, gpu: device.Device) -> Variant:
    """Return a variant of a kernel that compiles in little time."""
    if kernel in FP8_KERNELS:
        return EIGHT_BITS
    if kernel in BACKWARD_KERNELS:
        spec = BACKWARD_KERNELS[kernel]
        dims = spec.head_dims(gpu)[0]
        return BackwardVariant(kernel, spec.dtypes[0], *dims, **spec.tiles(gpu, dims)[0]._asdict())
    if kernel == "decode" or KERNELS[kernel].kv_dtype is not None:
        return OF_DECODE._replace(kernel=kernel)
    of_kernel = [v for v in planned(gpu) if v.kernel == kernel]
    return min(of_kernel, key=lambda v: (v.head_dim * v.bn, v.head_dim_v * v.bm))


@pytest.mark.parametrize("kernel", [*KERNELS, *BACKWARD_KERNELS, *FP8_KERNELS])
def test_the_source_compiles_to_the_one_variant(kernel: str, capsys: Captured) -> None:
    compiler = pytest.importorskip("cupy").cuda.nvrtc
    gpu = device.named("h200")
    variant = a_small_one(kernel, gpu)
    assert cli.main(["inspect", str(variant).replace(" ", ""), "--source"]) == 0
    out, _ = capsys.readouterr()
    program = compiler.createProgram(out, "inspected.cu", (), ())
    compiler.compileProgram(program, ("-std=c++17", "-arch=compute_90a"))
    # No more of the text: the compiler numbers registers in another way from time to time.
    entries = re.findall(r"\.entry (\w+)", compiler.getPTX(program).decode())
    assert entries == re.findall(r"\.entry (\w+)", nvrtc.ptx(variant, gpu.arch))
    assert len(entries) == 1


GIVEN = ("1,8,512,64", "--dtype", "bfloat16", "--gpu", "h200")
PRINTING = [
    ("explain", "--q", *GIVEN),
    ("explain", "--q", *GIVEN, "--precision", "fp8", "--softcap", "3"),
    ("explain", "--q", *GIVEN, "--backward", "--causal"),
    ("compile", "--for", *GIVEN, "--precision", "fp8", "--lengths", "varlen"),
    ("compile", "--for", *GIVEN, "--backward"),
    *(("compile", "--decode", *GIVEN, "--cache-dtype", bits) for bits in ("fp8", "int8")),
]


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_what_other_commands_print_can_be_inspected(
    words: tuple[str, ...], capsys: Captured
) -> None:
    assert cli.main(words) == 0
    printed = re.findall(r"(\w+)(<.*>)", capsys.readouterr().out)
    variants = [name + rest for name, rest in printed if name not in AUXILIARY_KERNELS]
    assert variants
    for variant in variants:
        assert cli.main(["inspect", variant, "--source"]) == 0
        assert f"template __global__ decltype({variant}) {variant};\n" in capsys.readouterr().out


def test_ptx(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    assert cli.main(["inspect", str(VARIANT), "--arch", "sm_90", "--ptx"]) == 0
    out, _ = capsys.readouterr()
    assert ".target sm_90a" in out
    assert out.count(".entry") == 1


@pytest.fixture
def no_disassembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide the disassemblers of this machine; return a folder that is looked in."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(inspect, "_packages", lambda: [])
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.mark.usefixtures("no_disassembler")
def test_no_disassembler(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    assert cli.main(["inspect", str(VARIANT), "--arch", "sm_90", "--sass"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "pip install nvidia-cuda-nvdisasm" in err


def fake_tool(folder: Path, script: str) -> None:
    tool = folder / "nvdisasm"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_the_disassembler_of_a_toolkit(no_disassembler: Path, capsys: Captured) -> None:
    pytest.importorskip("cupy")
    fake_tool(no_disassembler, 'echo "the code of $2"')
    assert cli.main(["inspect", str(VARIANT), "--arch", "sm_90", "--sass"]) == 0
    assert capsys.readouterr().out.startswith("the code of ")
    fake_tool(no_disassembler, "echo 'unknown\n architecture' >&2; exit 1")
    assert cli.main(["inspect", str(VARIANT), "--arch", "sm_90", "--sass"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("nvdisasm: unknown architecture\n")


def test_sass_for_real(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    try:
        inspect._disassembler()
    except cli.parser.CommandError as failure:
        pytest.skip(str(failure))
    assert cli.main(["inspect", str(VARIANT), "--arch", "sm_90", "--sass"]) == 0
    assert "HMMA" in capsys.readouterr().out


def test_a_variant_that_does_not_compile_is_one_line(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy")

    def fail(variant: Variant, arch: str) -> nvrtc.Compiled:
        raise nvrtc.CompileError(variant, (f"-arch={arch}",), "no\nluck\n")

    monkeypatch.setattr(nvrtc, "compile_variant", fail)
    assert cli.main(["inspect", str(VARIANT), "--arch", "sm_90"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("no luck\n")


def test_8_bits(builder: Builder) -> None:
    """The kernels are those of a call, quantization included."""
    words = ("compile", "--arch", "sm_90a", "--precision", "fp8", "--dtype", "bfloat16", "--causal")
    assert cli.main((*words, "--softcap", "30", "--for", "1,2,300,100")) == 0
    shapes = ((1, 2, 300, 100),) * 3
    problem = Problem.of_shapes(*shapes, dtype="bfloat16", causal=True, softcap=30.0)
    asked: list[Any] = list(builder.asked)
    assert asked == list(kernels(problem, device.named("h200")))
    assert [each.kernel for each in asked] == ["fp8_wgmma", "quantize", "quantize"]
    assert asked[0].score == ("FineSoftcap", "Causal")
