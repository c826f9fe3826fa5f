"""Names of arguments: those of another function, and those that other libraries have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

_HERE = {
    "attn_mask": "mask= if it is boolean, bias= if it is added to the scores",
    "cache_seqlens": "lengths= of decode, which counts the new tokens, too; lengths_k= elsewhere",
    "custom_mask": "mask=",
    "enable_gqa": "left out, as heads are grouped by their numbers",
    "is_causal": 'causal=, which is "top-left" where PyTorch aligns it so',
    "logits_soft_cap": "softcap=",
    "k_descale": "k_scale= of decode, a scale for each key and K/V head; a Quantized has its own",
    "page_table": "block_table= of decode",
    "return_attn_probs": "return_lse=",
    "return_softmax_lse": "return_lse=",
    "sm_scale": "scale=",
    "softmax_scale": "scale=",
    "v_descale": "v_scale= of decode, a scale for each key and K/V head; a Quantized has its own",
    "window_size": "window=, with None for no bound (flash-attn's -1)",
}


def refuses_other_names(function: _F) -> _F:
    """Hide the parameter that gathers unknown names from a function's signature."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    vars(function)["__signature__"] = signature.replace(parameters=known)
    return function


def names_here(function: _F) -> _F:
    """Let a function that gathers no unknown names say what takes the place of other libraries'."""

    @functools.wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        if not _HERE.keys().isdisjoint(keywords):
            refuse(function, _HERE.keys() & keywords)
        return function(*args, **keywords)

    typed: Any = called
    return typed


def refuse(function: Callable[..., Any], names: Iterable[str]) -> NoReturn:
    """Raise the TypeError of names that a function does not know."""
    name, called = next(iter(names)), function.__name__
    here = f": here it is {_HERE[name]}" if name in _HERE else ""
    raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{here}")


def arguments_of(function: Callable[..., Any], without: Iterable[str] = ()) -> Callable[[_F], _F]:
    """Return a decorator: what it decorates is given all arguments of another function, by name.

    Arguments that the caller leaves out have the other function's defaults. Those that are named in
    `without` are left out. The decorated function names all arguments that have no default.
    """
    signature = inspect.signature(function)
    kept = [p for name, p in signature.parameters.items() if name not in {*without}]
    signature = signature.replace(parameters=kept)

    def decorate(decorated: _F) -> _F:
        @functools.wraps(decorated)
        def called(*args: Any, **keywords: Any) -> Any:
            unknown = [name for name in keywords if name not in signature.parameters]
            if unknown:
                refuse(decorated, unknown)
            try:
                bound = signature.bind(*args, **keywords)
            except TypeError:
                try:
                    return decorated(*args, **keywords)  # which says what is missing, or too much
                except TypeError as error:
                    raise error from None
            bound.apply_defaults()
            return decorated(**bound.arguments)

        returned = inspect.signature(decorated).return_annotation
        vars(called)["__signature__"] = signature.replace(return_annotation=returned)
        typed: Any = called
        return typed

    return decorate
