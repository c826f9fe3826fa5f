"""Text of tokens that come one at a time, in whole characters and in linear time."""

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Container, Sequence
from itertools import islice
from typing import Any

#: Bytes of a character before its last, at most: as many tokens may hold the beginning of one.
BEGINNING = 3

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_reader(tokenizer: Any) -> Callable[[int], bytes | None]:
    """Return what gives the bytes of a token of a `tokenizers.Tokenizer`.

    It gives None where they depend on the tokens before, as a space before a word may.
    """
    state = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    kinds = {each["type"] for each in state.get("decoders", [state]) if "type" in each}
    byte_of = _alphabet()

    def of_letters(token: int) -> bytes | None:
        text = tokenizer.id_to_token(token) or ""
        if all(letter in byte_of for letter in text):
            return bytes(byte_of[letter] for letter in text)
        return text.encode()

    def of_fallback(token: int) -> bytes | None:
        match = _BYTE.fullmatch(tokenizer.id_to_token(token) or "")
        return bytes([int(match[1], 16)]) if match else None

    if kinds == {"ByteLevel"}:
        return of_letters
    return of_fallback if "ByteFallback" in kinds else lambda token: None


def _alphabet() -> dict[str, int]:
    """Return which byte each letter of a vocabulary of bytes stands for (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = [*map(chr, plain), *(chr(256 + i) for i in range(len(others)))]
    return dict(zip(letters, [*plain, *others], strict=True))


class TextStream:
    """Turns tokens to text as they come.

    Bytes that are no UTF-8 become U+FFFD, and what is around them stays. `Tokenizer.decode` does
    not keep it if tokens are single bytes that follow each other: it knows all of them, and makes
    each a U+FFFD.

    Parameters
    ----------
    bytes_of : callable
        As `byte_reader` returns it.
    decode : callable
        Returns the text of tokens, without special ones.
    special : container of int
        Tokens that are no text.
    prompt : sequence of int
        Tokens that stand before.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes | None],
        decode: Callable[[Sequence[int]], str],
        special: Container[int],
        prompt: Sequence[int],
    ) -> None:
        self._bytes_of, self._decode, self._special = bytes_of, decode, special
        self._utf8 = getincrementaldecoder("utf-8")(errors="replace")
        # The token before: what the next one's text depends on.
        self._before: list[int] = []
        visible = islice((token for token in reversed(prompt) if token not in special), BEGINNING)
        for token in reversed(list(visible)):  # a character that begins there may end here
            self.push(token)

    def push(self, token: int) -> str:
        """Return the text that one more token completes; it may be empty."""
        if token in self._special:
            return ""
        data = self._bytes_of(token)
        if data is None:
            known = self._decode(self._before)
            data = self._decode([*self._before, token])[len(known) :].encode()
        self._before = [token]
        return self._utf8.decode(data)

    def end(self) -> str:
        """Return what is left when no more tokens come: half a character, as it is."""
        return self._utf8.decode(b"", final=True)
