"""The sums of the model in scripts/data/adder: how they are written, and which it never trained on.

The model reads "47+285=" and writes "233 332": the digits of the sum from the last to the first, in
the order in which carries arise, and then the sum.
"""

import numpy as np

#: Digits of a number, at most.
DIGITS = 4

#: One sum in this many is kept for tests.
HELD_OUT_EVERY = 16


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
