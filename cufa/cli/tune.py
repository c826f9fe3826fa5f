"""``tune``: time the variants of some problems, and keep the winners for later calls.

Explore problems on this machine's GPU and keep what beats the planner's rules in
the user's tuned table, which cufa.attention follows from then on, also for
problems like them; with --backward, cufa.attention_backward does. CUFA_TUNED=0
turns the table off; 'explain' says when it was used. Ctrl-C keeps the problems
that are done.

Examples
--------
--q 4,32,4096,128 --k 4,8,4096,128 --dtype bfloat16 --causal
--q 1,16,8192,256 --dtype bfloat16 --causal --softcap 50
--standard --dtype bfloat16 --json tuned.json
--q 4,32,4096,128 --dtype bfloat16 --causal --backward
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import geometric_mean

from cufa.cli import machine, parser, table
from cufa.cli.values import output
from cufa.cli.watch import watch
from cufa.explorer.standard import standard_problems
from cufa.explorer.tune import Tuning, tune
from cufa.problem.problem import Problem


def add(command: parser.Parser) -> None:
    """Add the command's options."""
    group = command.add_argument_group("the problems")
    text = "hidden size 2048, 16384 tokens, head dims 64 to 256, lengths 512 to 16384"
    parser.add_flag(group, "--standard", text)
    parser.add_shapes(group, more="; repeatable, one for each problem", action="append")
    parser.add_masks(group)
    parser.add_scores(group)
    text = "gradients instead: all launches of a call timed together"
    parser.add_flag(command, "--backward", text)
    parser.add_jobs(command)
    parser.add_flag(command, "--dry-run", "keep nothing, only print")
    command.add_argument("--json", type=output, metavar="FILE", help="write everything as JSON")


def run(options: argparse.Namespace) -> int:
    """Explore the problems, keep the winners, print both."""
    problems = _problems(options)
    machine.check_compiler()
    tuning = Tuning(machine.current_gpu("variants are timed, and need one"))
    if not options.dry_run:
        machine.check_cache("tuned")
    interrupted = False
    try:
        with watch() as show:
            tune(
                tuning,
                problems,
                backward=options.backward,
                jobs=options.jobs,
                progress=show,
                on_problem=show.begin_problem,
            )
    except KeyboardInterrupt:
        interrupted = True
        print(f"{options.prog}: interrupted; this was found so far", file=sys.stderr)
    try:  # first: a pipe that closes early must not cost the table
        _keep(tuning, options)
    finally:
        _print(tuning)
    return 130 if interrupted else 1 if tuning.failures else 0


def _problems(options: argparse.Namespace) -> list[Problem]:
    if options.standard == bool(options.q):
        raise parser.CommandError("either --standard or at least one --q is needed")
    if options.standard:
        if options.k or options.v:
            raise parser.CommandError("--standard has shapes of its own: give no --k and no --v")
        if parser.has_scores(options):
            raise parser.CommandError("--standard has scores of its own: say nothing of them")
        return standard_problems((options.dtype,), masks=parser.masks_of(options))
    keys = options.k or options.q
    shapes = {"q": options.q, "k": keys, "v": options.v or keys}  # lists, in the same order
    for name, given in shapes.items():
        if len(given) != len(options.q):
            raise parser.CommandError(f"as many --{name} as --q are needed, or none")
    return parser.problems_of(options, zip(*shapes.values(), strict=True), (options.dtype,))


def _keep(tuning: Tuning, options: argparse.Namespace) -> None:
    """Write the user's table, and the file that was asked for."""
    if tuning.rows and not options.dry_run:
        print(f"wrote {tuning.store(options.command)}", file=sys.stderr)
    if options.json:
        whole = {"command": options.command, **tuning.to_dict()}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.json}", file=sys.stderr)


def _print(tuning: Tuning) -> None:
    """Print what the planner chose, and what wins."""
    if not tuning.rows and not tuning.failures:
        print("nothing was tuned")
        return
    table.show(tuning.lines())
    if tuning.rows:
        mean = geometric_mean(row.ratio for row in tuning.rows)
        changed = sum(row.winner != row.planned for row in tuning.rows)
        print(f"\n{changed} of {len(tuning.rows)} change; geometric mean of the ratios {mean:.3f}")
