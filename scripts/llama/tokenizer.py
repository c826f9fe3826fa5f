"""Text to tokens and back, and a conversation as the text that a model was trained on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from models import ModelError, is_text, missing_package

from llama.folder import read_json

FILE = "tokenizer.json"

#: Tokens of the prompt that `TextStream` decodes together with the first new one: a space before
#: a word belongs to the word only where something stands before it.
CONTEXT = 5

#: Tokens more where these begin within a character, of four bytes at most: a decoder that falls
#: back to bytes makes nothing of any that follow each other if one of them is of a part.
MORE_CONTEXT = 3

REPLACEMENT = "\ufffd"  # what a decoder makes of a character that is not whole yet


class Tokenizer:
    """The tokenizer of a folder, and its chat template if it has one.

    Parameters
    ----------
    folder : Path

    Attributes
    ----------
    eos : tuple of int
        The token that tokenizer_config.json says ends a text.
    template : str or None
        The chat template, in Jinja.

    Raises
    ------
    ModelError
        A file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer as Rust
        except ImportError:
            raise missing_package("tokenizers", "generate") from None
        path = folder / FILE
        if not path.is_file():
            also = " (tokenizer.model alone is not enough)" * (folder / "tokenizer.model").is_file()
            raise ModelError(f"{path} is missing{also}")
        self._path = path
        with self._told():
            self._tokenizer = Rust.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = folder / "tokenizer_config.json"
        self._config = read_json(config) if config.is_file() else {}
        eos = self._tokenizer.token_to_id(self._special("eos_token"))
        self.eos = () if eos is None else (eos,)
        self.template = self._find_template(folder)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say of errors of tokenizers, which shows much of a damaged file only when it is used."""
        try:
            yield
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # it raises no narrower one, and a panic is no Exception
            raise ModelError(f"{self._path} is damaged: {error}") from None

    def _special(self, name: str) -> str:
        """Return a token such as bos_token, which is written as text or as an object."""
        token = self._config.get(name) or ""
        return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)

    def _find_template(self, folder: Path) -> str | None:
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"cannot read {path}: {error}") from None
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            named = (entry for entry in template if isinstance(entry, Mapping))
            template = next((e.get("template") for e in named if e.get("name") == "default"), None)
        return template

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the marks that the tokenizer puts around one.

        Raises
        ------
        ModelError
            It has bytes that are not UTF-8.
        """
        return self._ids(text, marks=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation up to where the model's answer begins.

        Parameters
        ----------
        messages : sequence of {"role": ..., "content": ...}
            The roles are system, user and assistant.

        Raises
        ------
        ModelError
            There is no chat template, it refuses these messages or fails, or they have bytes that
            are not UTF-8.
        """
        if self.template is None:
            raise ModelError("the model's folder has no chat template")
        try:
            from jinja2.exceptions import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise missing_package("jinja2", "generate") from None
        # As transformers sets it up, for which templates are written.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        tokens = {
            name: self._special(name)
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if self._special(name)
        }
        try:
            text = environment.from_string(self.template).render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                raise_exception=raise_exception,
                strftime_now=datetime.now().strftime,
                **tokens,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, which may raise anything
            what = f"{error}" if isinstance(error, TemplateError) else repr(error)
            raise ModelError(f"the chat template fails: {what}") from None
        return self._ids(text, marks=False)

    def _ids(self, text: str, *, marks: bool) -> list[int]:
        if not is_text(text):
            raise ModelError("the text is not UTF-8")
        with self._told():
            return self._tokenizer.encode(text, add_special_tokens=marks).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        with self._told():
            return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int]) -> "TextStream":
        """Return what turns the tokens after `prompt` to text, one at a time."""
        return TextStream(self, prompt)


class TextStream:
    """Text of tokens that come one at a time, in whole characters.

    Parameters
    ----------
    tokenizer : Tokenizer
    prompt : sequence of int
        What stands before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        first = max(0, len(prompt) - CONTEXT)
        for start in range(first, max(0, first - MORE_CONTEXT) - 1, -1):
            # The tokens before `_shown` are out; the next are decoded together with them.
            self._tokens = list(prompt[start:])
            if not tokenizer.decode(self._tokens).startswith(REPLACEMENT):
                break
        self._shown = len(self._tokens)

    def push(self, token: int) -> str:
        """Return the text that one more token completes; it may be empty."""
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        return text

    def end(self) -> str:
        """Return what is left when no more tokens come: half characters, as they are."""
        return self._new()

    def _new(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._shown])
        return self._tokenizer.decode(self._tokens)[len(before) :]


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Return JSON with letters as they are, which Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
