"""``explore``: compile, check, time and rank the variants for a problem.

Compile every variant of a space: registers, spills, shared memory, occupancy.
On a GPU each is also checked against an oracle, timed and ranked. With --gpu or
--arch nothing is run and no GPU is needed; the time that the planner expects ranks
them. Ctrl-C keeps what was found so far.

Examples
--------
--q 4,32,4096,128 --dtype bfloat16 --causal --plot tiles.png
--q 2,16,8192,128 --dtype bfloat16 --arch sm_90a --space bm=64,128 --json x.json
--q 2,16,8192,128 --dtype bfloat16 --causal --window 1023,none --arch sm_90a
--q 2,16,8192,128 --dtype bfloat16 --causal --backward --arch sm_80
"""

from __future__ import annotations

import argparse
import sys

from cufa import explorer
from cufa.cli import machine, parser, table
from cufa.cli.values import axis, count, kernel, output, picture, variant
from cufa.cli.watch import watch
from cufa.device import Device
from cufa.explorer.exploration import Exploration, Interrupted
from cufa.explorer.space import Space, variants
from cufa.explorer.table import heading, lines
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant


def add(command: parser.Parser) -> None:
    """Add the command's options."""
    parser.add_problem(command)
    text = "By default, the tiles that make sense for the kernel that the planner takes."
    space = command.add_argument_group("the variants", text)
    text = "a kernel (repeatable)"
    space.add_argument("--kernel", type=kernel, action="append", metavar="NAME", help=text)
    text = "values of a template argument in place of the default ones: bm=64,128 (repeatable)"
    space.add_argument("--space", type=axis, action="append", metavar="ARG=N,N", help=text)
    text = "one variant in full, alone or with those of --kernel and --space (repeatable)"
    space.add_argument("--variant", type=variant, action="append", metavar="VARIANT", help=text)
    text = "gradients instead: the tiles of their kernel, all launches of a call timed together"
    parser.add_flag(space, "--backward", text)
    parser.add_jobs(command)
    parser.add_device(command, "This machine's by default. One that is named need not be here.")
    results = command.add_argument_group("the results")
    results.add_argument("--top", type=count, metavar="N", help="print only the first N")
    results.add_argument("--json", type=output, metavar="FILE", help="write everything as JSON")
    results.add_argument("--csv", type=output, metavar="FILE", help="write the rows as CSV")
    text = "draw them; the suffix names the format"
    results.add_argument("--plot", type=picture, metavar="FILE", help=text)


def run(options: argparse.Namespace) -> int:
    """Explore, write the files, print the table."""
    problem = parser.one_problem(options)
    machine.check_compiler()
    device = machine.chosen_gpu(options, "name one, such as --gpu h100, to compile without timing")
    space = _space(options, problem, device)
    status = 0
    try:
        with watch() as show:
            exploration = explorer.explore(
                problem,
                space=space,
                backward=options.backward,
                device=options.gpu or options.arch,
                jobs=options.jobs,
                progress=show,
            )
    except Interrupted as stop:
        exploration, status = stop.exploration, 130
        print(f"{options.prog}: interrupted; this was found so far", file=sys.stderr)
    try:  # first: a pipe that closes early must not cost the files
        _write(exploration, options)
    finally:
        _print(exploration, options.top)
    if status == 0 and exploration.rows and all(row.error for row in exploration.rows):
        return 1  # there is nothing that could run
    return status


def _space(options: argparse.Namespace, problem: Problem, device: Device) -> Space:
    """Return the variants that the options ask for, or of gradients the values of arguments."""
    named: list[Variant] = options.variant or []
    if options.backward and (named or options.kernel):
        why = "--backward: the dtype and the GPU choose the kernel; choose by --space"
        raise parser.CommandError(why)
    if named and not options.space and not options.kernel:
        return named
    axes: dict[str, list[int]] = {}
    for name, values in options.space or ():
        axes.setdefault(name, []).extend(values)
    if options.backward:
        return axes
    return [*variants(problem, device, options.kernel, axes), *named]


def _write(exploration: Exploration, options: argparse.Namespace) -> None:
    """Write the files that were asked for."""
    for path, write in (
        (options.json, exploration.to_json),
        (options.csv, exploration.to_csv),
        (options.plot if exploration.rows else None, exploration.plot),
    ):
        if path is not None:
            write(path)
            print(f"wrote {path}", file=sys.stderr)


def _print(exploration: Exploration, top: int | None) -> None:
    """Print the first `top` rows, or all, and what is left out."""
    print(f"{heading(exploration)}\n")
    rows = exploration.rows[:top]
    table.show(lines(rows, exploration.planned))
    if len(rows) < len(exploration.rows):
        print(f"and {len(exploration.rows) - len(rows)} more")
    if exploration.best is not None:
        print(f"\nbest: {exploration.best.variant}")
