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
from cufa.dtypes import DTYPES
from cufa.features.dropout import threshold
from cufa.features.parts import PARTS, Part, part_named
from cufa.features.softcap import curve
from cufa.specs import MAX_HEAD_DIM

Ints = tuple[int, ...]

MAX_KEYS = 2**31 - 2**20
"""Of a sequence in a cache: positions are 32-bit integers in the kernels, rounded up to tiles."""

CACHES = ("Contiguous", "Paged")
"""Of `Problem.kv`: where `decode` finds keys."""


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
        "Varlen", if sequences of any lengths follow each other: then `batch` is 1, and `seq_q` and
        `seq_kv` are those of all together; or "Contiguous" and "Paged" for the caches of `decode`,
        where a sequence has up to `seq_kv` keys, and its queries are the newest positions.
    sequences, max_seqlen_q, max_seqlen_k : int
        Of "Varlen": how many there are, and the longest that count.
    returns_lse : bool
        Whether the log-sum-exp is asked for.
    pages, page_size : int
        Of "Paged": pages of the cache, and keys of a page.
    unified_max : float, optional
        What takes the place of row maxima, in a cache.
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
    pages: int = 0
    page_size: int = 0
    unified_max: float | None = None

    def sized(self, batch: int, heads_q: int, heads_kv: int, seq_q: int, seq_kv: int) -> Problem:
        """Return the same with other sizes, sooner than `_replace` does."""
        sizes = batch, heads_q, heads_kv, seq_q, seq_kv
        return Problem._make((self.dtype, *sizes, *self[1 + len(sizes) :]))

    @property
    def capacity(self) -> int:
        """Keys of a sequence at most."""
        return self.seq_kv

    @property
    def is_paged(self) -> bool:
        """Whether a block table says where keys are."""
        return self.kv == "Paged"

    @property
    def has_keys(self) -> bool:
        """Whether any sequence could have a key."""
        return self.seq_kv > 0 and (self.pages > 0 or not self.is_paged)

    @property
    def in_cache(self) -> Problem:
        """The same, as `decode` runs it: that of a cache in which all sequences are full."""
        return self if self.kv in CACHES else self._replace(kv="Contiguous")

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
        """The parts of the score, see `cufa.features.parts`.

        In a cache, masks that hide no key are left out.
        """
        causal, left, right = self.causal, self.left is not None, self.right is not None
        if self.kv in CACHES:
            causal = causal and self.seq_q > 1
            left = self.left is not None and self.left < self.seq_kv - 1
            right = self.right is not None and self.right < self.seq_q - 1
        found = {
            DTYPES[self.dtype].softcap_part(self.returns_lse): self.softcap > 0,
            "Causal": causal,
            "TopLeft": self.top_left,
            "WindowLeft": left,
            "WindowRight": right,
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
        """`cufa.features.softcap.Curve.root`; the others likewise."""
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
        if self.left is None:
            return None
        ends = [0] if self.causal else []
        ends += [] if self.right is None else [self.right]
        if not ends or self.left + min(ends) + 1 >= self.seq_kv:
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
    _, heads_kv, seq_kv, head_dim_v = v_shape
    check_shapes("Dense", q_shape, k_shape, v_shape, shown)
    bottom_right, top_left = check_causal(score.causal)
    left, right = check_window(score.window, bottom_right)
    bottom_right, right = right_edge(bottom_right, right, top_left)
    return Problem(
        dtype,
        batch,
        heads_q,
        heads_kv,
        seq_q,
        seq_kv,
        head_dim,
        head_dim_v,
        bottom_right,
        check_scale(score.scale, head_dim),
        top_left,
        left,
        right,
        check_softcap(score.softcap),
    )


def check_shapes(
    kv: str,
    q: Ints,
    k: Ints,
    v: Ints,
    shown: tuple[Ints, ...] = (),
    table: Ints = (),
) -> int:
    """Check 4-D shapes of a call, and return how many keys a sequence has at most.

    Parameters
    ----------
    kv : str
        As of `Problem`.
    q, k, v : tuple of int
        (batch, heads, seq, head_dim); of "Paged", k and v are (pages, heads, page_size, head_dim).
    shown : tuple of tuple of int, optional
        Those of q, k and v that errors quote, if the caller's are others.
    table : tuple of int, optional
        Of the block table of "Paged".

    Raises
    ------
    ValueError
    """
    batch, heads_q, _, head_dim = q
    blocks, heads_kv, keys, head_dim_k = k
    of_v, _, _, head_dim_v = v
    cached, paged = kv in CACHES, kv == "Paged"
    if not (cached or blocks == batch):
        raise _mismatch("k", f"batch {blocks} and {batch} differ", "q", cached, shown or (q, k, v))
    if not (cached or of_v == batch):
        raise _mismatch("v", f"batch {of_v} and {batch} differ", "q", cached, shown or (q, k, v))
    if head_dim_k != head_dim:
        what = f"head_dim {head_dim_k} and {head_dim} differ"
        raise _mismatch("k", what, "q", cached, shown or (q, k, v))
    if v[:3] != k[:3]:
        axis = next(i for i in range(3) if v[i] != k[i])
        names = ("pages", "heads", "page_size") if paged else ("batch", "heads", "capacity")
        name = names[axis] if cached else ("batch", "heads", "seq")[axis]
        what = f"{name} {v[axis]} and {k[axis]} differ"
        raise _mismatch("v", what, "k", cached, shown or (q, k, v))
    if heads_q % heads_kv if heads_kv else heads_q:
        what = f"heads {heads_q} is no multiple of heads {heads_kv}"
        raise _mismatch("q", what, "k", cached, shown or (q, k, v))
    if not 1 <= head_dim <= MAX_HEAD_DIM >= head_dim_v >= 1:
        i, dim = (2, head_dim_v) if 1 <= head_dim <= MAX_HEAD_DIM else (0, head_dim)
        raise ValueError(
            f"{_names(cached)[i]} has shape {(shown or (q, k, v))[i]}: head_dim must be 1 to "
            f"{MAX_HEAD_DIM}, not {dim}"
        )
    if paged:
        if keys == 0:
            raise ValueError(f"k_cache has shape {(shown or (q, k, v))[1]}: pages hold no key")
        if len(table) != 2 or table[0] != batch:
            raise ValueError(
                f"block_table has shape {table}: (batch, pages a sequence) is needed, "
                f"batch being {batch} (q {(shown or (q, k, v))[0]})"
            )
        keys *= table[1]
    elif blocks != batch:
        raise _mismatch("k", f"batch {blocks} and {batch} differ", "q", cached, shown or (q, k, v))
    if cached and keys > MAX_KEYS:
        name = "block_table" if paged else "k_cache"
        raise ValueError(f"{name}: {keys} keys a sequence are more than {MAX_KEYS}")
    return keys


def _names(cached: bool) -> tuple[str, str, str]:
    return ("q", "k_cache", "v_cache") if cached else ("q", "k", "v")


def _mismatch(
    name: str, what: str, other: str, cached: bool, shown: tuple[Ints, ...]
) -> ValueError:
    """Return the error for two arrays that do not fit each other."""
    (name, shape), (other, other_shape) = (
        (_names(cached)["qkv".index(each)], shown["qkv".index(each)]) for each in (name, other)
    )
    return ValueError(f"{name} has shape {shape}, but {other} has shape {other_shape}: {what}")
