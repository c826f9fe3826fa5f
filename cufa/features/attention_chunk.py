"""Chunked attention: a query sees the keys of its own chunk only (Llama 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cufa.arrays import Array
from cufa.checks import check_integer
from cufa.features.feature import Bound, Call, Option, Places, Reach, Value
from cufa.features.part import Parameter, Part

_LONGEST = 2**30
"""The longest sequences; a longer chunk hides no more."""


def _read(text: str) -> object:
    """Return the keys of a chunk: ``8192``."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no chunk: its keys are needed, such as 8192") from None


@dataclass(frozen=True)
class AttentionChunk(Value):
    """Chunks that positions are divided into.

    Attributes
    ----------
    size : int
        Query i stands at position p = i + seq_kv - seq_q, and sees the keys j of
        j // size == p // size, rounded down. A query that stands before the first key sees none.
    """

    size: int

    ARGUMENT = "attention_chunk"
    LONGEST = _LONGEST
    OPTION = Option(
        "--attention-chunk", "N", "keys of a chunk: a query sees those of its own", _read
    )
    PARTS = (
        Part(
            "AttentionChunk",
            "attention_chunk",
            (Parameter("attention_chunk", "i4"),),
            left_edge=True,
            right_edge=True,
            jumps=True,
            decodes=True,
        ),
    )

    @classmethod
    def parse(cls, given: object) -> AttentionChunk | None:
        """Check the argument."""
        size = check_integer("attention_chunk", given, "an integer or None")
        if size < 1:
            raise ValueError(
                f"attention_chunk must be 1 or more, or None for no chunks, not {given}"
            )
        return cls(min(size, _LONGEST))

    @property
    def words(self) -> str:
        """The words for it in a line about a problem."""
        return f"attention_chunk {self.size}"

    def parts(self, call: Call) -> tuple[str, ...]:
        """Return its part; in a cache of one chunk, one query sees all keys."""
        sees_all = call.is_cached and call.seq_q == 1 and call.seq_kv <= self.size
        return () if sees_all else ("AttentionChunk",)

    def numbers(self, call: Call) -> dict[str, float]:
        """Return the size."""
        return {"attention_chunk": self.size}

    def sees(self, i: Any, stands: Any) -> tuple[Bound, Bound]:
        """Return the first key of the queries' chunks, and the end."""
        first = stands // self.size * self.size
        return first, first + self.size

    @property
    def reach(self) -> Reach:
        """How far queries see."""
        return Reach(self.size - 1, self.size - 1, self.size)

    @staticmethod
    def hides(given: Any, at: Places, xp: Any) -> Array | None:
        """Return where a key is in another chunk."""
        return at.j // given != (at.j - at.ahead) // given
