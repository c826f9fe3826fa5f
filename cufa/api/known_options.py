"""Options of calls that came before: `attention` does not check them one by one again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from cufa.launch import calls
from cufa.launch.signature import PLAIN, Key, types_in
from cufa.remembered import remember

_F = TypeVar("_F", bound=Callable[..., Any])

_NAMES = 64  # sets of options that are remembered, by the types of their values
_VALUES = 64  # of each


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
        # come first: other values than those of plain types are neither hashed nor compared.
        # Other calls have nothing there.
        known: dict[Key, dict[Key, tuple[bool, int] | tuple[()]]] = {}
        parameters = inspect.signature(function).parameters
        defaults = {name: parameters[name].default for name in names}

        @functools.wraps(function)
        def called(q: Any, k: Any, v: Any, *, out: Any = None, **given: Any) -> Any:
            types: Key = (*map(type, given.values()),)
            if tuple in types:
                types = (*types, types_in(given.get("window")))
            try:
                alike = known.get(types)
            except TypeError:  # a type that cannot be hashed
                return function(q, k, v, out=out, **given)
            found = None if alike is None else alike.get((*given.items(),))
            if found:
                result = calls.run_known(None, q, k, v, out, *found)
                if result is not None:
                    return result
            result = function(q, k, v, out=out, **given)
            if found != () and not isinstance(q, np.ndarray):
                note(types, given)
            return result

        def note(types: Key, given: dict[str, Any]) -> None:
            if not PLAIN.issuperset(types[: len(given)]):
                return
            choices = defaults | given
            others = [x for name, x in given.items() if name not in defaults and x is not None]
            found: tuple[bool, int] | tuple[()] = ()
            # `types` does not have those in a `Variant`.
            if not (others or choices["dropout_p"] or isinstance(choices["kernel"], tuple)):
                choices["dropout_p"] = 0.0  # as the function passes it
                options = calls.options_of(tuple(choices[name] for name in names), made=True)
                if options is not None:  # another one, if the old one was forgotten
                    found = choices["return_lse"], options
            alike = remember(known, types, {}, _NAMES)
            remember(alike, (*given.items(),), found, _VALUES, anew=True)

        typed: Any = called
        return typed

    return decorate
