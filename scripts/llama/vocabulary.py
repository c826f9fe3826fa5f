"""A folder's tokenizer: tokenizer.json, tokenizer_config.json, the chat template."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from models import ModelError, missing_package

from llama.folder import read_json

FILE = "tokenizer.json"

#: Tokens that a chat template may ask for, by these names.
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class Vocabulary(NamedTuple):
    """A tokenizer, and what is known of it.

    Attributes
    ----------
    tokenizer : tokenizers.Tokenizer
    special : dict of str to str
        Special tokens by the names in `SPECIAL`.
    eos : tuple of int
        Tokens that are said to end a text.
    template : str or None
        The chat template, in Jinja.
    """

    tokenizer: Any
    special: dict[str, str]
    eos: tuple[int, ...]
    template: str | None


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Say of errors of tokenizers, which shows much of a damaged file only when it is used."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError, ModelError):
        raise
    except BaseException as error:  # it raises no narrower one, and a panic is no Exception
        raise ModelError(f"{path} is damaged: {error}") from None


def read_vocabulary(folder: Path) -> Vocabulary:
    """Return what a folder holds.

    Raises
    ------
    ModelError
        A file is missing or damaged.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise missing_package("tokenizers", "generate") from None
    path = folder / FILE
    if not (path.is_file() or (folder / "config.json").is_file()):
        raise ModelError(f"{folder} is no model's folder: it has neither config.json nor {FILE}")
    if not path.is_file():
        also = " (tokenizer.model alone is not enough)" * (folder / "tokenizer.model").is_file()
        raise ModelError(f"{path} is missing{also}")
    with told(path):
        tokenizer = Tokenizer.from_file(str(path))
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    special = {name: text for name in SPECIAL if (text := _text(config.get(name)))}
    eos = tokenizer.token_to_id(special.get("eos_token", ""))
    return Vocabulary(tokenizer, special, () if eos is None else (eos,), _template(folder, config))


def _text(token: Any) -> str:
    """Return a token such as bos_token, which is written as text or as an object."""
    return str((token.get("content") if isinstance(token, Mapping) else token) or "")


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = (entry for entry in template if isinstance(entry, Mapping))
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return template
