"""Generating text: prompts through the network, then a token of each sequence a step."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from models import Array, HostCopy, ModelError

from llama.cache import Cache
from llama.decoder import borrowed
from llama.model import Llama
from llama.sampling import Sampler, Settings

#: Tokens of a prompt that pass the network together: enough to fill a GPU, and no more memory
#: than the activations of this number.
PREFILL_TOKENS = 8192


class Prompt(NamedTuple):
    """A text to go on from.

    Attributes
    ----------
    tokens : sequence of int
    max_new_tokens : int
        At least 1.
    number : int
        Its random draws depend on this and on the seed.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    number: int = 0


def generate(
    model: Llama,
    prompts: Sequence[Prompt],
    settings: Settings,
    page_size: int | None = None,
) -> Iterator[np.ndarray]:
    """Yield the next token of each prompt, (len(prompts),) integers, as often as one may have more.

    Prompts run as one batch whatever their lengths; none is padded, and each sees its own tokens
    alone. Tokens after an end token, or a prompt's maximum, are for the caller to ignore; closing
    the iterator ends the work.

    Parameters
    ----------
    model : Llama
    prompts : sequence of Prompt
    settings : Settings
    page_size : int, optional
        Tokens of a page of the cache; without it, each sequence's are in one piece.

    Raises
    ------
    ModelError
        A prompt and its new tokens are longer than the model takes, a prompt has tokens that it
        does not know, or its logits are not finite.
    ValueError
        A prompt has no tokens or may have no new one, or `page_size` is less than 1.
    """
    if not prompts or min(len(prompt.tokens) for prompt in prompts) == 0:
        raise ValueError("each prompt needs a token at least")
    if min(prompt.max_new_tokens for prompt in prompts) < 1:
        raise ValueError("max_new_tokens must be at least 1")
    if page_size is not None and page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    model.check_length(max(len(prompt.tokens) + prompt.max_new_tokens for prompt in prompts))
    known = range(model.config.vocabulary)
    unknown = [token for prompt in prompts for token in prompt.tokens if token not in known]
    if unknown:
        raise ModelError(f"the tokenizer gives token {unknown[0]}, the model knows {len(known)}")
    # Sorted, so that prompts of one length are neighbours and pass the network together.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
    place = np.argsort(order)
    prompts = [prompts[i] for i in order]
    tokens = [prompt.tokens for prompt in prompts]
    room = np.array([prompt.max_new_tokens for prompt in prompts])
    steps = int(room.max())
    numbers = [prompt.number for prompt in prompts]
    sampler = Sampler(model.xp, settings, tokens, numbers, model.config.vocabulary)
    # A GPU is given the next step before the host waits for this one's tokens.
    ahead = 0 if model.xp is np else 1
    under_way: deque[HostCopy] = deque()
    capacities = [len(prompt.tokens) + prompt.max_new_tokens for prompt in prompts]
    with borrowed(model, capacities, page_size) as decoder:
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # which logits show
                logits = prefill(model, decoder.cache, tokens)
            if not model.xp.isfinite(logits).all():
                raise ModelError(
                    "the model's logits are not finite: some weight is not, or its dtype does not "
                    "hold what comes of them (float32 may)"
                )
            for step in range(1, steps + 1):
                chosen = sampler(logits)
                under_way.append(HostCopy(chosen))
                if len(under_way) > ahead:
                    yield under_way.popleft().wait()[place]
                if step < steps:
                    logits = decoder.step(chosen, (room > step).astype(np.int64))
            while under_way:
                yield under_way.popleft().wait()[place]
        finally:  # the memory of a copy is not to be another's before the GPU has written it
            for copy in under_way:
                copy.wait()


def prefill(model: Llama, cache: Cache, prompts: Sequence[Sequence[int]]) -> Array:
    """Append prompts, sorted by length, to an empty cache; return the logits after each's last."""
    xp = model.xp
    parts = []
    first = 0
    for length, run in groupby(prompts, key=len):
        ids = np.array(list(run))
        rows = max(1, PREFILL_TOKENS // length)
        for start in range(0, len(ids), rows):
            some = xp.asarray(ids[start : start + rows])
            place = slice(first + start, first + start + len(some))
            for begin in range(0, length, PREFILL_TOKENS):
                states = model.extend(cache[place], some[:, begin : begin + PREFILL_TOKENS])
            parts.append(states[:, -1])
        first += len(ids)
    return model.logits(xp.concatenate(parts))
