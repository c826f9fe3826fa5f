"""`Problem`: what one attention call asks for, as numbers that have been checked.

Everything after it works on these, so that neither the planner nor a kernel has to ask again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cufa.checks import (
    NO_WINDOW,
    check_causal,
    check_dropout,
    check_flag,
    check_scale,
    check_softcap,
    check_window,
)
from cufa.dropout import threshold
from cufa.dtypes import DTYPES
from cufa.score import PARTS, Part, part_named
from cufa.softcap import curve
from cufa.specs import MAX_HEAD_DIM


class Problem(NamedTuple):
    """One attention problem as plain values: hashable, and without arrays.

    Attributes
    ----------
    dtype : str
        Of q, k, v and the result: "float16", "bfloat16" or "float32".
    batch, heads_q, heads_kv, seq_q, seq_kv : int
        Sizes; `heads_q` is a multiple of `heads_kv`. Any of them may be 0.
    head_dim, head_dim_v : int
        Last axis of q and k, and of v and the result: 1 to 256.
    causal : bool
        Whether query i sees only the keys j <= i + seq_kv - seq_q.
    scale : float
        Factor of the scores before the softmax; less than 2^64 in magnitude, and may be zero or
        negative.
    top_left : bool
        Whether query i sees only the keys j <= i.
    left, right : int or None
        Query i sees only the keys from i + seq_kv - seq_q - left on, and up to
        i + seq_kv - seq_q + right. None is no bound, and so is a `right` that `causal` implies.
    softcap : float
        c of c * tanh(score / c), which takes the place of a score; 0 for none.
    reads : tuple of str
        The parts of the score that read arrays beside q, k and v, and those that were made of the
        caller's own expressions.
    dropout_p : float
        How many of the weights are dropped.
    kv : str
        "Dense"; "Padded", if each sequence has only the first ones of the keys, up to its length;
        or "Varlen", if sequences of any lengths follow each other: then `batch` is 1, and `seq_q`
        and `seq_kv` are those of all together.
    sequences, max_seqlen_q, max_seqlen_k : int
        Of "Varlen": how many there are, and the longest that count.
    returns_lse : bool
        Whether the log-sum-exp is asked for.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    scale: float
    top_left: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    reads: tuple[str, ...] = ()
    dropout_p: float = 0.0
    kv: str = "Dense"
    sequences: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    returns_lse: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one K/V head; at least 1, also when there are no heads."""
        return max(1, self.heads_q // max(1, self.heads_kv))

    @property
    def sizes(self) -> dict[str, int]:
        """Those that arrays of scores have, by the letters of their axes."""
        if self.kv == "Varlen":
            sizes = self.sequences, self.heads_q, self.max_seqlen_q, self.max_seqlen_k
        else:
            sizes = self.batch, self.heads_q, self.seq_q, self.seq_kv
        return dict(zip("bhqk", sizes, strict=True))

    @property
    def alike(self) -> Problem:
        """The same, or one with sequences of one length that takes about as long."""
        if self.kv != "Varlen":
            return self
        n = max(1, self.sequences)
        rows, keys = -(-self.seq_q // n), -(-self.seq_kv // n)
        return self._replace(batch=n, seq_q=rows, seq_kv=keys, kv="Dense")

    @property
    def score(self) -> tuple[str, ...]:
        """The parts of the score, see `cufa.score`."""
        found = {
            DTYPES[self.dtype].softcap_part(self.returns_lse): self.softcap > 0,
            "Causal": self.causal,
            "TopLeft": self.top_left,
            "WindowLeft": self.left is not None,
            "WindowRight": self.right is not None,
        }
        found |= dict.fromkeys(self.reads, True)
        found["Dropout"] = self.dropout_p > 0
        own = (name for name in self.reads if name not in PARTS)
        return (*(name for name in PARTS if found.get(name)), *own)

    @property
    def has_window(self) -> bool:
        """Whether there is a bound beside those of causal masks."""
        return self.left is not None or self.right is not None

    @property
    def window_left(self) -> int:
        """`left` as the kernels have it."""
        return 0 if self.left is None else self.left

    @property
    def window_right(self) -> int:
        """`right` as the kernels have it."""
        return 0 if self.right is None else self.right

    @property
    def softcap_log2(self) -> float:
        """`softcap` as the kernels have it: of scores in log2 units."""
        return self.softcap * math.log2(math.e)

    @property
    def dropout_threshold(self) -> int:
        """Of 32 random bits: those that are less drop a weight."""
        return threshold(self.dropout_p)

    @property
    def dropout_keep(self) -> float:
        """How many of the weights are kept."""
        return 1 - threshold(self.dropout_p) / 2**32

    @property
    def softcap_inverse(self) -> float:
        """Its reciprocal."""
        return 1 / self.softcap_log2

    @property
    def softcap_root(self) -> float:
        """`cufa.softcap.Curve.root`; the others likewise."""
        return curve(self.scale, self.softcap).root

    @property
    def softcap_middle(self) -> float:
        """See `softcap_root`."""
        return curve(self.scale, self.softcap).middle

    @property
    def softcap_rest(self) -> float:
        """See `softcap_root`."""
        return curve(self.scale, self.softcap).rest

    @property
    def softcap_end(self) -> float:
        """See `softcap_root`."""
        return curve(self.scale, self.softcap).end

    @property
    def visited(self) -> int:
        """How many keys there are from the first on that one of the queries sees."""
        if self.left is None:
            return self.seq_kv
        return min(self.seq_kv, max(1, self.left + self.seq_q))

    @property
    def most_seen(self) -> int | None:
        """The most keys that a query sees, where a window has both ends and leaves some out."""
        ends = [0] if self.causal else []
        ends += [] if self.right is None else [self.right]
        if self.left is None or not ends or self.left + min(ends) + 1 >= self.seq_kv:
            return None
        return self.left + min(ends) + 1

    def sees(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key that each of some queries sees, and the end of what it sees."""
        i = np.arange(rows.start, rows.stop)
        stands = i + self.seq_kv - self.seq_q
        first, end = np.zeros_like(i), np.full_like(i, self.seq_kv)
        if self.left is not None:
            first = np.clip(stands - self.left, 0, self.seq_kv)
        if self.causal:
            end = np.minimum(end, stands + 1)
        if self.top_left:
            end = np.minimum(end, i + 1)
        if self.right is not None:
            end = np.minimum(end, stands + 1 + self.right)
        return first, np.maximum(end, first)

    @classmethod
    def of_shapes(
        cls,
        q_shape: Sequence[int],
        k_shape: Sequence[int],
        v_shape: Sequence[int],
        *,
        dtype: str = "float16",
        causal: bool | str = False,
        scale: float | None = None,
        window: tuple[int | None, int | None] = NO_WINDOW,
        softcap: float | None = None,
    ) -> Problem:
        """Build a problem from 4-D (batch, heads, seq, head_dim) shapes, with no arrays.

        Parameters
        ----------
        q_shape, k_shape, v_shape : sequence of int
            (b, hq, sq, d), (b, hk, sk, d) and (b, hk, sk, dv).
        dtype : str
            "float16", "bfloat16" or "float32".
        causal, window, softcap
            As in `attention`.
        scale : float, optional
            1 / sqrt(head_dim) when not given.

        Returns
        -------
        Problem

        Raises
        ------
        TypeError
            For a dtype that is not supported, and for arguments of the wrong type.
        ValueError
            For shapes that do not fit each other, a head_dim outside 1..256, a scale of 2^64
            or more, a window that no key can be in, a softcap outside 1e-6..1e4.
        """
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        shapes = []
        for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
            if not isinstance(shape, Iterable):
                kind = type(shape).__name__
                raise TypeError(f"{name}_shape must be a sequence of sizes, not {kind}")
            sizes = tuple(shape)
            if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in sizes):
                raise ValueError(f"{name} has shape {sizes}: sizes must be integers >= 0")
            if len(sizes) != 4:
                raise ValueError(f"{name} has shape {sizes}: 4 axes (b, h, s, d) are needed")
            shapes.append(tuple(int(n) for n in sizes))
        score = Score(causal, scale, window, softcap)
        return from_shapes(dtype, *shapes, score=score, shown=tuple(shapes))


class Score(NamedTuple):
    """What a caller says of the scores, unchecked."""

    causal: object
    scale: float | None
    window: object
    softcap: object


def checked(problem: Problem) -> Problem:
    """Check a problem that may have been made field by field, and return it in plain values.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    Problem

    Raises
    ------
    TypeError, ValueError
        As `Problem.of_shapes`.
    """
    p = problem
    return Problem.of_shapes(
        (p.batch, p.heads_q, p.seq_q, p.head_dim),
        (p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        (p.batch, p.heads_kv, p.seq_kv, p.head_dim_v),
        dtype=p.dtype,
        causal="top-left" if p.top_left else p.causal,
        scale=p.scale,
        window=(p.left, p.right),
        softcap=p.softcap or None,
    )._replace(
        reads=tuple(name for name in p.reads if _is_beside(part_named(name))),
        dropout_p=check_dropout(p.dropout_p),
        returns_lse=check_flag("returns_lse", p.returns_lse),
    )


def _is_beside(part: Part) -> bool:
    """Whether `Problem.reads` may hold a part."""
    return bool(part.axes or part.source)


def right_edge(
    bottom_right: bool, right: int | None, top_left: bool = False
) -> tuple[bool, int | None]:
    """Return what a mask aligned bottom-right and a window's right bound are together: one of both.

    Beside a mask aligned top-left, a window stays one.
    """
    if bottom_right and right is not None and right >= 0:
        return True, None
    if right is not None and right < 0:
        return False, right
    if right == 0 and not top_left:
        return True, None
    return bottom_right, right


def from_shapes(
    dtype: str,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    *,
    score: Score,
    shown: tuple[tuple[int, ...], ...],
) -> Problem:
    """Check 4-D shapes and the scalar arguments; errors quote the caller's own shapes, `shown`."""
    batch, heads_q, seq_q, head_dim = q_shape
    shown_q, shown_k, shown_v = shown

    def mismatch(name: str, what: str, other: str) -> ValueError:
        shapes = {"q": shown_q, "k": shown_k, "v": shown_v}
        return ValueError(
            f"{name} has shape {shapes[name]}, but {other} has shape {shapes[other]}: {what}"
        )

    for name, shape in (("k", k_shape), ("v", v_shape)):
        if shape[0] != batch:
            raise mismatch(name, f"batch {shape[0]} and {batch} differ", "q")
    if k_shape[3] != head_dim:
        raise mismatch("k", f"head_dim {k_shape[3]} and {head_dim} differ", "q")
    for axis, what in ((1, "heads"), (2, "seq")):
        if v_shape[axis] != k_shape[axis]:
            raise mismatch("v", f"{what} {v_shape[axis]} and {k_shape[axis]} differ", "k")
    heads_kv = k_shape[1]
    if heads_q % heads_kv if heads_kv else heads_q:
        raise mismatch("q", f"heads {heads_q} is no multiple of heads {heads_kv}", "k")
    for name, dim, shape in (("q", head_dim, shown_q), ("v", v_shape[3], shown_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has shape {shape}: head_dim must be 1 to {MAX_HEAD_DIM}, not {dim}"
            )
    bottom_right, top_left = check_causal(score.causal)
    left, right = check_window(score.window, bottom_right)
    bottom_right, right = right_edge(bottom_right, right, top_left)
    return Problem(
        dtype,
        batch,
        heads_q,
        heads_kv,
        seq_q,
        k_shape[2],
        head_dim,
        v_shape[3],
        bottom_right,
        check_scale(score.scale, head_dim),
        top_left,
        left,
        right,
        check_softcap(score.softcap),
    )
