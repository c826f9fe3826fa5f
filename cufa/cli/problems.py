"""Options -> `Problem`."""

from __future__ import annotations

import argparse

from cufa.cli.parser import CommandError
from cufa.cli.values import Shapes
from cufa.problem import Problem


def problem_of(shapes: Shapes, dtype: str, causal: bool) -> Problem:
    """Return the problem of three shapes; `CommandError` where they do not fit each other."""
    try:
        return Problem.of_shapes(*shapes, dtype=dtype, causal=causal)
    except ValueError as error:
        raise CommandError(error) from error


def one_problem(options: argparse.Namespace) -> Problem:
    """Return the problem that the options of `cufa.cli.parser.add_problem` say."""
    k = options.k or options.q
    return problem_of(Shapes(options.q, k, options.v or k), options.dtype, options.causal)
