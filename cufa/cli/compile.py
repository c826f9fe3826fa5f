"""``compile``: compile kernels ahead of time, into cufa's cache folder.

Compile the kernels that the planner would choose, so that a first call finds
them: for a container image, or where nobody may wait. Name your shapes with --for
or --decode: a few seconds. Without, all kernels that cufa.attention can choose on
that GPU are compiled, hundreds of them, some 4 seconds each on a core. With --arch,
for every well-known GPU of it. Kernels that are there already are skipped.
CUFA_CACHE_DIR says where they go. It must be the same when they are used, and so
must NVRTC.

Examples
--------
--arch sm_90a --for 4,32,4096,128:4,8,4096,128 1,32,1,128 --dtype bfloat16
--gpu rtx4090 --dtype float16 --causal
--arch sm_90a --decode 16,32,1,128:16,8,8192,128 --page-size 64 --dtype bfloat16
--arch sm_90a --decode 16,32,1,128:16,8,8192,128 --cache-dtype fp8
--arch sm_90a --for 1,64,4096,64:1,8,4096,64 --window 127,0 --beside sinks
--arch sm_90a --for 4,32,4096,128 --dtype bfloat16 --causal --backward
--arch sm_90a --for 4,32,4096,128 --dtype bfloat16 --precision fp8
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing

from cufa import device as devices
from cufa import disk_cache
from cufa.cli import explain_backward, machine, table
from cufa.cli.parser import (
    CommandError,
    Parser,
    add_device,
    add_flag,
    add_jobs,
    add_masks,
    add_precision,
    add_scores,
    has_scores,
    masks_of,
    problem_of,
)
from cufa.cli.values import Shapes, count, shapes
from cufa.compiler import cubins, elf, nvrtc
from cufa.compiler.nvrtc import CompileError
from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.explorer import build
from cufa.explorer.table import counted
from cufa.features.parts import part_named
from cufa.planner.attention import decode_variants, plan
from cufa.planner.decode import plan_splits
from cufa.planner.fp8 import kernels
from cufa.planner.plan import plan_tiles
from cufa.planner.problem_class import ProblemClass
from cufa.planner.rules import all_variants
from cufa.problem.problem import Problem
from cufa.specs import ATTENTION_KERNELS, KERNELS, default_kernel
from cufa.specs.decode_block import DECODE_SCORE
from cufa.specs.instance import Instance
from cufa.specs.spec import HeadDims, Spec
from cufa.specs.variant import Variant
from cufa.tuned import user_table

_CACHE_DTYPES = {
    spec.name.removeprefix("decode_"): spec.kv_dtype
    for spec in KERNELS.values()
    if spec.kv_dtype is not None
}
"""Dtypes of caches of 8 bits, by the words for them."""

_SECONDS = 4.0
"""A kernel's compilation on one core: 424 kernels of bfloat16 took 15 minutes on two."""


def add(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--for",
        dest="problems",
        type=shapes,
        nargs="+",
        metavar="Q[:K[:V]]",
        help="shapes B,H,S,D of problems; K is like Q, and V like K, where left out",
    )
    parser.add_argument(
        "--decode",
        dest="decodes",
        type=shapes,
        nargs="+",
        metavar="Q:K[:V]",
        help="the same of problems of cufa.decode, whose caches have room for S keys a sequence",
    )
    parser.add_argument(
        "--page-size",
        type=count,
        metavar="N",
        help="with --decode: keys of a page, of caches that are paged",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=_CACHE_DTYPES,
        help="with --decode: of keys and values in 8 bits, with float16 and bfloat16 queries",
    )
    add_scores(parser.add_argument_group("the scores, with --for or --decode"))
    parser.add_argument(
        "--lengths",
        choices=("padded", "varlen"),
        help="with --for: such problems with lengths_k or lengths_q, or as batches of "
        "cufa.attention_varlen",
    )
    text = "with --for: the kernels of their gradients, too; forward with the log-sum-exp"
    add_flag(parser, "--backward", text)
    add_precision(parser, "with --for: the kernels of such calls in 8 bits instead")
    parser.add_argument("--dtype", choices=DTYPES, help="one element type (default: all)")
    add_masks(parser)
    add_jobs(parser)
    add_device(
        parser,
        "GPU to compile for: this machine's by default.",
        of_arch="all well-known GPUs of it",
    )


def run(options: argparse.Namespace) -> int:
    """Compile what is missing."""
    machine.check_compiler()
    gpus = _gpus(options)
    arch, names = gpus[0].arch, ", ".join(gpu.name for gpu in gpus)
    # GPUs of one architecture plan alike for the most part.
    variants = list(dict.fromkeys(v for gpu in gpus for v in _variants(options, gpu)))
    machine.check_cache("kernels")
    missing = [variant for variant in variants if not _is_there(variant, arch)]
    there = len(variants) - len(missing)
    if missing:
        kernels, duration = counted(len(missing), "kernel"), _duration(missing, options.jobs)
        print(f"{kernels} to compile for {arch}, about {duration}", flush=True)
    started = time.perf_counter()
    written: list[Variant | Instance] = []
    failed: list[Variant | Instance] = []
    try:
        with closing(build.compile_all(missing, arch, options.jobs)) as built:
            for done, each in enumerate(built, 1):
                stored = _store(each, arch, f"[{done}/{len(missing)}]")
                (written if stored else failed).append(each.variant)
    finally:  # also after Ctrl-C
        wall = time.perf_counter() - started
        print(
            f"{counted(len(written), 'kernel')} for {arch} ({names}) written in "
            f"{wall:.1f} s; {there} there before" + (f", {len(failed)} failed" if failed else "")
        )
        print(disk_cache.folder() / "kernels")
    return 1 if failed else 0


def _duration(missing: list[Variant | Instance], jobs: int | None) -> str:
    """Return about how long kernels take to compile."""
    threads = min(jobs or os.cpu_count() or 1, len(missing))
    seconds = len(missing) * _SECONDS / threads
    shown = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    return f"{shown} on {counted(threads, 'thread')}"


def _gpus(options: argparse.Namespace) -> list[Device]:
    """Return the GPUs to compile for, all of one architecture."""
    if options.arch is not None:
        return devices.all_of_arch(options.arch.arch)
    return [machine.chosen_gpu(options)]


def _is_there(variant: Variant | Instance, arch: str) -> bool:
    """Whether a kernel was compiled before, and its file is whole."""
    found = cubins.find(variant, arch, nvrtc.version())
    try:
        return found is not None and bool(elf.symbol(found))
    except ValueError:
        return False


def _store(built: build.Built, arch: str, position: str) -> bool:
    """Keep a kernel and say so, or say why there is none."""
    variant, compiled, seconds = built
    if isinstance(compiled, CompileError):
        print(f"{position} {variant} failed: {' '.join(compiled.log.split())}", flush=True)
        return False
    cubins.store(variant, arch, nvrtc.version(), compiled.cubin)
    size = table.size_text(len(compiled.cubin))
    print(f"{position} {variant}  {seconds:.1f} s, {size}", flush=True)
    return True


def _variants(options: argparse.Namespace, device: Device) -> list[Variant | Instance]:
    """Return what to compile for a GPU."""
    masks = masks_of(options)
    dtypes = DTYPES if options.dtype is None else (options.dtype,)
    for name in ("page_size", "cache_dtype"):
        if getattr(options, name) and not options.decodes:
            raise CommandError(f"--{name.replace('_', '-')} is for --decode")
    if options.lengths and not options.problems:
        raise CommandError("--lengths is for --for")
    if options.backward and not options.problems:
        raise CommandError("--backward is for --for")
    if options.precision and (options.backward or options.decodes or not options.problems):
        raise CommandError("--precision is for --for, without --backward and --decode")
    if options.problems is None and options.decodes is None:
        if has_scores(options):
            raise CommandError("scores are for problems of --for or --decode")
        own = [v for v in _all(device) if v.causal in masks]
        return [v for v in [*own, *decode_variants(device, masks)] if v.dtype in dtypes]

    def problems(given: list[Shapes] | None) -> list[Problem]:
        return [
            problem_of(each, dtype, causal, options)
            for each in given or ()
            for dtype in dtypes
            for causal in masks
        ]

    try:
        table = user_table(device)
        asked = _with_lengths(problems(options.problems), options.lengths)
        if options.precision:
            return [kernel for each in asked for kernel in kernels(each, device)]
        if options.backward:
            asked = [each._replace(returns_lse=True) for each in asked]
        found: list[Variant | Instance] = []
        for each in asked:
            # And the kernel that replaces decode in a capture without memory for it.
            found += (choose(each, device, table=table).variant for choose in (plan, plan_tiles))
        for each in problems(options.decodes):
            in_cache = _of_decode(each, options.page_size, options.cache_dtype)
            if in_cache is not None:
                found.append(plan_splits(in_cache, device).variant)
        for each in asked if options.backward else ():
            steps = explain_backward.planned(each, device, deterministic=False).steps
            found += (step.instance for step in steps)
        return found
    except ValueError as error:
        raise CommandError(error) from error


def _with_lengths(problems: list[Problem], how: str | None) -> list[Problem]:
    """Return problems whose sequences may have other lengths, the longest ones as they are."""
    if how is None:
        return problems
    if how == "padded":
        return [problem._replace(kv="Padded") for problem in problems]
    return [
        problem._replace(
            batch=1,
            seq_q=problem.batch * problem.seq_q,
            seq_kv=problem.batch * problem.seq_kv,
            kv="Varlen",
            sequences=problem.batch,
            max_seqlen_q=problem.seq_q,
            max_seqlen_k=problem.seq_kv,
        )
        for problem in problems
    ]


def _of_decode(problem: Problem, page_size: int | None, cache_dtype: str | None) -> Problem | None:
    """Return the problem of `cufa.decode` whose sequences all have the keys of a problem.

    None for float32 queries and caches of 8 bits, which no kernel takes.
    """
    others = [name for name in problem.score if name not in DECODE_SCORE]
    if others:
        raise CommandError(f"--decode: no {part_named(others[0]).argument} there")
    found = problem.in_cache
    if cache_dtype is not None:
        found = found._replace(kv_dtype=_CACHE_DTYPES[cache_dtype])
        if found.dtype not in KERNELS[f"decode_{cache_dtype}"].dtypes:
            return None
    if page_size is None:
        return found
    pages = problem.batch * -(-problem.seq_kv // page_size)
    return found._replace(kv="Paged", pages=pages, page_size=page_size)


def _all(device: Device) -> list[Variant]:
    """Return the variants of attention's own kernels, by the rules and by the user's table."""
    table = user_table(device)
    softcaps = {row.softcap for row in DTYPES.values()}
    tuned_ones = (
        Variant(kernel.name, dtype, *head_dims, **entry.shape._asdict(), score=key.score)
        for key, entry in (table.entries.items() if table is not None else ())
        for kernel in (ATTENTION_KERNELS.get(entry.kernel),)
        if kernel is not None and kernel.runs_on(device)
        for dtype in kernel.dtypes
        for row in (DTYPES[dtype],)
        if row.bytes == key.element_bytes
        and softcaps.intersection(key.score) <= {row.softcap, row.softcap_with_lse}
        for head_dims in _head_dims(key, kernel, dtype, device)
    )
    legal = (variant for variant in tuned_ones if variant.illegal(device) is None)
    return list(dict.fromkeys([*all_variants(device), *legal]))


def _head_dims(key: ProblemClass, kernel: Spec, dtype: str, device: Device) -> list[HeadDims]:
    """Return the head dims of a kernel that problems of a class run with.

    The class has those of the default kernel, whose steps may be wider.
    """
    of_class = default_kernel(dtype, device)
    return [
        pair
        for pair in kernel.head_dims(device)
        if of_class.padded(device, *pair) == (key.head_dim, key.head_dim_v)
    ]
