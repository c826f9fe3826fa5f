"""The command line of the benchmarks: options, what they mean, and whether they make sense."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from benchmarks import before, drawn
from benchmarks.backward_cases import FAMILIES as GRADIENTS
from benchmarks.backward_cases import cases as gradient_cases
from benchmarks.cells import (
    FAMILIES,
    FP32_HEAD_DIMS,
    GQA_SEQS,
    PREFILL_HEAD_DIMS,
    SCORES,
    SEQS,
    TABLES,
    Cell,
    fp8_cells,
    gqa_cells,
    standard_cells,
)
from benchmarks.model_shapes import chosen
from cufa.cli import machine
from cufa.specs import ATTENTION_KERNELS

HALF_DTYPES = ("bfloat16", "float16")
PREFILL_PEERS = (
    "fa2",
    "cudnn",
    "efficient",
    "flash_attn_2",
    "flash_attn_3",
    "flash_attn_4",
    "flashinfer",
    "cupy",
)
FP32_PEERS = ("efficient", "math", "cupy", "cufa_fa1")
MODEL_PEERS = ("cudnn", "fa2", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flashinfer")
_TABLES = ("prefill", "gqa", "fp32")
_WITH_PEERS = (*_TABLES, "models", "decode", "masks", "backward", "fp8")
LEAST_NEW = 16
GENERATORS = ("Llama-3.1-8B", "tiny")
GENERATE_PEERS = ("transformers",)
MASK_PEERS = ("cudnn",)
BACKWARD_PEERS = (
    *("cudnn", "fa2", "efficient"),
    *("flash_attn_2", "flash_attn_3", "flash_attn_4", "cufa_causal"),
)
FP8_PEERS = ("fa3_fp8", "cudnn_bf16", "cufa_bf16")
DECODE_PEERS = ("cudnn", "fa2", "flash_attn_3_cache", "flash_attn_4")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        description="Measure cufa against its peers, and make tables and plots from the results."
    )
    commands = top.add_subparsers(dest="bench", required=True)
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--out", type=Path, help="result file (default: docs/benchmarks/<gpu>-...)")
    run.add_argument("--commit", help="commit to record where git cannot tell")
    part = argparse.ArgumentParser(add_help=False)
    part.add_argument(
        "--append", action="store_true", help="keep the result file's rows of other cells"
    )
    data = argparse.ArgumentParser(add_help=False)
    data.add_argument("--seed", type=int, default=1, help="seed of the random data")
    race = argparse.ArgumentParser(add_help=False, parents=[data])
    race.add_argument("--rounds", type=_count, default=13, help="samples of a contestant, at most")
    race.add_argument(
        "--rest", type=float, default=0, help="seconds between rounds (default: 0, a warm card)"
    )
    cells = argparse.ArgumentParser(add_help=False)
    cells.add_argument("--head-dim", type=int, nargs="+", help="head dims of the table")
    cells.add_argument("--seq", type=int, nargs="+", default=SEQS, help="sequence lengths")
    table = argparse.ArgumentParser(add_help=False, parents=[race, cells])
    half = argparse.ArgumentParser(add_help=False)
    half.add_argument("--kernel", default="auto", help="kernel forced on cufa (default: auto)")
    half.add_argument(
        "--peers",
        nargs="*",
        default=list(PREFILL_PEERS),
        help=f"besides the default, {' '.join(PREFILL_PEERS)}: flex (compiles for long), math, "
        "cufa_bfloat16 (beside float16)",
    )

    prefill = commands.add_parser(
        "prefill", parents=[run, table, half], help="16-bit prefill table"
    )
    gqa = commands.add_parser(
        "gqa", parents=[run, race, half], help="16-bit table of grouped heads, 64 on 8"
    )
    gqa.add_argument("--seq", type=int, nargs="+", default=GQA_SEQS, help="sequence lengths")
    for command, dtypes in ((prefill, HALF_DTYPES), (gqa, HALF_DTYPES[:1])):
        command.add_argument("--dtype", nargs="+", default=dtypes, choices=HALF_DTYPES)

    commands.add_parser(
        "headdims", parents=[run, race], help="head dims against each other, in one race"
    )

    fp32 = commands.add_parser("fp32", parents=[run, table], help="float32 table")
    fp32.add_argument("--kernel", default="fa2_fp32", help="kernel forced on cufa")
    fp32.add_argument("--peers", nargs="*", default=list(FP32_PEERS), help="besides cufa")
    for command in (prefill, gqa, fp32):
        command.add_argument("--scores", default="normal", choices=SCORES, help="of which data")
        command.add_argument(
            "--timing",
            default="auto",
            choices=("auto", "graph", "events"),
            help="by CUDA-graph replay, which leaves the host's time out, by bursts of calls "
            "between events, or auto, the default: replay where a call is shorter than 200 us",
        )

    models = commands.add_parser(
        "models", parents=[run, race, part], help="shapes of real models, by graph replay"
    )
    models.add_argument("--models", nargs="+", help="names of models (default: all)")
    models.add_argument("--kernel", default="auto", help="kernel forced on cufa (default: auto)")
    models.add_argument("--peers", nargs="*", default=list(MODEL_PEERS), help="besides cufa")

    decode = commands.add_parser(
        "decode", parents=[run, race], help="few new tokens and long caches, by graph replay"
    )
    decode.add_argument("--peers", nargs="*", default=list(DECODE_PEERS), help="besides cufa")
    decode.add_argument(
        "--before", help="also a package as it was: git's revision, or a folder with it"
    )
    decode.set_defaults(kernel="auto")

    decode8 = commands.add_parser(
        "decode8", parents=[run, race], help="the same over K and V of 8 bits"
    )
    decode8.set_defaults(kernel="auto")

    masks = commands.add_parser(
        "masks", parents=[run, race], help="windows, biases and other features, by graph replay"
    )
    masks.add_argument("--peers", nargs="*", default=list(MASK_PEERS), help="besides cufa")
    masks.set_defaults(kernel="auto")

    backward = commands.add_parser(
        "backward", parents=[run, race, part], help="gradients, by graph replay"
    )
    backward.add_argument(
        "--only", nargs="+", default=list(GRADIENTS), choices=GRADIENTS, help="(default: all)"
    )
    backward.add_argument("--head-dim", type=int, nargs="+", help="of these (default: all)")
    backward.add_argument("--peers", nargs="*", default=list(BACKWARD_PEERS), help="besides cufa")
    backward.set_defaults(kernel="auto")

    fp8 = commands.add_parser(
        "fp8", parents=[run, race, part], help="8 bits on Hopper, by graph replay"
    )
    fp8.add_argument("--head-dim", type=int, nargs="+", help="of these (default: all)")
    fp8.add_argument("--peers", nargs="*", default=list(FP8_PEERS), help="besides cufa")
    fp8.set_defaults(kernel="auto")

    commands.add_parser("fp8-error", parents=[run, data], help="errors of 8 bits on hard data")

    generate = commands.add_parser(
        "generate", parents=[run], help="text by a model of random weights, tokens a second"
    )
    generate.add_argument(
        "--model", default=GENERATORS[0], choices=GENERATORS, help="(default: %(default)s)"
    )
    generate.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="(default: 1 16)")
    generate.add_argument("--prompt", type=int, default=512, help="tokens (default: 512)")
    generate.add_argument("--new", type=int, default=256, help="tokens (default: 256)")
    generate.add_argument("--rounds", type=_count, default=3, help="(default: 3)")
    generate.add_argument(
        "--peers", nargs="*", default=list(GENERATE_PEERS), choices=GENERATE_PEERS
    )

    host = commands.add_parser("host", parents=[run], help="host cost of small calls")
    host.add_argument("--kernel", default="auto", help="kernel forced on cufa (default: auto)")

    cpu = commands.add_parser(
        "cpu", parents=[run, data], help="NumPy arrays on one thread of the CPU; needs no GPU"
    )
    cpu.add_argument("--rounds", type=_count, default=9, help="calls of each (default: 9)")

    jit = commands.add_parser("jit", parents=[run], help="first call in a new process")
    jit.add_argument(
        "--kernel", nargs="+", default=["auto", "fa2_mma"], help="kernels for bfloat16"
    )
    jit.add_argument(
        "--features",
        nargs="+",
        type=int,
        choices=(64, 128),
        metavar="D",
        help="instead, each feature of the table of masks, of these head dims, once",
    )
    jit.add_argument("--rounds", type=_count, default=3, help="the least counts (default: 3)")
    jit.add_argument(
        "--at-once", type=_count, default=1, help="processes at the same time (default: 1)"
    )

    regret = commands.add_parser(
        "regret",
        parents=[run, part],
        help="the planner's choice against the fastest variant, for problems drawn by a seed",
    )
    regret.add_argument("--seed", type=int, default=1, help="which problems")
    regret.add_argument("--problems", type=int, default=60, help="how many (default: 60)")
    regret.add_argument(
        "--kernels",
        nargs="+",
        choices=[name for name, kernel in ATTENTION_KERNELS.items() if "bfloat16" in kernel.dtypes],
        help="whose variants are explored (default: that which the planner takes)",
    )
    regret.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="the I-th of N parts of them"
    )

    costs = commands.add_parser(
        "costs", parents=[run], help="times of all variants that may be useful, in many problems"
    )
    costs.add_argument("--seed", type=int, default=101, help="which problems")
    costs.add_argument("--seconds", type=float, help="after which no problem is begun")

    refactor = commands.add_parser(
        "refactor",
        parents=[run, data, cells, part],
        help="the standard tables, models, masks and decoding before a change and after",
    )
    refactor.add_argument(
        "--before", required=True, help="git's revision before, or a folder with the package cufa"
    )
    refactor.add_argument(
        "--tables", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="(default: all)"
    )
    refactor.add_argument("--rounds", type=_count, help="samples of each (default: 40)")
    fit = commands.add_parser("fit", help="the planner's costs from a result of costs")
    fit.add_argument("file", type=Path, help="such as docs/benchmarks/h200-costs.json")

    report = commands.add_parser("report", help="pages and plots from result files")
    report.add_argument("files", type=Path, nargs="*", help="default: all of docs/benchmarks")
    return top


def _count(text: str) -> int:
    """Return how many: one or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text!r}")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    """Return what "2/3" says."""
    first, slash, last = text.partition("/")
    if not (slash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2/3, the second of three parts")
    return int(first), int(last)


def drawn_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells of a regret run; ValueError where there are none."""
    found = drawn.part_of(drawn.cells(options.seed, options.problems), *options.part)
    if not found:
        raise ValueError("--problems and --part leave none")
    return found


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells of a prefill, gqa or fp32 run.

    Raises
    ------
    ValueError
        When a head dim or a length does not divide the standard table's sizes, or is not positive.
    """
    if options.bench == "fp32":
        return standard_cells("float32", options.head_dim or FP32_HEAD_DIMS, options.seq)
    cells: list[Cell] = []
    for dtype in options.dtype:
        if options.bench == "gqa":
            cells += gqa_cells(dtype, options.seq)
            continue
        head_dims = options.head_dim or PREFILL_HEAD_DIMS
        cells += standard_cells(dtype, head_dims, options.seq)
    return cells


def forced_kernel(options: argparse.Namespace) -> str | None:
    """Return the kernel forced on cufa in all of a run, as `cufa.attention` takes it, or None."""
    if options.bench not in (*_WITH_PEERS, "host") or options.kernel == "auto":
        return None
    return str(options.kernel)


def check(options: argparse.Namespace) -> None:
    """Check the options of a measurement, and that this machine can make it.

    Raises
    ------
    ValueError
        The options make no sense.
    CommandError
        CuPy, NVRTC or a GPU is missing.
    """
    if options.bench == "cpu":
        return
    if options.bench in _TABLES:
        cells_of(options)
    if options.bench == "regret":
        drawn_of(options)
    if options.bench == "fp8":
        fp8_cells(options.head_dim)
    if options.bench == "backward":
        gradient_cases(options.only, options.head_dim)
    if options.bench == "models":
        chosen(options.models)
    if getattr(options, "rest", 0) < 0:
        raise ValueError("--rest must be at least 0")
    if options.bench == "generate":
        if min(*options.batch, options.prompt) < 1:
            raise ValueError("--batch and --prompt must be at least 1")
        if options.new < LEAST_NEW:
            raise ValueError(f"--new must be at least {LEAST_NEW}: the first tokens do not count")
    if getattr(options, "before", None) is not None:
        before.resolve(options.before)
    if options.bench == "refactor":
        for name in TABLES.keys() & options.tables:
            TABLES[name].cells(options.head_dim, options.seq)
    machine.check_compiler()
    if options.bench in _WITH_PEERS:
        from benchmarks import backward_peers, fp8, peers  # which import CuPy

        makers: dict[str, Collection[str]] = {"backward": backward_peers.PEERS, "fp8": fp8.MAKERS}
        peers.check_names(options.peers, makers.get(options.bench, peers.PEERS))
    device = machine.current_gpu("calls are timed, and need one")
    for name in getattr(options, "kernels", None) or ():
        if not ATTENTION_KERNELS[name].runs_on(device):
            raise ValueError(f"--kernels: {name} does not run on {device.name}")
