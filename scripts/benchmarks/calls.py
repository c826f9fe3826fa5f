"""Calls of contestants: under a choice, and over several sets of operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from cufa.explorer.clock import Call


class Chosen:
    """A call under a choice, such as of a backend, that can be made once around many calls.

    Parameters
    ----------
    choice : callable
        Returns what to enter before the call.
    call : callable
    """

    def __init__(self, choice: Callable[[], AbstractContextManager[Any]], call: Call) -> None:
        self.choice = choice
        self.call = call

    def __call__(self) -> Any:
        """Choose, and make the call."""
        with self.choice():
            return self.call()


def in_turn(calls: Sequence[Call]) -> Call:
    """Return a call that is each of these in turn; they choose alike."""
    first = calls[0]
    if len(calls) == 1:
        return first
    if isinstance(first, Chosen):
        return Chosen(first.choice, in_turn([c.call for c in calls if isinstance(c, Chosen)]))
    turns = itertools.cycle(calls)
    return lambda: next(turns)()
