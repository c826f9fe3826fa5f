"""How the next token is chosen: what is drawn, how often, and that it can be drawn again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llama.sampling import Sampler, Settings

ROWS = 5000
P = np.array([0.05, 0.3, 0.15, 0.4, 0.1])


def as_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def draws(xp: Any, settings: Settings, p: np.ndarray = P, steps: int = 1) -> np.ndarray:
    """Return tokens that were drawn, (steps, ROWS), from logits of these probabilities."""
    sampler = Sampler(xp, settings, [[0]] * ROWS, range(ROWS), len(p))
    logits = xp.asarray(np.broadcast_to(np.log(p) + 3, (ROWS, len(p))).astype(np.float32))
    return np.stack([as_numpy(sampler(logits)) for _ in range(steps)])


def assert_shares(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Check shares within five standard deviations; what has no probability never comes."""
    count = np.bincount(tokens.ravel(), minlength=len(expected))
    assert not count[expected == 0].any()
    sigma = np.sqrt(tokens.size * expected * (1 - expected))
    assert (np.abs(count - tokens.size * expected) <= 5 * sigma).all()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(1.0), P),
        (Settings(0.5), P**2 / (P**2).sum()),
        (Settings(2.0), P**0.5 / (P**0.5).sum()),
        (Settings(1.0, top_k=2), np.array([0, 3, 0, 4, 0]) / 7),
        (Settings(1.0, top_k=1), np.array([0, 0, 0, 1, 0])),
        (Settings(1.0, top_k=99), P),
        (Settings(1.0, top_p=0.6), np.array([0, 3, 0, 4, 0]) / 7),
        (Settings(1.0, top_p=0.75), np.array([0, 6, 3, 8, 0]) / 17),
        (Settings(1.0, top_p=0.01), np.array([0, 0, 0, 1, 0])),
        # The probabilities that top_p counts are those of what top_k leaves: 4/7 and 3/7.
        (Settings(1.0, top_k=2, top_p=0.55), np.array([0, 0, 0, 1, 0])),
        # And of what the temperature makes of them: 16/29 and 9/29.
        (Settings(0.5, top_p=0.5), np.array([0, 0, 0, 1, 0])),
        (Settings(1e-4), np.array([0, 0, 0, 1, 0])),
        (Settings(0.0), np.array([0, 0, 0, 1, 0])),
    ],
)
def test_shares(xp: Any, settings: Settings, expected: np.ndarray) -> None:
    assert_shares(draws(xp, settings, steps=2), expected)


def test_many_tokens_of_little_probability(xp: Any) -> None:
    p = np.full(5000, 1 / 5000)
    tokens = draws(xp, Settings(1.0), p)
    halves = np.bincount(tokens.ravel() // 2500, minlength=2)
    assert abs(halves[0] - ROWS / 2) < 5 * (ROWS / 4) ** 0.5
    assert len(np.unique(tokens)) > 2500


def test_steps_and_sequences_draw_independently(xp: Any) -> None:
    first, second = draws(xp, Settings(1.0), steps=2)
    both = np.histogram2d(first, second, bins=len(P))[0] / ROWS
    assert np.abs(both - np.outer(P, P)).max() < 0.03
    both = np.histogram2d(first[1:], first[:-1], bins=len(P))[0] / ROWS
    assert np.abs(both - np.outer(P, P)).max() < 0.03


def test_a_seed_gives_the_same_tokens_again_in_any_batch(xp: Any) -> None:
    logits = xp.asarray(np.random.default_rng(1).standard_normal((4, 50)).astype(np.float32))
    settings = Settings(1.0, top_k=40, top_p=0.95, seed=11)

    def drawn(rows: list[int], settings: Settings = settings) -> np.ndarray:
        sampler = Sampler(xp, settings, [[0]] * len(rows), rows, 50)
        some = logits[xp.asarray(rows)]
        return np.stack([as_numpy(sampler(some)) for _ in range(20)], axis=1)

    together = drawn([0, 1, 2, 3])
    assert np.array_equal(together, drawn([0, 1, 2, 3]))
    assert np.array_equal(together[[3, 1]], drawn([3, 1]))
    assert not np.array_equal(together, drawn([0, 1, 2, 3], settings._replace(seed=12)))


def test_repetition_penalty(xp: Any) -> None:
    sampler = Sampler(xp, Settings(repetition_penalty=2.0), [[3], [1, 3]], [0, 1], 4)
    logits = xp.asarray(np.array([[-3, 1, 0, 1.9], [-0.4, 1, -0.3, 1.9]], np.float32))
    # 1.9 / 2 < 1; then 1 / 2 < 1.9 / 2. -0.3 is not made smaller by a division.
    assert as_numpy(sampler(logits)).tolist() == [1, 3]
    assert as_numpy(sampler(logits)).tolist() == [3, 3]
    logits = xp.asarray(np.array([[-3, -2, -2.5, -2], [-3, -2, -2.5, -2]], np.float32))
    # Twice -2 for what was there.
    assert as_numpy(sampler(logits)).tolist() == [2, 2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("extreme", [1e-320, 1e-40, 1e300])
def test_extremes_say_nothing(extreme: float) -> None:
    settings = Settings(min(extreme, 1.0), repetition_penalty=extreme)
    sampler = Sampler(np, settings, [[0]], [0], 3)
    token = sampler(np.array([[-0.5, 3, 2]], np.float32))
    assert extreme > 1 or token.tolist() == [1]
