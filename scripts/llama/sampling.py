"""Choosing the next token from logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from models import Array

from llama.ops import largest, top


class Settings(NamedTuple):
    """How tokens are chosen.

    Attributes
    ----------
    temperature : float
        Divisor of the logits; 0 takes the likeliest token.
    top_k : int or None
        The number of likeliest tokens that are drawn from.
    top_p : float
        Only the likeliest tokens are drawn from, as few as have this probability together.
    repetition_penalty : float
        Positive logits of tokens that the sequence has are divided by it, negative ones multiplied
        (Keskar et al. 2019); 1 leaves them.
    seed : int
        Seed of the random numbers, for each sequence its own.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


class Sampler:
    """Chooses a token for each sequence of a batch, step by step.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    settings : Settings
    prompts : sequence of sequence of int
        Tokens that the sequences begin with.
    numbers : sequence of int
        One for each sequence; what is drawn depends on the seed and on it, not on the batch.
    vocabulary : int
    """

    def __init__(
        self,
        xp: Any,
        settings: Settings,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        vocabulary: int,
    ) -> None:
        self._xp, self._settings = xp, settings
        self._rows = xp.arange(len(prompts))
        self._generators = [np.random.default_rng((settings.seed, number)) for number in numbers]
        self._seen = None
        if settings.repetition_penalty != 1:
            seen = np.zeros((len(prompts), vocabulary), bool)
            for row, prompt in enumerate(prompts):
                seen[row, list(prompt)] = True
            self._seen = xp.asarray(seen)

    def __call__(self, logits: Array) -> Array:
        """Return the tokens, (sequences,) int64, chosen by logits (sequences, vocabulary)."""
        if self._seen is not None:
            with np.errstate(all="ignore"):  # beyond float32's ends it is 0 or infinite
                penalty = np.float32(self._settings.repetition_penalty)
                punished = self._xp.where(logits > 0, logits / penalty, logits * penalty)
            logits = self._xp.where(self._seen, punished, logits)
        tokens = self._draw(logits) if self._settings.temperature > 0 else largest(logits)
        if self._seen is not None:
            self._seen[self._rows, tokens] = True
        return tokens

    def _draw(self, logits: Array) -> Array:
        xp = self._xp
        order = top(logits, self._settings.top_k)
        scores = xp.take_along_axis(logits, order, axis=-1).astype(np.float64)
        # Likeliest first, so scores[:, :1] are the largest.
        with np.errstate(over="ignore"):
            p = xp.exp((scores - scores[:, :1]) / self._settings.temperature)
        p /= p.sum(axis=-1, keepdims=True)
        below = p.cumsum(axis=-1) - p  # what is likelier has this probability together
        p *= below < self._settings.top_p
        reached = p.cumsum(axis=-1)
        drawn = xp.asarray(np.array([generator.random() for generator in self._generators]))
        # The first place where the sum exceeds what was drawn; rounding never leads past the last.
        place = (reached <= drawn[:, None] * reached[:, -1:]).sum(axis=-1)
        return order[self._rows, place]
