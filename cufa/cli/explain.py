"""``explain``: the kernel, tile and grid that a call would use.

Print the plan that cufa.attention would use for a problem, and where it comes
from: the user's tuned table, or the rules. Nothing is
compiled or run.

Examples
--------
--q 4,32,4096,128 --k 4,8,4096,128 --dtype bfloat16 --causal
--q 1,32,1,128 --k 1,8,8192,128 --gpu h100
--q 4,32,4096,128 --dtype bfloat16 --causal --backward --gpu h200
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from cufa.cli import explain_backward, machine, table
from cufa.cli.parser import (
    CommandError,
    Parser,
    add_device,
    add_flag,
    add_precision,
    add_problem,
    one_problem,
)
from cufa.cli.values import kernel
from cufa.device import Device
from cufa.explorer.table import counted, problem_text
from cufa.planner.attention import Planner
from cufa.planner.decode import DecodePlan
from cufa.planner.fp8 import Fp8Plan, plan_fp8
from cufa.planner.plan import Plan
from cufa.problem.problem import Problem
from cufa.specs import KERNELS
from cufa.tuned import user_table

_MEANING = {
    "dtype": "elements of q, k, v and the result",
    "head_dim": "columns of the Q and K tiles",
    "head_dim_v": "columns of the V and O tiles",
    "bm": "queries of a tile",
    "bn": "keys of a tile",
    "stages": "depth of the K/V ring in shared memory",
    "warps": "warps of a block",
    "blocks_per_sm": "blocks that must fit on a multiprocessor",
    "ping_pong": "whether the warpgroups take turns with the tensor cores",
    "unified": "whether the softmax has a preset maximum",
    "whole": "whether each block has a whole sequence and head to itself",
    "schedule": "how the kernel orders its work",
    "score": "what becomes of the scores before the softmax",
    "kv": "how K and V are found",
}

_OF_8_BITS = {
    **_MEANING,
    "piece": "columns of V of which P V is computed at once",
    "in_flight": "pieces that are computed at once",
}
_ALTERNATIVES = 5  # variants that are shown


def add(parser: Parser) -> None:
    """Add the command's options."""
    add_problem(parser)
    parser.add_argument("--kernel", type=kernel, metavar="NAME", help="a kernel to force")
    add_flag(parser, "--batch-invariant", "the same bits alone and in any batch")
    add_precision(parser, "the plan of such a call in 8 bits")
    add_flag(parser, "--backward", "the plan of cufa.attention_backward")
    add_flag(parser, "--deterministic", "with --backward: sums in a fixed order")
    add_device(parser, "This machine's by default; one that is named need not be here.")


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    problem = one_problem(options)
    _check(options)
    device = machine.chosen_gpu(options)
    if options.backward:
        explain_backward.show(problem, device, options.deterministic)
        return 0
    try:
        if options.precision:
            _print(problem, device, plan_fp8(problem, device, options.kernel))
            return 0
        tuned, invariant = user_table(device), options.batch_invariant
        found = Planner(problem, device, options.kernel, tuned, invariant).explained(problem)
    except ValueError as error:
        raise CommandError(error) from error
    _print(problem, device, found)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.deterministic and not options.backward:
        raise CommandError("--deterministic is for --backward")
    for flag in ("kernel", "batch_invariant", "precision") if options.backward else ():
        if getattr(options, flag):
            name = flag.replace("_", "-")
            raise CommandError(
                f"--{name} is not for --backward: a dtype has one kernel of gradients"
            )


def _print(problem: Problem, device: Device, found: Plan | DecodePlan | Fp8Plan) -> None:
    variant, is_8_bits = found.variant, isinstance(found, Fp8Plan)
    rows: list[tuple[object, ...]] = [
        ("problem", problem_text(problem) + ", in 8 bits" * is_8_bits),
        ("GPU", f"{device.name}, {device.arch}, {device.sm_count} multiprocessors"),
        ("variant", variant),
        ("  kernel", variant.kernel, f"cufa/kernels/{variant.kernel}.cu"),
        *_arguments(found),
        ("grid", f"{counted(found.grid, 'block')} for {_work(problem, found)}"),
        ("block", f"{found.block} threads"),
        ("shared memory", f"{found.smem_bytes} bytes a block"),
    ]
    if not isinstance(found, Fp8Plan):
        rows += [*_beside(found), *_expected(found, device)]
    table.pairs([*rows, ("reason", found.reason)])


def _arguments(found: Plan | DecodePlan | Fp8Plan) -> Iterator[tuple[object, ...]]:
    """Yield the template arguments, and what they mean."""
    if isinstance(found, Fp8Plan):
        for name, value in found.tile._asdict().items():
            yield f"  {name}", value, _OF_8_BITS[name]
        return
    variant = found.variant
    shown = "dtype", "score", "kv", *KERNELS[variant.kernel].arguments
    for name, value in {**variant._asdict(), "schedule": variant.named_schedule}.items():
        if name in shown or (name == "schedule" and value):
            yield f"  {name}", ", ".join(value) if name == "score" else value, _MEANING[name]


def _work(problem: Problem, found: Plan | DecodePlan | Fp8Plan) -> str:
    """Return what the blocks share out."""
    if isinstance(found, DecodePlan):
        shared = counted(problem.batch * problem.heads_kv, "K/V head")
        tiles = counted(found.row_tiles, "tile")
        return f"{shared} x {tiles} of the {problem.group * problem.seq_q} rows of its queries"
    heads = problem.batch * problem.heads_q
    work = counted(heads, "head")
    if isinstance(found, Plan) and found.pack > 1:
        work = f"{counted(heads // found.pack, 'group')} of {found.pack} heads"
    return work + f" x {counted(found.q_tiles, 'tile')} of queries"


def _expected(found: Plan | DecodePlan, device: Device) -> Iterator[tuple[object, ...]]:
    """Yield the times that are expected of the variant, and of the fastest alternatives."""
    times = dict(found.expected_us)
    if found.variant in times:
        is_h200 = "h200" in device.name.lower()
        of_others = "" if is_h200 else ", whose costs stand for those of other GPUs"
        yield "expected", f"{times.pop(found.variant):.1f} us on an H200{of_others}"
    for variant, us in list(times.items())[:_ALTERNATIVES]:
        yield "  instead", f"{us:.1f} us", variant
    if len(times) > _ALTERNATIVES:
        yield "", f"and {len(times) - _ALTERNATIVES} slower ones"


def _beside(found: Plan | DecodePlan) -> Iterator[tuple[str, str]]:
    """Yield the order of tiles, and the memory that a launch needs in addition to the arrays."""
    if isinstance(found, DecodePlan):
        if found.splits == 1:
            yield "split", "nothing; each block has all keys of a sequence and K/V head"
            return
        how = f"into {found.splits} parts" if found.splits else "evenly among the blocks"
        yield "split", f"keys, {how}; the last block of a head merges the pieces"
        yield "pieces", f"{4 * found.partial_floats} bytes of global memory"
        return
    yield "interleaved", f"the tiles of {counted(found.section_heads, 'head')} at a time"
    if found.late_rows:
        yield "late", f"the first {found.late_rows} tiles of all heads, which are short"
    if found.workspace_floats:
        yield "workspace", f"{4 * found.workspace_floats} bytes of global memory"
