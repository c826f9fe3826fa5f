"""The parser of the command line, and the options that several commands share."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any, NoReturn

from cufa.cli.values import Shapes, architecture, beside, count, gpu, known_arrays, shape, value
from cufa.dtypes import DTYPES
from cufa.features import VALUES
from cufa.features.causal import CAUSAL
from cufa.problem.problem import Problem

PROGRAM = "python -m cufa"


class CommandError(Exception):
    """Ends a command, with one line for its user and the exit status."""

    def __init__(self, message: object, status: int = 2) -> None:
        super().__init__(" ".join(str(message).split()))
        self.status = status


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

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


def add_problem(parser: Parser) -> None:
    """Add the options that say one problem."""
    group = parser.add_argument_group("the problem")
    group.add_argument(
        "--q",
        type=shape,
        required=True,
        metavar="B,H,S,D",
        help="shape of q: 4,32,4096,128",
    )
    group.add_argument("--k", type=shape, metavar="B,H,S,D", help="shape of k (default: that of q)")
    group.add_argument("--v", type=shape, metavar="B,H,S,D", help="shape of v (default: that of k)")
    group.add_argument(
        "--dtype", choices=DTYPES, default="float16", help="element type (default: float16)"
    )
    group.add_argument(
        "--causal",
        nargs="?",
        const="bottom-right",
        default=False,
        choices=CAUSAL,
        help="with a causal mask, aligned so (default: bottom-right)",
    )
    add_scores(group)


def add_scores(group: Any) -> None:
    """Add the options that say what becomes of the scores, but for causal masks."""
    for name, kind in VALUES.items():
        option = kind.OPTION
        if option is not None:
            group.add_argument(
                option.flag,
                dest=name,
                type=value(option.read),
                default=kind.DEFAULT,
                metavar=option.metavar,
                help=option.help,
            )
    group.add_argument(
        "--beside",
        type=beside,
        action="append",
        metavar="NAME[:DTYPE]",
        help=f"an array: {', '.join(known_arrays())} (repeatable)",
    )
    group.add_argument(
        "--return-lse",
        action="store_true",
        help="with the log-sum-exp, for which a softcap in bfloat16 is more exact",
    )


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the options of `add_scores` say that are plain values, by argument."""
    return {name: getattr(options, name) for name, kind in VALUES.items() if kind.OPTION}


def has_scores(options: argparse.Namespace) -> bool:
    """Whether any of the options of `add_scores` was given."""
    values = any(given != VALUES[name].DEFAULT for name, given in asked(options).items())
    return values or options.beside is not None or options.return_lse


def one_problem(options: argparse.Namespace) -> Problem:
    """Return the problem that the options of `add_problem` say."""
    k = options.k or options.q
    shapes = Shapes(options.q, k, options.v or k)
    return problem_of(shapes, options.dtype, options.causal, options)


def problem_of(
    shapes: Shapes, dtype: str, causal: bool | str, options: argparse.Namespace
) -> Problem:
    """Return the problem of three shapes, and of the options of `add_scores`.

    `CommandError` where they do not fit each other.
    """
    try:
        problem = Problem.of_shapes(*shapes, dtype=dtype, causal=causal, **asked(options))
    except ValueError as error:
        raise CommandError(error) from error
    given = options.beside or ()
    if len({part.argument for part in given}) < len(given):
        raise CommandError("--beside: each array has one dtype, and comes once")
    problem = problem.reading(*(part.name for part in given))
    return problem._replace(returns_lse=options.return_lse)


def add_device(parser: Parser, why: str, of_arch: str = "a typical GPU of it") -> None:
    """Add the options that name a GPU in place of this machine's.

    `why` says what for, and `of_arch` what an architecture stands for.
    """
    group = parser.add_argument_group("the GPU", why)
    either = group.add_mutually_exclusive_group()
    either.add_argument("--gpu", type=gpu, metavar="NAME", help="a well-known GPU, such as h100")
    either.add_argument("--arch", type=architecture, metavar="SM", help=f"{of_arch}, such as sm_86")


def add_jobs(parser: Parser) -> None:
    """Add the number of compilations at a time."""
    parser.add_argument(
        "--jobs", type=count, metavar="N", help="compilations at a time (default: one a core)"
    )
