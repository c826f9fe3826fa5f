"""Prompts to text: tokens through `generate`, pieces of text as they come, and how fast."""

import time
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from llama.generation import Prompt, generate
from llama.model import Llama
from llama.sampling import Settings
from llama.tokenizer import Tokenizer


class Piece(NamedTuple):
    """Text that goes on from a prompt; empty while a character is not whole."""

    prompt: int
    text: str
    last: bool


class Speed:
    """How many tokens a batch took in and gave, and in which time.

    Attributes
    ----------
    cut : int
        Texts that ended for want of room and not by themselves.
    """

    def __init__(self) -> None:
        self.cut = 0
        self._prompt_tokens = 0
        self._steps: list[int] = []
        self._times: list[float] = []

    def start(self, prompt_tokens: int) -> None:
        """Count the prompts, and the time from now on."""
        self._prompt_tokens = prompt_tokens
        self._times.append(time.perf_counter())

    def step(self, tokens: int) -> None:
        """Count a step that gave `tokens` tokens."""
        self._steps.append(tokens)
        self._times.append(time.perf_counter())

    def __str__(self) -> str:
        """One line; the first new tokens come with the prompt, so they do not count for speed."""
        start, first, last = self._times[0], self._times[1], self._times[-1]
        line = f"prompt {self._prompt_tokens} tokens, {self._prompt_tokens / (first - start):.1f}/s"
        new = sum(self._steps)
        line += f"; new {new} token{'s' * (new != 1)}"
        if len(self._steps) > 1:
            line += f", {sum(self._steps[1:]) / (last - first):.1f}/s"
        return line


def complete(
    model: Llama,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    settings: Settings,
    eos: Container[int],
    speed: Speed,
    page_size: int | None = None,
) -> Iterator[Piece]:
    """Yield what follows each prompt, as it comes.

    Each text ends at a token of `eos`, which is left out, or after its prompt's
    maximum; its last piece says so. `speed`, a new one, is filled in on the way. Other arguments
    and errors are those of `generate`.
    """
    speed.start(sum(len(prompt.tokens) for prompt in prompts))
    streams = [tokenizer.stream(prompt.tokens) for prompt in prompts]
    going_on = list(range(len(prompts)))
    for step, tokens in enumerate(generate(model, prompts, settings, page_size), start=1):
        speed.step(len(going_on))
        for i in tuple(going_on):
            ended = int(tokens[i]) in eos
            text = "" if ended else streams[i].push(int(tokens[i]))
            cut = not ended and step == prompts[i].max_new_tokens
            speed.cut += cut
            if ended or cut:
                going_on.remove(i)
                text += streams[i].end()
            yield Piece(i, text, ended or cut)
        if not going_on:
            return
