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
--arch sm_90a --for 1,64,4096,64:1,8,4096,64 --window 127,0 --array sinks
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
from cufa.cli import machine, parser, table
from cufa.cli.explain import plan_of_gradients
from cufa.cli.values import count, shapes
from cufa.compiler import cubins, elf, nvrtc
from cufa.compiler.nvrtc import CompileError
from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.explorer import build
from cufa.explorer.table import counted
from cufa.features.parts import part_named
from cufa.planner.attention import Planner, decode_variants
from cufa.planner.decode import plan_splits
from cufa.planner.fp8 import kernels
from cufa.planner.plan import plan_tiles
from cufa.planner.rules import all_variants
from cufa.problem.problem import Problem
from cufa.specs import ATTENTION_KERNELS, KERNELS, default_kernel
from cufa.specs.decode_block import DECODE_SCORE
from cufa.specs.instance import Instance
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


def add(command: parser.Parser) -> None:
    """Add the command's options."""
    text = "shapes B,H,S,D of problems; K is like Q, and V like K, where left out"
    command.add_argument(
        "--for", dest="problems", type=shapes, nargs="+", metavar="Q[:K[:V]]", help=text
    )
    text = "the same of problems of cufa.decode, whose caches have room for S keys a sequence"
    command.add_argument(
        "--decode", dest="decodes", type=shapes, nargs="+", metavar="Q:K[:V]", help=text
    )
    text = "with --decode: keys of a page, of caches that are paged"
    command.add_argument("--page-size", type=count, metavar="N", help=text)
    text = "with --decode: of keys and values in 8 bits, with float16 and bfloat16 queries"
    command.add_argument("--cache-dtype", choices=_CACHE_DTYPES, help=text)
    parser.add_scores(command.add_argument_group("the scores, with --for or --decode"))
    text = (
        "with --for: such problems with lengths_k or lengths_q, or as batches of "
        "cufa.attention_varlen"
    )
    command.add_argument("--lengths", choices=("padded", "varlen"), help=text)
    text = "with --for: the kernels of their gradients, too; forward with the log-sum-exp"
    parser.add_flag(command, "--backward", text)
    parser.add_precision(command, "with --for: the kernels of such calls in 8 bits instead")
    command.add_argument("--dtype", choices=DTYPES, help="one element type (default: all)")
    parser.add_masks(command)
    parser.add_jobs(command)
    why = "GPU to compile for: this machine's by default."
    parser.add_device(command, why, of_arch="all well-known GPUs of it")


def run(options: argparse.Namespace) -> int:
    """Compile what is missing."""
    machine.check_compiler()
    gpus = [machine.chosen_gpu(options)]
    if options.arch is not None:
        gpus = devices.all_of_arch(options.arch.arch)
    _check(options)
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
    stored: list[bool] = []
    try:
        with closing(build.compile_all(missing, arch, options.jobs)) as built:
            for done, each in enumerate(built, 1):
                stored.append(_store(each, arch, f"[{done}/{len(missing)}]"))
    finally:  # also after Ctrl-C
        wall, failed = time.perf_counter() - started, stored.count(False)
        print(
            f"{counted(sum(stored), 'kernel')} for {arch} ({names}) written in {wall:.1f} s; "
            f"{there} there before" + (f", {failed} failed" if failed else "")
        )
        print(disk_cache.folder() / "kernels")
    return 1 if failed else 0


def _duration(missing: list[Variant | Instance], jobs: int | None) -> str:
    """Return about how long kernels take to compile."""
    threads = min(jobs or os.cpu_count() or 1, len(missing))
    seconds = len(missing) * _SECONDS / threads
    shown = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    return f"{shown} on {counted(threads, 'thread')}"


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


def _check(options: argparse.Namespace) -> None:
    """Refuse options that need others."""
    if not options.decodes:
        parser.refuse(options, ("page_size", "cache_dtype"), "is for --decode")
    if not options.problems:
        parser.refuse(options, ("lengths", "backward"), "is for --for")
    if options.backward or options.decodes or not options.problems:
        parser.refuse(options, ("precision",), "is for --for, without --backward and --decode")
    if not options.problems and not options.decodes and parser.has_scores(options):
        raise parser.CommandError("scores are for problems of --for or --decode")


def _variants(options: argparse.Namespace, device: Device) -> list[Variant | Instance]:
    """Return what to compile for a GPU."""
    dtypes = DTYPES if options.dtype is None else (options.dtype,)
    if not options.problems and not options.decodes:
        masks = parser.masks_of(options)
        own = [v for v in _all(device) if v.causal in masks]
        return [v for v in [*own, *decode_variants(device, masks)] if v.dtype in dtypes]

    problems = parser.problems_of(options, options.problems, dtypes)
    asked = [_with_lengths(problem, options.lengths) for problem in problems]
    if options.precision:
        return [kernel for each in asked for kernel in kernels(each, device)]
    table = user_table(device)
    found: list[Variant | Instance] = []
    for each in asked:
        whole = each._replace(returns_lse=each.returns_lse or options.backward)
        # And the kernel that replaces decode in a capture without memory for it.
        found.append(Planner(whole, device, table=table)(whole).variant)
        found.append(plan_tiles(whole, device, table=table).variant)
        if options.backward:
            steps = plan_of_gradients(whole, device, deterministic=False).steps
            found += (step.instance for step in steps)
    for each in parser.problems_of(options, options.decodes, dtypes):
        in_cache = _of_decode(each, options.page_size, options.cache_dtype)
        if in_cache is not None:
            found.append(plan_splits(in_cache, device).variant)
    return found


def _with_lengths(problem: Problem, how: str | None) -> Problem:
    """Return a problem whose sequences may have other lengths, the longest ones as they are."""
    if how is None:
        return problem
    if how == "padded":
        return problem._replace(kv="Padded")
    return problem._replace(
        batch=1,
        seq_q=problem.batch * problem.seq_q,
        seq_kv=problem.batch * problem.seq_kv,
        kv="Varlen",
        sequences=problem.batch,
        max_seqlen_q=problem.seq_q,
        max_seqlen_k=problem.seq_kv,
    )


def _of_decode(problem: Problem, page_size: int | None, cache_dtype: str | None) -> Problem | None:
    """Return the problem of `cufa.decode` whose sequences all have the keys of a problem.

    None for float32 queries and caches of 8 bits, which no kernel takes.
    """
    others = [name for name in problem.score if name not in DECODE_SCORE]
    if others:
        raise parser.CommandError(f"--decode: no {part_named(others[0]).argument} there")
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
        for row, of_class in ((DTYPES[dtype], default_kernel(dtype, device)),)
        if row.bytes == key.element_bytes
        and softcaps.intersection(key.score) <= {row.softcap, row.softcap_with_lse}
        for head_dims in kernel.head_dims(device)
        # A class has the head dims of the default kernel, whose steps may be wider.
        if of_class.padded(device, *head_dims) == (key.head_dim, key.head_dim_v)
    )
    legal = (variant for variant in tuned_ones if variant.illegal(device) is None)
    return list(dict.fromkeys([*all_variants(device), *legal]))
