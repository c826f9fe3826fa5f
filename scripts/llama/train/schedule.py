"""The learning rate of each step."""

import math


def learning_rate(step: int, steps: int, rate: float) -> float:
    """Return the rate of a step, counted from 1: a linear warm-up, then the fall of a cosine.

    Parameters
    ----------
    step, steps : int
    rate : float
        The largest.
    """
    warm_up = max(1, steps // 40)
    fall = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return rate * min(step / warm_up, max(fall, 0.01))
