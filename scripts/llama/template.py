"""Chat templates, in Jinja with what transformers gives them: for that they are written."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from models import ModelError, missing_package


def render(template: str, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]) -> str:
    """Return a conversation as the template writes it, up to where the model's answer begins.

    Parameters
    ----------
    template : str
    messages : sequence of {"role": ..., "content": ...}
    tokens : mapping of str to str
        Special tokens by names such as bos_token, which a template may ask for.

    Raises
    ------
    ModelError
        The template refuses these messages or fails, or jinja2 is not installed.
    """
    environment = _environment()
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **tokens,
        )
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, which may raise anything
        from jinja2.exceptions import TemplateError

        what = f"{error}" if isinstance(error, TemplateError) else repr(error)
        raise ModelError(f"the chat template fails: {what}") from None


def _environment() -> Any:
    try:
        from jinja2 import nodes
        from jinja2.exceptions import SecurityError, TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Namespace
    except ImportError:
        raise missing_package("jinja2", "generate") from None

    class Generation(Extension):
        """Marks of what the model said, which only training needs."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

        def _inside(self, caller: Any) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    class SafeDict:
        """`dict` without the class's own attributes."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class SafeNamespace(Namespace):
        """`namespace` without names that begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            values = dict(*args[1:], **kwargs)
            for name in values:
                _check(name)
            Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            Namespace.__setitem__(self, name, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": SafeDict(),
        "namespace": SafeNamespace,
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON with letters as they are, which Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
