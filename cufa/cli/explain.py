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

from cufa.cli import machine, parser, table
from cufa.cli.values import kernel
from cufa.device import Device
from cufa.explorer.occupancy import register_bound
from cufa.explorer.table import counted, problem_text
from cufa.features.sinks import Sinks
from cufa.planner.attention import Planner
from cufa.planner.backward import BackwardPlan
from cufa.planner.backward_model import explained
from cufa.planner.decode import DecodePlan
from cufa.planner.fp8 import Fp8Plan, plan_fp8
from cufa.planner.plan import Plan
from cufa.problem.parse_backward import TENSORS
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_KERNELS, KERNELS
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
_IN_GRADIENTS = {
    **_MEANING,
    "head_dim": "columns of Q, K, dQ and dK",
    "head_dim_v": "columns of V, dO and dV",
    "stages": "depth of the ring of Q and dO in shared memory",
}
_TILE_OF_GRADIENTS = ("head_dim", "head_dim_v", "bm", "bn", "stages", "warps", "blocks_per_sm")
_ALTERNATIVES = 5  # variants that are shown

_Rows = Iterator[tuple[object, ...]]


def add(command: parser.Parser) -> None:
    """Add the command's options."""
    parser.add_problem(command)
    command.add_argument("--kernel", type=kernel, metavar="NAME", help="a kernel to force")
    parser.add_flag(command, "--batch-invariant", "the same bits alone and in any batch")
    parser.add_precision(command, "the plan of such a call in 8 bits")
    parser.add_flag(command, "--backward", "the plan of cufa.attention_backward")
    parser.add_flag(command, "--deterministic", "with --backward: sums in a fixed order")
    parser.add_device(command, "This machine's by default; one that is named need not be here.")


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    problem = parser.one_problem(options)
    if options.backward:
        why = "is not for --backward: a dtype has one kernel of gradients"
        parser.refuse(options, ("kernel", "batch_invariant", "precision"), why)
    else:
        parser.refuse(options, ("deterministic",), "is for --backward")
    device = machine.chosen_gpu(options)
    text = problem_text(problem)
    if options.backward:
        text = f"gradients of {', '.join(wrt_of(problem))}; {text}"
        rows = _of_gradients(problem, device, options.deterministic)
    elif options.precision:
        text += ", in 8 bits"
        rows = _of_call(problem, device, plan_fp8(problem, device, options.kernel))
    else:
        tuned, invariant = user_table(device), options.batch_invariant
        planner = Planner(problem, device, options.kernel, tuned, invariant)
        rows = _of_call(problem, device, planner.explained(problem))
    gpu = f"{device.name}, {device.arch}, {device.sm_count} multiprocessors"
    table.pairs([("problem", text), ("GPU", gpu), *rows])
    return 0


def wrt_of(problem: Problem) -> tuple[str, ...]:
    """Return the arrays of a problem that have gradients: q, k, v, and sinks if there are any."""
    return TENSORS if problem.of(Sinks) is None else (*TENSORS, "sinks")


def plan_of_gradients(problem: Problem, device: Device, deterministic: bool) -> BackwardPlan:
    """Return the plan of all gradients of a problem."""
    return explained(problem, device, wrt_of(problem), deterministic, table=user_table(device))


def _of_gradients(problem: Problem, device: Device, deterministic: bool) -> _Rows:
    """Yield what the plan of gradients is like."""
    found = plan_of_gradients(problem, device, deterministic)
    variant, times = found.variant, [f"{us:.1f} us on an H200" for us in found.expected_us]
    for i, step in enumerate(found.steps):
        yield f"launch {i + 1}", step.instance
        if step.instance.kernel in BACKWARD_KERNELS:
            for name in _TILE_OF_GRADIENTS:
                yield f"  {name}", getattr(variant, name), _IN_GRADIENTS[name]
            most = register_bound(device, step.threads, variant.blocks_per_sm)
            yield "  registers", f"at most {most} a thread"
        yield "  grid", f"{counted(step.grid, 'block')} of {step.threads} threads"
        yield "  shared memory", f"{step.instance.smem_bytes} bytes a block"
        if times:
            yield "  expected", times[i]
    heads = counted(found.section_heads, "K/V head")
    yield "interleaved", f"the tiles of keys of {heads} at a time"
    order = "tiles of keys add to dq in a fixed order" if deterministic else "as blocks come"
    yield "sums of dq", order
    yield "workspace", f"{4 * found.workspace_words} bytes of global memory"
    yield "reason", found.reason
    if times:
        yield "expected", f"{sum(found.expected_us):.1f} us on an H200"


def _of_call(problem: Problem, device: Device, found: Plan | DecodePlan | Fp8Plan) -> _Rows:
    """Yield what the plan of a call is like."""
    variant = found.variant
    yield "variant", variant
    yield "  kernel", variant.kernel, f"cufa/kernels/{variant.kernel}.cu"
    yield from _arguments(found)
    yield "grid", f"{counted(found.grid, 'block')} for {_work(problem, found)}"
    yield "block", f"{found.block} threads"
    yield "shared memory", f"{found.smem_bytes} bytes a block"
    if not isinstance(found, Fp8Plan):
        yield from _order_and_memory(found)
        yield from _expected(found, device)
    yield "reason", found.reason


def _arguments(found: Plan | DecodePlan | Fp8Plan) -> _Rows:
    """Yield the template arguments, and what they mean."""
    if isinstance(found, Fp8Plan):
        for name in found.variant.spec.arguments[2:]:
            yield f"  {name}", getattr(found.variant, name), _MEANING[name]
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


def _expected(found: Plan | DecodePlan, device: Device) -> _Rows:
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


def _order_and_memory(found: Plan | DecodePlan) -> _Rows:
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
