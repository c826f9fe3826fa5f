"""cli: what every command has in common, `info` and `explain`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cufa
from cufa import cli, device, disk_cache, tuned
from cufa.planner.plan import plan_tiles
from cufa.planner.problem_class import problem_class
from cufa.planner.tuned_table import Entry
from cufa.problem.problem import Problem
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

ROOT = Path(__file__).resolve().parents[1]
H200 = device.named("h200")
COMMANDS = ("info", "explain", "explore", "compile", "inspect", "tune")
PROGRAM = "python -m cufa"
SMALL = ("--q", "1,2,128,64")
VARIANT = "fa2_mma<float16, 64, 64, 64, 64, 2, 4, 2, Score<Causal>, Dense>"

Captured = pytest.CaptureFixture[str]


def the_line(capsys: Captured) -> str:
    """Return the one line on the standard error; nothing else was printed."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.rstrip("\n")


def hide_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime

    def fail() -> None:
        raise runtime.CUDARuntimeError(100)

    monkeypatch.setattr(runtime, "getDevice", fail)


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let the import of these packages and of their modules fail."""
    for name in [n for n in sys.modules if n.split(".")[0] in packages]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)


def test_alone_it_prints_the_help_and_fails(capsys: Captured) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    for command in COMMANDS:
        assert f"    {command} " in out


@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)])
def test_help(command: tuple[str, ...], capsys: Captured) -> None:
    assert cli.main([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"  {' '.join((PROGRAM, *command))}" in out  # an example


def test_version(capsys: Captured) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr() == (f"cufa {cufa.__version__}\n", "")


BAD: list[tuple[tuple[str, ...], str]] = [
    (("bogus",), "invalid choice: 'bogus'"),
    (("--bogus",), "unrecognized arguments: --bogus"),
    (("info", "more"), "unrecognized arguments: more"),
    (("explain",), "the following arguments are required: --q"),
    (("explain", "--q", "1,2,3"), "'1,2,3' is no shape: four positive sizes"),
    (("explain", "--q", "1,2,3,x"), "'1,2,3,x' is no shape"),
    (("explain", "--q", "1,2,0,64"), "'1,2,0,64' is no shape"),
    (("explain", "--q", "1,2,-3,64"), "'1,2,-3,64' is no shape"),
    (("explain", "--q", "1,1,1,257", "--gpu", "h100"), "head_dim must be 1 to 256"),
    (
        ("explain", "--q", "1,3,8,64", "--k", "1,2,8,64", "--gpu", "h100"),
        "heads 3 is no multiple of heads 2",
    ),
    (("explain", *SMALL, "--v", "1,2,64,64", "--gpu", "h100"), "seq 64 and 128 differ"),
    (("explain", *SMALL, "--dtype", "int8"), "argument --dtype: invalid choice: 'int8'"),
    (("explain", *SMALL, "--kernel", "fa9"), "'fa9' is none of the kernels"),
    (("explain", *SMALL, "--kernel", "decode"), "fa1_fp32: it is for cufa.decode"),
    (("explore", *SMALL, "--kernel", "decode"), "fa1_fp32: it is for cufa.decode"),
    (
        ("explain", *SMALL, "--kernel", "fa2_fp32", "--gpu", "h100"),
        "kernel: fa2_fp32 takes float32, q has float16",
    ),
    (("explain", *SMALL, "--gpu", "v100"), "name must be one of a100"),
    (("explain", *SMALL, "--arch", "sm_75"), "arch must be one of sm_80"),
    (("explain", *SMALL, "--arch", "sm_80", "--gpu", "h100"), "not allowed with argument"),
    (("explain", *SMALL, "--deterministic", "--gpu", "h100"), "--deterministic is for --backward"),
    (
        ("explain", *SMALL, "--backward", "--kernel", "fa2_mma", "--gpu", "h100"),
        "--kernel is not for --backward",
    ),
    (
        ("explore", *SMALL, "--backward", "--kernel", "fa2_mma", "--gpu", "h100"),
        "choose by --space",
    ),
    (("explore", *SMALL, "--backward", "--space", "head_dim=64", "--gpu", "h100"), "is none of bm"),
    (("explore", *SMALL, "--backward", "--space", "bm=999", "--gpu", "h100"), "nothing legal"),
    (("compile", "--arch", "sm_90a", "--backward"), "--backward is for --for"),
    (("compile", "--arch", "sm_90a", "--precision", "fp8"), "--precision is for --for"),
    (
        ("explain", *SMALL, "--precision", "fp8", "--gpu", "a100"),
        "precision: fp8_wgmma, the kernel",
    ),
    (
        ("explain", *SMALL, "--precision", "fp8", "--backward", "--gpu", "h100"),
        "--precision is not for --backward",
    ),
    (("explain", "--q", f"1,1,{2**31},64", "--gpu", "h100"), "more than the kernels'"),
    (("explore", *SMALL, "--space", "bm"), "'bm' has no values: bm=64,128 would have two"),
    (("explore", *SMALL, "--space", "tile=64"), "names none of the template arguments"),
    (("explore", *SMALL, "--space", "causal=true"), "names none of the template arguments"),
    (("explore", *SMALL, "--space", "ping_pong=1"), "'1' is neither true nor false"),
    (("explore", *SMALL, "--space", "bm=64,"), "'' is no positive integer"),
    (("explore", *SMALL, "--space", "bm=17", "--gpu", "h100"), "nothing legal is left"),
    (("explore", *SMALL, "--variant", "fa2_mma<64>"), "a variant looks like"),
    (("explore", *SMALL, "--jobs", "0"), "'0' is no positive integer"),
    (("explore", *SMALL, "--top", "x"), "'x' is no positive integer"),
    (("explore", *SMALL, "--json", "."), "'.' is no regular file"),
    (("explore", *SMALL, "--csv", "no/such/x.csv"), "there is no folder 'no/such'"),
    (("explore", *SMALL, "--csv", f"{'x' * 5000}/x.csv"), "there is no folder 'xxx"),
    (("explore", *SMALL, "--plot", "x.unknown"), "'x.unknown' must end in one of"),
    (("compile", "--arch", "sm_90a", "--for", "1,1,8,64:2,1,8,64"), "batch 2 and 1 differ"),
    (("compile", "--arch", "sm_90a", "--for", "1,1,8,64:" * 4), "more than the three shapes"),
    (("compile", "--arch", "sm_90a", "--decode", "1,1,8,64:2,1,8,64"), "batch 2 and 1 differ"),
    (("compile", "--arch", "sm_90a", "--for", "1,1,8,64", "--page-size", "8"), "is for --decode"),
    (("compile", "--arch", "sm_90a", "--page-size", "0"), "'0' is no positive integer"),
    (("explain", *SMALL, "--array", "bias", "--gpu", "h100"), "'bias' is none of alibi_slopes"),
    (("explain", *SMALL, "--array", "sinks:", "--gpu", "h100"), "'sinks:' is none of"),
    (("explain", *SMALL, *["--array", "sinks"] * 2, "--gpu", "h100"), "comes once"),
    (("explain", *SMALL, "--dropout", "1", "--gpu", "h100"), "dropout_p must be 0 or more"),
    (("compile", "--arch", "sm_90a", "--softcap", "3"), "scores are for problems of --for"),
    (("compile", "--arch", "sm_90a", "--lengths", "varlen"), "--lengths is for --for"),
    (
        ("compile", "--arch", "sm_90a", "--decode", "1,1,8,64", "--array", "mask:bool"),
        "--decode: no mask there",
    ),
    (("inspect", "bogus", "--arch", "sm_90a"), "a variant looks like"),
    (("inspect", VARIANT, "--ptx", "--sass"), "not allowed with argument"),
    (
        ("inspect", VARIANT.replace("64, 2, 4", "256, 9, 4"), "--arch", "sm_90a"),
        "bytes of shared memory are needed",
    ),
    (("tune",), "--q"),
    (("tune", *SMALL, *SMALL, "--k", "1,2,128,64"), "as many --k"),
    (("tune", "--standard", "--softcap", "3"), "--standard has scores of its own"),
    (("tune", *SMALL, "--json", "no/such/x.json"), "there is no folder 'no/such'"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_arguments_are_one_line(
    words: tuple[str, ...],
    said: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("cupy")
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    line = the_line(capsys)
    name = words[0] if words[0] in COMMANDS and "unrecognized" not in said else None
    assert line.startswith(f"{PROGRAM} {name}: error: " if name else f"{PROGRAM}: error: ")
    assert said in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    capsys: Captured, tmp_path: Path
) -> None:
    target = tmp_path / "x.json"
    target.touch(mode=0o444)
    assert cli.main(["explore", *SMALL, "--arch", "sm_90a", "--json", str(target)]) == 2
    assert "cannot be written" in the_line(capsys)


NEED_GPU = [
    ("explain", *SMALL),
    ("explore", *SMALL),
    ("compile",),
    ("inspect", VARIANT),
    ("tune", *SMALL),
]


@pytest.mark.parametrize("words", NEED_GPU, ids=lambda words: words[0])
def test_without_a_gpu(
    words: tuple[str, ...], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_gpu(monkeypatch)
    assert cli.main(words) == 2
    line = the_line(capsys)
    assert line.startswith(f"{PROGRAM} {words[0]}: error: no GPU here (")
    assert ("--gpu" in line) == (words[0] != "tune")


@pytest.mark.parametrize("words", NEED_GPU, ids=lambda words: words[0])
def test_without_cupy(
    words: tuple[str, ...], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "cupy")
    assert cli.main(words) == 2
    line = the_line(capsys)
    assert "CuPy is missing" in line
    assert ("--gpu" in line) == (words[0] == "explain")  # which needs no CuPy for a named one


def test_without_matplotlib(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "matplotlib")
    assert cli.main(["explore", *SMALL, "--arch", "sm_90a", "--plot", "x.png"]) == 2
    line = the_line(capsys)
    assert line.endswith('matplotlib is needed: pip install ".[explore]" in a clone of cufa')


def test_cupy_without_a_place_for_its_cache(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, name: str, *_: object) -> None:
        if name == "cupy":
            raise PermissionError(13, "Permission denied", "/.cupy")

    hide(monkeypatch, "cupy")
    monkeypatch.delitem(sys.modules, "cupy")
    finder = type("Finder", (), {"find_spec": fail})
    monkeypatch.setattr(sys, "meta_path", [finder(), *sys.meta_path])
    assert cli.main(["explore", *SMALL, "--arch", "sm_80"]) == 2
    assert "'/.cupy'): set CUPY_CACHE_DIR" in the_line(capsys)
    assert cli.main(["info"]) == 0


def test_a_missing_compiler_is_said_shortly(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc

    def fail() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13": No such file: libnvrtc.so.13\n')

    monkeypatch.setattr(nvrtc, "getVersion", fail)
    assert cli.main(["inspect", VARIANT, "--arch", "sm_80"]) == 2
    line = the_line(capsys)
    assert 'NVRTC is missing (Failure finding "libnvrtc.so.13"): pip install' in line


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_without_standard_output() -> None:
    command = f"{sys.executable} -m cufa explain --q 1,2,128,64 --gpu h100 >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cufa", "inspect", VARIANT, "--source"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 1


def test_a_warning_is_one_line(capsys: Captured) -> None:
    path = tuned.user_path(device.named("h100"))
    path.parent.mkdir(parents=True)
    path.write_text("damaged")
    assert cli.main(["explain", *SMALL, "--gpu", "h100"]) == 0
    out, err = capsys.readouterr()
    assert "default for float16" in out
    assert err.startswith(f"{PROGRAM}: warning: {path} is ignored")
    assert err.count("\n") == 1


def test_ctrl_c_in_any_command(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cufa.cli.explain.Planner", stop)
    assert cli.main(["explain", *SMALL, "--gpu", "h100"]) == 130
    assert the_line(capsys) == f"{PROGRAM} explain: interrupted"


@pytest.mark.parametrize("kind", [OSError, MemoryError, RuntimeError])
def test_what_runs_out_is_one_line(
    kind: type[Exception], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise kind("No space\nleft")

    monkeypatch.setattr("cufa.cli.explain.Planner", fail)
    assert cli.main(["explain", *SMALL, "--gpu", "h100"]) == 1
    assert "No space left" in the_line(capsys)


# -- explain ---------------------------------------------------------------------------------------


def fields(text: str) -> dict[str, str]:
    """Return the first word of each line, and the one behind it."""
    return {words[0]: words[1] for words in map(str.split, text.splitlines())}


@pytest.mark.parametrize(
    ("gpu", "stages"),
    [(("--gpu", "A100"), "2"), (("--arch", "sm_86"), "1")],
    ids=["a100", "sm_86"],
)
def test_explain_names_every_field(gpu: tuple[str, str], stages: str, capsys: Captured) -> None:
    problem = ("--q", "4,32,4096,128", "--k", "4,8,4096,128", "--dtype", "bfloat16", "--causal")
    assert cli.main(["explain", *problem, *gpu]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = fields(out)
    variant = Variant(
        "fa2_mma", "bfloat16", 128, 128, 128, 32, int(stages), 4, 2, score=("Causal",)
    )
    fields_of_it = {**variant._asdict(), "score": "Causal"}
    for flag in ("ping_pong", "unified", "whole", "schedule"):  # which other kernels have
        assert flag not in found
        del fields_of_it[flag]
    assert {name: found[name] for name in fields_of_it} == {
        name: str(value) for name, value in fields_of_it.items()
    }
    assert f"variant          {variant}\n" in out
    assert found["grid"] == str(4 * 32 * 4096 // 128)
    assert "blocks for 128 heads x 32 tiles of queries" in out
    assert found["block"] == "128"
    assert out.rstrip().endswith("default for bfloat16")


def test_explain_persistent_blocks(capsys: Captured) -> None:
    """Fewer blocks than tiles, and a group of heads in one tile."""
    words = ["explain", "--q", "1,64,16384,128", "--k", "1,8,16384,128", "--dtype", "bfloat16"]
    assert cli.main([*words, "--kernel", "fa3_wgmma", "--gpu", "h200"]) == 0
    chosen = plan_tiles(Problem.of_shapes((1, 64, 16384, 128), *[(1, 8, 16384, 128)] * 2), H200)
    out, _ = capsys.readouterr()
    assert f"{chosen.grid} blocks for 64 heads x {chosen.q_tiles} tiles of queries\n" in out
    assert fields(out)["schedule"] == "Plain"
    words = ["explain", "--q", "1,32,1,128", "--k", "1,8,99,128", "--gpu", "h200"]
    assert cli.main([*words, "--kernel", "fa3_wgmma"]) == 0
    assert "8 blocks for 8 groups of 4 heads x 1 tile of queries\n" in capsys.readouterr().out


def test_explain_8_bits(capsys: Captured) -> None:
    words = ["--q", "4,32,4096,100", "--dtype", "bfloat16", "--precision", "fp8", "--gpu", "h200"]
    assert cli.main(["explain", *words]) == 0
    out, _ = capsys.readouterr()
    found = fields(out)
    assert found["kernel"] == "fp8_wgmma"
    assert (found["bm"], found["bn"], found["block"]) == ("192", "128", "512")
    assert "132 blocks for 128 heads x 22 tiles of queries\n" in out
    assert "in 8 bits" in out


def test_explain_few_queries(capsys: Captured) -> None:
    """Many sequences are not split."""
    found = {}
    for batch in (2, 256):
        q, k = (f"{batch},{heads}" for heads in ("32,1,128", "8,512,128"))
        assert cli.main(["explain", "--q", q, "--k", k, "--gpu", "h200"]) == 0
        found[batch] = fields(capsys.readouterr().out)
    assert (found[2]["split"], found[256]["split"]) == ("keys,", "nothing;")
    assert int(found[2]["pieces"]) > 0
    assert "pieces" not in found[256]


def test_explain_knows_what_becomes_of_the_scores(capsys: Captured) -> None:
    words = ["explain", *SMALL, "--gpu", "h100", "--window", "9,none", "--softcap", "30"]
    words += ["--array", "sinks", "--array", "bias:float32", "--dropout", "0.1"]
    assert cli.main(words) == 0
    out, _ = capsys.readouterr()
    assert "softcap 30, bias, window 9,none, sinks, dropout 0.1" in out
    assert "FineSoftcap, BiasFloat32, WindowLeft, Sinks, Dropout" in out


@pytest.mark.parametrize(
    ("flags", "part"), [((), "<Softcap>"), (("--return-lse",), "<FineSoftcap>")]
)
def test_explain_a_softcap_beside_a_log_sum_exp(
    flags: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["explain", *SMALL, "--gpu", "h100", "--dtype", "bfloat16", "--softcap", "30", *flags]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert part in out
    assert ("softcap 30, log-sum-exp" in out) == bool(flags)


def test_explain_a_forced_kernel(capsys: Captured) -> None:
    words = ["explain", *SMALL, "--dtype", "float32", "--kernel", "fa1_fp32", "--gpu", "a100"]
    assert cli.main(words) == 0
    out, _ = capsys.readouterr()
    assert fields(out)["workspace"] == str(4 * 2 * 2 * 128)
    assert "forced kernel" in out


def test_explain_says_when_a_table_was_used(capsys: Captured) -> None:
    gpu = device.named("h100")
    problem = cli.parser.one_problem(
        cli._parser().parse_args(["explain", "--q", "4,32,4096,128", "--gpu", "h100"])
    )
    entry = Entry("fa2_mma", TileShape(64, 32, 2, 4, 1))
    tuned.store(gpu, {problem_class(problem, gpu): entry}, "a test")
    assert cli.main(["explain", "--q", "4,32,4096,128", "--gpu", "h100"]) == 0
    out, _ = capsys.readouterr()
    assert "tuned on" in out
    assert fields(out)["bn"] == "32"


# -- info ------------------------------------------------------------------------------------------


def test_info_without_a_gpu(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_gpu(monkeypatch)
    assert cli.main(["info"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"cufa          {cufa.__version__}, kernel sources " in out
    assert "GPU           none (" in out
    assert f"{os.environ['CUFA_CACHE_DIR']}, 0 bytes" in out
    assert "computed on the CPU" in out


def test_info_without_cupy(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "cupy")
    assert cli.main(["info"]) == 0
    out, _ = capsys.readouterr()
    assert "CuPy is missing" in out
    assert "GPU           unknown without CuPy" in out


def test_info_of_a_cache_that_is_no_folder(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file"))
    assert cli.main(["info"]) == 0
    assert f"cufa's cache  {tmp_path / 'file'}, which is no folder\n" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="has no modes")
def test_info_of_a_cache_that_is_ignored(capsys: Captured) -> None:
    folder = disk_cache.folder()
    disk_cache.write(folder / "kernels" / "one", bytes(100))
    for place in (folder, folder / "kernels"):
        place.chmod(0o775)
        assert cli.main(["info"]) == 0
        place.chmod(0o755)
        line = f"cufa's cache  {folder}, 100 bytes; {place} is ignored: others may write it, see "
        assert line in capsys.readouterr().out


def test_info_without_a_home(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("CUFA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert cli.main(["info"]) == 0
    assert "cufa's cache  none: there is no home folder" in capsys.readouterr().out


def test_info_names_the_kernels_of_a_gpu(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, cupy: Any, tmp_path: Path
) -> None:
    gpu = device.named("rtx4090")
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)
    monkeypatch.setattr(device, "of_id", lambda number: gpu)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernel").write_bytes(bytes(2048))
    problem = cli.parser.one_problem(
        cli._parser().parse_args(["explain", "--q", "4,32,4096,128", "--gpu", "rtx4090"])
    )
    entry = Entry("fa2_mma", TileShape(64, 32, 1, 4, 1))
    tuned.store(gpu, {problem_class(problem, gpu): entry}, "a test")
    assert cli.main(["info"]) == 0
    out, _ = capsys.readouterr()
    assert "GPU           rtx4090, sm_89, 128 multiprocessors" in out
    assert f"{tmp_path}, 2.0 KiB" in out
    assert "user's table: 1 " in out
    assert (
        "  float16     fa2_mma: fa2_mma<float16, 128, 128, 64, 32, 1, 4, 1, Score<>, Dense> (tuned"
        in out
    )
    assert "  float32     fa2_fp32: " in out


@pytest.mark.gpu
def test_info_of_this_machine(capsys: Captured) -> None:
    assert cli.main(["info"]) == 0
    out, _ = capsys.readouterr()
    assert "multiprocessors" in out
    assert "fa2_fp32" in out
