"""Options of calls that came before: `attention` does not check them one by one again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from cufa.launch import calls
from cufa.launch.signature import Key, types_in
from cufa.remembered import remember

_F = TypeVar("_F", bound=Callable[..., Any])

_NAMES = 64  # sets of options that are remembered, by the types of their values
_VALUES = 64  # of each

_IMMUTABLE = {bool, int, float, np.float64, str, type(None), tuple}


def remembers_options(*names: str) -> Callable[[_F], _F]:
    """Return a decorator of a function of q, k, v, `out` and options.

    A call on CuPy arrays with options as in a call before is looked up among the prepared calls at
    once. If it is not there, or may be illegal, the function is called.

    Parameters
    ----------
    *names : str
        The options that the function passes to `calls.run` as `choices`, in this order. The other
        ones must be None in the calls that are remembered, and `dropout_p` must be 0.
    """

    def decorate(function: _F) -> _F:
        # Types of the values -> names and values -> `return_lse` and `calls.options_of`. The types
        # come first: an array can neither be hashed nor compared.
        known: dict[Key, dict[Key, tuple[bool, int | Key]]] = {}
        parameters = inspect.signature(function).parameters
        defaults = {name: parameters[name].default for name in names}

        @functools.wraps(function)
        def called(q: Any, k: Any, v: Any, *, out: Any = None, **given: Any) -> Any:
            types: Key = (*map(type, given.values()),)
            if tuple in types:
                types = (*types, types_in(given.get("window")))
            alike = known.get(types)
            found = None if alike is None else alike.get((*given.items(),))
            if alike is not None and found is not None:
                result = calls.run_known(None, q, k, v, out, *found)
                if result is not None:
                    return result
                alike.pop((*given.items(),), None)  # the kind of call may be forgotten
            result = function(q, k, v, out=out, **given)
            if _IMMUTABLE.issuperset(map(type, given.values())):
                note(types, given)
            return result

        def note(types: Key, given: dict[str, Any]) -> None:
            choices = defaults | given
            others = (x for name, x in given.items() if name not in defaults)
            if choices["dropout_p"] or any(x is not None for x in others):
                return
            options = calls.options_of(tuple(choices[name] for name in names))
            alike = remember(known, types, {}, _NAMES)
            remember(alike, (*given.items(),), (choices["return_lse"], options), _VALUES)

        typed: Any = called
        return typed

    return decorate
