"""Text to tokens and back, and a conversation as the text that a model was trained on."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from models import ModelError, is_text

from llama import gguf
from llama.stream import TextStream, byte_reader
from llama.template import render
from llama.vocabulary import read_vocabulary, told

#: Special tokens that end a turn of a conversation, or a text, in any vocabulary that holds them.
#: gpt-oss's <|end|> is none: its answer is in several messages.
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|return|>",
)


class Tokenizer:
    """The tokenizer of a model, and its chat template if it has one.

    Parameters
    ----------
    path : Path
        Path of a folder or a GGUF file.

    Attributes
    ----------
    eos : tuple of int
        Tokens that end a text: those that tokenizer_config.json or the GGUF file names, and those
        of `ENDS` that there are.
    template : str or None
        The chat template, in Jinja.

    Raises
    ------
    ModelError
        A file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path if path.is_file() else path / "tokenizer.json"
        found = gguf.read_vocabulary(path) if path.is_file() else read_vocabulary(path)
        self._tokenizer, self._tokens, eos, self.template = found
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        ends = (self._tokenizer.token_to_id(text) for text in ENDS)
        self.eos = tuple(sorted({*eos, *self._special.intersection(ends)}))
        with told(self._path):
            self._bytes_of = byte_reader(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the marks that the tokenizer puts around one.

        Raises
        ------
        ModelError
            It has bytes that are not UTF-8, or nothing that the tokenizer knows.
        """
        tokens = self._ids(text, marks=True)
        if text and not self._ids(text, marks=False):
            raise ModelError(f"the tokenizer has no tokens for {text[:40]!r}")
        return tokens

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
            raise ModelError("the model has no chat template")
        return self._ids(render(self.template, messages, self._tokens), marks=False)

    def _ids(self, text: str, *, marks: bool) -> list[int]:
        if not is_text(text):
            raise ModelError("the text is not UTF-8")
        with told(self._path):
            return self._tokenizer.encode(text, add_special_tokens=marks).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        with told(self._path):
            return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """Return what turns the tokens after `prompt` to text, one at a time."""
        return TextStream(self._bytes_of, self.decode, self._special, prompt)
