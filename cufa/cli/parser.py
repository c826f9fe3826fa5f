"""The parser of the command line, and the options that several commands share."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from cufa.cli import values
from cufa.dtypes import DTYPES
from cufa.features import VALUES
from cufa.features.causal import CAUSAL
from cufa.problem.problem import Problem

PROGRAM = "python -m cufa"


class CommandError(ValueError):
    """A ValueError whose message is one line; as others do, it ends a command with status 2."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).split()))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=as_written, **options)
        # As argparse takes negative numbers for values: so that --window may have -1,0.
        self._negative_number_matcher = re.compile(r"-\d")

    def error(self, message: str) -> NoReturn:
        """End with status 2, and without the lines of usage that argparse puts before."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def add_command(commands: Any, command: ModuleType) -> None:
    """Add the parser of a command, a module, whose docstring is its help.

    `add` of the module adds its options; `run` gets them and returns the exit status.
    """
    name = command.__name__.rpartition(".")[2]
    summary, _, text = (command.__doc__ or "").partition("\n\n")
    description, _, examples = text.partition("\nExamples\n--------\n")
    words = examples.splitlines() or [""]
    lines = "\n".join(f"  {PROGRAM} {name} {each}".rstrip() for each in words)
    parser: Parser = commands.add_parser(
        name,
        help=summary.partition(": ")[2].removesuffix("."),
        description=description,
        epilog=f"example{'s' * (len(words) > 1)}:\n{lines}",
    )
    parser.set_defaults(run=command.run, prog=parser.prog)
    command.add(parser)


def add_flag(group: Any, flag: str, text: str) -> None:
    """Add an option that has no value."""
    group.add_argument(flag, action="store_true", help=text)


def add_problem(parser: Parser) -> None:
    """Add the options that say one problem."""
    group = parser.add_argument_group("the problem")
    add_shapes(group, ": 4,32,4096,128", required=True)
    text = "with a causal mask of this alignment (default: bottom-right)"
    group.add_argument(
        "--causal", nargs="?", const="bottom-right", default=False, choices=CAUSAL, help=text
    )
    add_scores(group)


def add_shapes(group: Any, of_q: str = "", more: str = "", **how_q: Any) -> None:
    """Add shapes and element type: `how_q` are options of argparse for q."""
    how_others = {**how_q, "required": False}
    add_shape = partial(group.add_argument, type=values.shape, metavar="B,H,S,D")
    add_shape("--q", help=f"shape of q{of_q}{more}", **how_q)
    add_shape("--k", help=f"shape of k (default: that of q){more}", **how_others)
    add_shape("--v", help=f"shape of v (default: that of k){more}", **how_others)
    text = "element type (default: float16)"
    group.add_argument("--dtype", choices=DTYPES, default="float16", help=text)


def add_masks(group: Any) -> None:
    """Add the choice between problems with a causal mask and problems without."""
    text = "with a causal mask only, or without only (default: both)"
    group.add_argument("--causal", action=argparse.BooleanOptionalAction, help=text)


def masks_of(options: argparse.Namespace) -> tuple[bool, ...]:
    """Return the values of causal that `add_masks` chose."""
    return (False, True) if options.causal is None else (options.causal,)


def add_scores(group: Any) -> None:
    """Add the options that say what becomes of the scores, but for causal masks."""
    for name, kind in VALUES.items():
        option = kind.OPTION
        if option is not None:
            group.add_argument(
                option.flag,
                dest=name,
                type=values.value(option.read),
                default=kind.DEFAULT,
                metavar=option.metavar,
                help=option.help,
            )
    text = f"an array: {', '.join(values.known_arrays())} (repeatable)"
    group.add_argument(
        "--array", type=values.array_dtype, action="append", metavar="NAME[:DTYPE]", help=text
    )
    text = "with the log-sum-exp, for which a softcap in bfloat16 is more exact"
    add_flag(group, "--return-lse", text)


def add_precision(parser: Any, text: str) -> None:
    """Add the option for 8 bits."""
    parser.add_argument("--precision", choices=("fp8",), help=text)


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the options of `add_scores` say that are plain values, by argument."""
    return {name: getattr(options, name) for name, kind in VALUES.items() if kind.OPTION}


def has_scores(options: argparse.Namespace) -> bool:
    """Whether any of the options of `add_scores` was given."""
    is_asked = any(value != VALUES[name].DEFAULT for name, value in asked(options).items())
    return is_asked or options.array is not None or options.return_lse


def refuse(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse options of these names, if they were given; `why` ends the message."""
    for name in names:
        if getattr(options, name):
            raise CommandError(f"--{name.replace('_', '-')} {why}")


def problems_of(
    options: argparse.Namespace, shapes: Iterable[values.Shapes] | None, dtypes: Iterable[str]
) -> list[Problem]:
    """Return the problems of all shapes, dtypes, and masks that `add_masks` chose."""
    each = itertools.product(shapes or (), dtypes, masks_of(options))
    return [problem_of(*one, options) for one in each]


def one_problem(options: argparse.Namespace) -> Problem:
    """Return the problem that the options of `add_problem` say."""
    shapes = values.shapes_of(options.q, options.k, options.v)
    return problem_of(shapes, options.dtype, options.causal, options)


def problem_of(
    shapes: values.Shapes, dtype: str, causal: bool | str, options: argparse.Namespace
) -> Problem:
    """Return the problem of three shapes, and of the options of `add_scores`.

    ValueError where they do not fit each other.
    """
    problem = Problem.of_shapes(*shapes, dtype=dtype, causal=causal, **asked(options))
    parts = options.array or ()
    if len({part.argument for part in parts}) < len(parts):
        raise CommandError("--array: each array has one dtype, and comes once")
    problem = problem.reading(*(part.name for part in parts))
    return problem._replace(returns_lse=options.return_lse)


def add_device(parser: Parser, why: str, of_arch: str = "a typical GPU of an architecture") -> None:
    """Add the options that name a GPU in place of this machine's.

    `why` says what for, and `of_arch` what an architecture stands for.
    """
    group = parser.add_argument_group("the GPU", why)
    either = group.add_mutually_exclusive_group()
    text = "a well-known GPU, such as h100"
    either.add_argument("--gpu", type=values.gpu, metavar="NAME", help=text)
    text = f"{of_arch}, such as sm_86"
    either.add_argument("--arch", type=values.architecture, metavar="SM", help=text)


def add_jobs(parser: Parser) -> None:
    """Add the number of compilations at a time."""
    text = "compilations at a time (default: one a core)"
    parser.add_argument("--jobs", type=values.count, metavar="N", help=text)
