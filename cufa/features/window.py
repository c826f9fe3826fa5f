"""A window: how many keys before and after its own a query sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cufa.arrays import Array
from cufa.checks import check_integer
from cufa.features.causal import Causal
from cufa.features.feature import Call, Option, Places, Reach, Value
from cufa.features.part import Parameter, Part

NO_WINDOW = (None, None)
"""The window of all keys."""

MAX_WINDOW = 2**30
"""A bound of a window that is no bound, and the longest sequences that a window is for."""


_LEFT, _RIGHT = (Parameter("window_left", "i4"),), (Parameter("window_right", "i4"),)


def _checked(name: str, n: object) -> int | None:
    """Return a bound of a window that a caller gives."""
    if n is None:
        return None
    bound = check_integer(f"window: {name}", n, "an integer or None")
    if bound < 0:
        raise ValueError(
            f"window: {name} must be 0 or more, or None for no bound (flash-attn's -1), not {n}"
        )
    return bound


def _read(text: str) -> object:
    """Return the bounds of a window: ``4096,0``, or ``512,none``."""
    try:
        left, right = (None if word == "none" else int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(
            f"{text!r} is no window: keys before and after are needed, such as 4096,0 or 512,none"
        ) from None
    return left, right


@dataclass(frozen=True)
class Window(Value):
    """A window around the key that a query stands at.

    Attributes
    ----------
    left, right : int or None
        Query i sees the keys from i + seq_kv - seq_q - left on, and up to
        i + seq_kv - seq_q + right. None is no bound, and so is a `right` that a causal mask
        implies.
    """

    left: int | None
    right: int | None

    ARGUMENT = "window"
    DEFAULT = NO_WINDOW
    LONGEST = MAX_WINDOW
    OPTION = Option(
        "--window",
        "L,R",
        "keys before and after its own that a query sees: 4096,0 or 512,none",
        _read,
    )
    PARTS = (
        Part("WindowLeft", "window", _LEFT, left_edge=True, decodes=True),
        Part("WindowRight", "window", _RIGHT, right_edge=True, decodes=True),
    )

    @classmethod
    def parse(cls, given: object) -> Window | None:
        """Check the argument, alone."""
        if not isinstance(given, tuple) or len(given) != 2:
            shown = repr(given) if isinstance(given, tuple) else type(given).__name__
            raise TypeError(f"window must be a tuple (left, right), not {shown}")
        left, right = map(_checked, ("left", "right"), given)
        return None if left is right is None else cls(left, right)

    def settle(self, found: dict[str, Value]) -> None:
        """Make of a right bound and a causal mask, aligned bottom-right, one of both.

        With a mask aligned top-left, a window stays one.
        """
        bounds = self.left, self.right
        left, right = (None if n is None or n >= MAX_WINDOW else n for n in bounds)
        causal = found.get("causal")
        if causal == Causal():
            right = None
        elif right == 0 and causal is None:
            found["causal"], right = Causal(), None
        if left is right is None:
            del found["window"]
        else:
            found["window"] = Window(left, right)

    @property
    def words(self) -> str:
        """The words for it in a line about a problem."""
        ends = ("none" if n is None else str(n) for n in (self.left, self.right))
        return f"window {','.join(ends)}"

    def parts(self, call: Call) -> tuple[str, ...]:
        """Return the parts of its bounds; in a cache, of those that can hide a key."""
        far = (call.seq_kv - 1, call.seq_q - 1) if call.is_cached else (MAX_WINDOW, MAX_WINDOW)
        bounds = zip(self.PARTS, (self.left, self.right), far, strict=True)
        return tuple(part.name for part, n, m in bounds if n is not None and n < m)

    def numbers(self, call: Call) -> dict[str, float]:
        """Return the bounds."""
        return {"window_left": self.left or 0, "window_right": self.right or 0}

    @property
    def reach(self) -> Reach:
        """How far queries see."""
        return Reach(self.left, self.right)

    @staticmethod
    def hides(given: Any, at: Places, xp: Any) -> Array | None:
        """Return where a key is beyond one of the bounds."""
        left, right = (at.seq_q + at.seq_kv if edge is None else edge for edge in given)
        return (at.ahead < -left) | (at.ahead > right)
