"""`Problem`: what one attention call asks for, as numbers that have been checked.

Everything after it works on these, so that neither the planner nor a kernel has to ask again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cufa.arrays import Ints
from cufa.checks import check_flag, check_scale
from cufa.dtypes import DTYPES
from cufa.features import READINGS, ordered, parse
from cufa.features.causal import Causal
from cufa.features.feature import Feature, Reach, Value
from cufa.features.parts import part_named
from cufa.specs.spec import MAX_HEAD_DIM

_F = TypeVar("_F", bound=Feature)

MAX_KEYS = 2**31 - 2**20
"""Keys of a sequence in a cache: the kernels' positions are 32-bit integers, in whole tiles."""

_ANY = 2**31 - 1

CACHES = ("Contiguous", "Paged")
"""Values of `Problem.kv`: where `decode` finds keys."""


class Problem(NamedTuple):
    """One attention problem as plain values: hashable, and without arrays.

    Attributes
    ----------
    dtype : str
        Dtype of q, k, v and the result: "float16", "bfloat16" or "float32".
    batch, heads_q, heads_kv, seq_q, seq_kv : int
        Sizes; `heads_q` is a multiple of `heads_kv`. Any of them may be 0.
    head_dim, head_dim_v : int
        Last axis of q and k, and of v and the result: 1 to 256.
    scale : float
        Factor of the scores before the softmax; less than 2^64 in magnitude, and may be zero or
        negative.
    features : tuple of Feature
        The features of the call's scores, in the order of `cufa.features.FEATURES`.
    kv : str
        "Dense"; "Padded" with `lengths_q` or `lengths_k`; "Varlen" for packed sequences: then
        `batch` is 1, and `seq_q` and `seq_kv` are the totals; "Contiguous" and "Paged" for the
        caches of `decode`, where a sequence has up to `seq_kv` keys, and its queries are the
        newest positions.
    sequences, max_seqlen_q, max_seqlen_k : int
        For "Varlen": how many sequences there are, and the longest lengths that count.
    returns_lse : bool
        Whether the log-sum-exp is asked for.
    pages, page_size : int
        For "Paged": pages of the cache, and keys of a page.
    unified_max : float, optional
        A score in place of row maxima, in a cache.
    precision : str, optional
        "fp8" if q, k and v are `cufa.Quantized`, and `dtype` is that of the result alone.
    kv_dtype : str, optional
        "float8_e4m3fn" or "int8" if K and V of a cache have 8 bits, and a scale for each key and
        head: `dtype` is that of q and the result alone.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    features: tuple[Feature, ...] = ()
    kv: str = "Dense"
    sequences: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    returns_lse: bool = False
    pages: int = 0
    page_size: int = 0
    unified_max: float | None = None
    precision: str | None = None
    kv_dtype: str | None = None

    def sized(self, batch: int, heads_q: int, heads_kv: int, seq_q: int, seq_kv: int) -> Problem:
        """Return the same with other sizes, sooner than `_replace` does."""
        sizes = batch, heads_q, heads_kv, seq_q, seq_kv
        return tuple.__new__(Problem, (self[0], *sizes, *self[1 + len(sizes) :]))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch: no queries, no sequences, or no key in a cache."""
        if self.kv == "Varlen" and self.sequences == 0:
            return True
        no_key = self.kv in CACHES and 0 in (self.seq_kv, self.pages if self.kv == "Paged" else 1)
        return no_key or 0 in (self.batch, self.heads_q, self.seq_q)

    @property
    def in_cache(self) -> Problem:
        """The problem as `decode` runs it: over a cache in which all sequences are full."""
        return self if self.kv in CACHES else self._replace(kv="Contiguous")

    @property
    def group(self) -> int:
        """Query heads that share one K/V head; at least 1, also when there are no heads."""
        return max(1, self.heads_q // max(1, self.heads_kv))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of arrays of scores, by the letters of their axes."""
        if self.kv == "Varlen":
            sizes = self.sequences, self.heads_q, self.max_seqlen_q, self.max_seqlen_k
        else:
            sizes = self.batch, self.heads_q, self.seq_q, self.seq_kv
        return dict(zip("bhqk", sizes, strict=True))

    @property
    def alike(self) -> Problem:
        """The problem, or one with sequences of one length that takes about as long."""
        if self.kv != "Varlen":
            return self
        n = max(1, self.sequences)
        rows, keys = -(-self.seq_q // n), -(-self.seq_kv // n)
        return self._replace(batch=n, seq_q=rows, seq_kv=keys, kv="Dense")

    def of(self, kind: type[_F]) -> _F | None:
        """Return the feature of a kind; None if there is none."""
        return next((each for each in self.features if isinstance(each, kind)), None)

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments that say what becomes of the scores and are plain values."""
        return {each.ARGUMENT: each.given for each in self.features if isinstance(each, Value)}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold; features by argument."""
        values = {each.ARGUMENT: each.given for each in self.features}
        lists = {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}
        return {**self._asdict(), "features": lists}

    def having(self, *features: Feature) -> Problem:
        """Return the same with features, in place of others of their kinds."""
        kinds = tuple(map(type, features))
        others = (each for each in self.features if type(each) not in kinds)
        return self._replace(features=ordered((*others, *features)))

    def without(self, *kinds: type[Feature]) -> Problem:
        """Return the same without features of some kinds."""
        kept = (each for each in self.features if not isinstance(each, kinds))
        return self._replace(features=tuple(kept))

    def reading(self, *parts: str) -> Problem:
        """Return the same with features whose parts read arrays."""
        return self.having(*(READINGS[part_named(name).argument](name) for name in parts))

    @property
    def is_cached(self) -> bool:
        """Whether keys are in a cache, whose sequences may have fewer of them."""
        return self.kv in CACHES

    @property
    def causal(self) -> bool:
        """Whether query i sees only the keys j <= i + seq_kv - seq_q."""
        return Causal() in self.features

    @property
    def score(self) -> tuple[str, ...]:
        """The parts of the score, see `cufa.features.parts`.

        In a cache, masks that hide no key are left out.
        """
        return tuple(name for feature in self.features for name in feature.parts(self))

    @property
    def reads(self) -> tuple[str, ...]:
        """The parts that read arrays besides q, k and v, or that are the caller's functions."""
        return tuple(name for name in self.score if part_named(name).reads)

    @property
    def numbers(self) -> dict[str, float]:
        """The run-time parameters of the parts, by name, but for those of arrays."""
        values: dict[str, float] = {}
        for feature in self.features:
            values |= feature.numbers(self)
        return values

    @property
    def longest(self) -> tuple[int, str]:
        """The longest sequences that the numbers of all features are for, and whose those are."""
        limits = ((each.LONGEST, each.ARGUMENT) for each in self.features)
        return min(((n, name) for n, name in limits if n is not None), default=(_ANY, ""))

    @property
    def reach(self) -> Reach:
        """How far queries see."""
        bounds: list[int | None] = [None, None, None]
        for feature in self.features:
            both = zip(bounds, feature.reach, strict=True)
            bounds = [b if a is None else a if b is None else min(a, b) for a, b in both]
        return Reach(*bounds)

    @property
    def visited(self) -> int:
        """Number of keys from the first one that any query sees."""
        left = self.reach.left
        return self.seq_kv if left is None else min(self.seq_kv, max(1, left + self.seq_q))

    @property
    def most_seen(self) -> int | None:
        """The most keys that a query sees, if a bound leaves some out; else None."""
        left, right, most = self.reach
        if left is not None and right is not None:
            most = left + right + 1 if most is None else min(most, left + right + 1)
        return None if most is None or most >= self.seq_kv else most

    def sees(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key that each of some queries sees, and the end of what it sees."""
        i = np.arange(rows.start, rows.stop)
        first, end = self.seen(i, i + self.seq_kv - self.seq_q)
        first = np.zeros_like(i) if first is None else np.clip(first, 0, self.seq_kv)
        end = np.full_like(i, self.seq_kv) if end is None else np.minimum(end, self.seq_kv)
        return first, np.maximum(end, first)

    def seen(self, i: Any, stands: Any) -> tuple[Any, Any]:
        """Return the first key that queries i see, and the end, of those at key `stands`.

        None for no bound; they may be beyond the keys that there are.
        """
        bounds = [feature.sees(i, stands) for feature in self.features]
        firsts = [first for first, _ in bounds if first is not None]
        ends = [end for _, end in bounds if end is not None]
        first = functools.reduce(np.maximum, firsts) if firsts else None
        return first, functools.reduce(np.minimum, ends) if ends else None

    @classmethod
    def of_shapes(
        cls,
        q_shape: Sequence[int],
        k_shape: Sequence[int],
        v_shape: Sequence[int],
        *,
        dtype: str = "float16",
        scale: float | None = None,
        **options: Any,
    ) -> Problem:
        """Build a problem from 4-D (batch, heads, seq, head_dim) shapes, with no arrays.

        Parameters
        ----------
        q_shape, k_shape, v_shape : sequence of int
            (b, hq, sq, d), (b, hk, sk, d) and (b, hk, sk, dv).
        dtype : str
            "float16", "bfloat16" or "float32".
        scale : float, optional
            1 / sqrt(head_dim) when not given.
        **options
            Arguments of `attention` for masks and scores that are not arrays: causal, window,
            softcap and so on.

        Returns
        -------
        Problem

        Raises
        ------
        TypeError
            For a dtype that is not supported, and for arguments of the wrong type.
        ValueError
            For shapes that do not fit each other, a head_dim outside 1..256, a scale of 2^64
            or more, a negative bound of a window, a softcap outside 1e-6..1e4.
        """
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        q = _checked_shape("q", q_shape)
        k = _checked_shape("k", k_shape)
        v = _checked_shape("v", v_shape)
        check_shapes("Dense", q, k, v)
        sizes = q[0], q[1], k[1], q[2], k[2], q[3], v[3]
        return cls(dtype, *sizes, check_scale(scale, q[3]), parse(options))


def _checked_shape(name: str, shape: object) -> Ints:
    """Return the shape of q, k or v as plain integers."""
    if not isinstance(shape, Iterable):
        kind = type(shape).__name__
        raise TypeError(f"{name}_shape must be a sequence of sizes, not {kind}")
    sizes = tuple(shape)
    if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in sizes):
        raise ValueError(f"{name} has shape {sizes}: sizes must be integers >= 0")
    if len(sizes) != 4:
        raise ValueError(f"{name} has shape {sizes}: 4 axes (b, h, s, d) are needed")
    return tuple(map(int, sizes))


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
    result = Problem.of_shapes(
        (p.batch, p.heads_q, p.seq_q, p.head_dim),
        (p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        (p.batch, p.heads_kv, p.seq_kv, p.head_dim_v),
        dtype=p.dtype,
        scale=p.scale,
        **p.asked,
    )
    result = result.reading(*p.reads)
    return result._replace(returns_lse=check_flag("returns_lse", p.returns_lse))


def check_shapes(
    kv: str, q: Ints, k: Ints, v: Ints, shown: tuple[Ints, ...] = (), table: Ints = ()
) -> int:
    """Check 4-D shapes of a call, and return how many keys a sequence has at most.

    Parameters
    ----------
    kv : str
        As in `Problem`.
    q, k, v : tuple of int
        (batch, heads, seq, head_dim); for "Paged", k and v are (pages, heads, page_size, head_dim).
    shown : tuple of tuple of int, optional
        Shapes of q, k and v that errors quote, if the caller's are others.
    table : tuple of int, optional
        Shape of the block table for "Paged".

    Raises
    ------
    ValueError
    """
    batch, heads_q, _, head_dim = q
    blocks, heads_kv, keys, head_dim_k = k
    of_v, _, _, head_dim_v = v
    cached, paged, shown = kv in CACHES, kv == "Paged", shown or (q, k, v)
    if not paged and blocks != batch:
        what = f"batch {blocks} and {batch} differ" + "; pages need a block_table" * cached
        raise _mismatch(1, 0, what, cached, shown)
    if not cached and of_v != batch:
        raise _mismatch(2, 0, f"batch {of_v} and {batch} differ", cached, shown)
    if head_dim_k != head_dim:
        raise _mismatch(1, 0, f"head_dim {head_dim_k} and {head_dim} differ", cached, shown)
    if v[:3] != k[:3]:
        axes = "batch", "heads", "capacity" if cached else "seq"
        axes = ("pages", "heads", "page_size") if paged else axes
        i = next(i for i in range(3) if v[i] != k[i])
        raise _mismatch(2, 1, f"{axes[i]} {v[i]} and {k[i]} differ", cached, shown)
    if heads_q % heads_kv if heads_kv else heads_q:
        raise _mismatch(0, 1, f"heads {heads_q} is no multiple of heads {heads_kv}", cached, shown)
    if not 1 <= head_dim <= MAX_HEAD_DIM >= head_dim_v >= 1:
        i, dim = (2, head_dim_v) if 1 <= head_dim <= MAX_HEAD_DIM else (0, head_dim)
        raise ValueError(
            f"{_NAMES[cached][i]} has shape {shown[i]}: head_dim must be 1 to {MAX_HEAD_DIM}, "
            f"not {dim}"
        )
    if paged:
        if keys == 0:
            raise ValueError(f"k_cache has shape {shown[1]}: pages hold no key")
        if len(table) != 2 or table[0] != batch:
            raise ValueError(
                f"block_table has shape {table}: (batch, pages a sequence) is needed, "
                f"batch being {batch} (q {shown[0]})"
            )
        keys *= table[1]
    if cached and keys > MAX_KEYS:
        name = "block_table" if paged else "k_cache"
        raise ValueError(f"{name}: {keys} keys a sequence are more than {MAX_KEYS}")
    return keys


_NAMES = {False: ("q", "k", "v"), True: ("q", "k_cache", "v_cache")}
"""Arguments of a call, by whether it is one of `decode`."""


def _mismatch(i: int, other: int, what: str, cached: bool, shown: tuple[Ints, ...]) -> ValueError:
    """Return the error for two of q, k and v, by their numbers, that do not fit each other."""
    names = _NAMES[cached]
    return ValueError(
        f"{names[i]} has shape {shown[i]}, but {names[other]} has shape {shown[other]}: {what}"
    )
