"""The parser of the command line, and the options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from cufa.checks import CAUSAL, NO_WINDOW, check_dropout
from cufa.cli.values import Shapes, architecture, beside, count, gpu, shape, window
from cufa.dtypes import DTYPES
from cufa.features.parts import ARRAYS
from cufa.problem.problem import Problem

PROGRAM = "python -m cufa"

Commands = Any  # argparse does not name the type of what add_subparsers returns


class CommandError(Exception):
    """What ends a command: one line for its user, and the exit status."""

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


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    examples: tuple[str, ...],
) -> Parser:
    """Add the parser of a command; `run` gets its options and returns the exit status."""
    lines = "\n".join(f"  {PROGRAM} {name} {words}".rstrip() for words in examples)
    title = "example" if len(examples) == 1 else "examples"
    parser: Parser = commands.add_parser(
        name, help=summary, description=description, epilog=f"{title}:\n{lines}"
    )
    parser.set_defaults(run=run, prog=parser.prog)
    return parser


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
    group.add_argument(
        "--window",
        type=window,
        default=NO_WINDOW,
        metavar="L,R",
        help="keys before and after its own that a query sees: 4096,0 or --window=-5,none",
    )
    group.add_argument("--softcap", type=float, metavar="C", help="bound of the scores, by tanh")
    group.add_argument(
        "--beside",
        type=beside,
        action="append",
        metavar="NAME[:DTYPE]",
        help="an array: alibi_slopes, sinks, mask:bool, mask:uint8, bias:bfloat16 (repeatable)",
    )
    group.add_argument("--dropout", type=float, default=0.0, metavar="P", help="how many weights")
    group.add_argument(
        "--return-lse",
        action="store_true",
        help="with the log-sum-exp, for which a softcap in bfloat16 is more exact",
    )


NO_SCORES = (NO_WINDOW, None, None, 0.0, False)
"""`scores` of options that were not given."""


def scores(options: argparse.Namespace) -> tuple[object, ...]:
    """Return what the options of `add_scores` say."""
    score = options.window, options.softcap, options.beside, options.dropout
    return *score, options.return_lse


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
    score = {"window": options.window, "softcap": options.softcap}
    try:
        problem = Problem.of_shapes(*shapes, dtype=dtype, causal=causal, **score)
        dropout_p = check_dropout(options.dropout)
    except ValueError as error:
        raise CommandError(error) from error
    given = options.beside or ()
    read = {part.argument: part.name for part in given}
    if len(read) < len(given):
        raise CommandError("--beside: each array has one dtype, and comes once")
    reads = tuple(read[name] for name in ARRAYS if name in read)
    return problem._replace(reads=reads, dropout_p=dropout_p, returns_lse=options.return_lse)


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
