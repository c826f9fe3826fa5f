"""The sums of the model in scripts/data/adder: how they are written, and which it never trained on.

The model reads "47+285=" and writes "233 332": the digits of the sum from the last to the first, in
the order in which carries arise, and then the sum.
"""

import numpy as np

#: Digits of a number, at most.
DIGITS = 4

#: One sum in this many is kept for tests.
HELD_OUT_EVERY = 16

BOS, EOS = "<s>", "</s>"

#: Tokens: a mark at each end of a line, and its characters.
VOCABULARY = {token: i for i, token in enumerate([BOS, EOS, *"0123456789+= "])}

#: Positions of the longest line: two numbers, two signs, the sum twice, a space, the marks.
LENGTH = 2 * DIGITS + 2 + 2 * (DIGITS + 1) + 1 + 2

_TOKENS = np.zeros(128, np.int32)
_TOKENS[[ord(token) for token in VOCABULARY if len(token) == 1]] = np.arange(2, len(VOCABULARY))


def prompt(a: int, b: int) -> str:
    """Return the sum as the model reads it."""
    return f"{a}+{b}="


def answer(a: int, b: int) -> str:
    """Return what the model should write."""
    return f"{str(a + b)[::-1]} {a + b}"


def is_held_out(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return which sums are kept from training, with a and b in either order."""
    low, high = np.minimum(a, b).astype(np.uint64), np.maximum(a, b).astype(np.uint64)
    mixed = (low * np.uint64(10**DIGITS) + high) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(32)) % np.uint64(HELD_OUT_EVERY) == 0


def draw(rng: np.random.Generator, count: int, *, held_out: bool) -> np.ndarray:
    """Return random pairs of numbers, (count, 2), that are all held out, or none of them.

    Each number of digits is as likely as another.
    """
    found = np.empty((0, 2), np.int64)
    while len(found) < count:
        digits = rng.integers(1, DIGITS + 1, (count, 2))
        low = np.where(digits == 1, 0, 10 ** (digits - 1))
        pairs = rng.integers(low, 10**digits)
        found = np.concatenate([found, pairs[is_held_out(*pairs.T) == held_out]])
    return found[:count]


def lines(pairs: np.ndarray, ignored: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of lines, and at each the next one if it belongs to the answer.

    Parameters
    ----------
    pairs : ndarray, (sums, 2)
    ignored : int
        Stands for the other targets.

    Returns
    -------
    ids, targets : ndarray, (sums, LENGTH) int32
        Lines begin with `BOS`; from their end on, they hold `EOS`.
    """
    prompts = [prompt(a, b) for a, b in pairs.tolist()]
    texts = [text + answer(a, b) for text, (a, b) in zip(prompts, pairs.tolist(), strict=True)]
    begins, ends = (np.array([[len(t)] for t in each]) for each in (prompts, texts))
    codes = np.array(texts, f"S{LENGTH}").view(np.uint8).reshape(len(pairs), LENGTH)
    places = np.arange(LENGTH)
    following = np.where(places < ends, _TOKENS[codes], np.int32(VOCABULARY[EOS]))
    ids = np.roll(following, 1, axis=1)
    ids[:, 0] = VOCABULARY[BOS]
    is_answer = (places >= begins) & (places <= ends)
    return ids, np.where(is_answer, following, np.int32(ignored))
