"""Arrays -> `DecodeProblem`: what one call of `decode` asks for, and the errors of its user.

What is on the host is checked here for good. Lengths and tables on the device are read there alone,
so there the kernels keep within the cache, whatever they find.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import numpy as np

from cufa.arrays import Array, as_bhsd, module_of, module_of_all
from cufa.beside import NO_ARRAYS, parse_beside
from cufa.checks import (
    NO_WINDOW,
    as_float,
    check_devices,
    check_dtypes,
    check_flag,
    check_layout,
    check_out,
    check_scale,
    check_softcap,
    check_window,
)
from cufa.expression.own import NOTHING
from cufa.lengths import check_integers, check_lengths
from cufa.problem import Problem, right_edge
from cufa.specs import MAX_HEAD_DIM

MAX_KEYS = 2**31 - 2**20
"""Of a sequence: positions are 32-bit integers in the kernels, rounded up to tiles."""


MAX_UNIFIED = 1e6
"""Of a preset maximum: of larger scores float32 takes out none exactly enough."""


class DecodeProblem(NamedTuple):
    """One problem of `decode` as plain values: hashable, and without arrays.

    Attributes
    ----------
    dtype : str
        Of q, the caches and the result: "float16", "bfloat16" or "float32".
    batch, heads_q, heads_kv, seq_q : int
        Sizes; `heads_q` is a multiple of `heads_kv`. Any of them may be 0.
    capacity : int
        Keys of a sequence at most: lengths are 0 to `capacity`.
    pages, page_size : int
        Of a paged cache, and keys of a page; both 0 for a contiguous one.
    head_dim, head_dim_v : int
        Last axis of q and the keys, and of the values and the result: 1 to 256.
    causal : bool
        Whether query i of a sequence sees only the keys j <= i + length - seq_q.
    scale : float
        Factor of the scores before the softmax, as of `cufa.Problem`.
    unified_max : float, optional
        What takes the place of row maxima.
    left, right, softcap, reads, returns_lse
        As of `cufa.Problem`, a query's place being i + length - seq_q.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    capacity: int
    pages: int
    page_size: int
    head_dim: int
    head_dim_v: int
    causal: bool
    scale: float
    unified_max: float | None = None
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    reads: tuple[str, ...] = ()
    returns_lse: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one K/V head; at least 1, also when there are no heads."""
        return max(1, self.heads_q // max(1, self.heads_kv))

    @property
    def is_paged(self) -> bool:
        """Whether a block table says where keys are."""
        return self.page_size > 0

    @property
    def has_keys(self) -> bool:
        """Whether any sequence could have a key."""
        return self.capacity > 0 and (self.pages > 0 or not self.is_paged)

    @property
    def sizes(self) -> dict[str, int]:
        """Those that arrays of scores have, by the letters of their axes."""
        return {"b": self.batch, "h": self.heads_q, "q": self.seq_q, "k": self.capacity}

    @property
    def score(self) -> tuple[str, ...]:
        """The parts of the score, see `cufa.score`, but for masks that hide no key."""
        left = self.left is not None and self.left < self.capacity - 1
        right = self.right is not None and self.right < self.seq_q - 1
        one = self.of_one(self.capacity)._replace(
            causal=self.causal and self.seq_q > 1,
            left=self.left if left else None,
            right=self.right if right else None,
        )
        return one.score

    @property
    def visited(self) -> int:
        """The most that a sequence has, as of `cufa.Problem`."""
        return self.of_one(self.capacity).visited

    def of_one(self, length: int) -> Problem:
        """Return the problem of `attention` that one sequence of so many keys is."""
        return Problem(
            self.dtype,
            1,
            self.heads_q,
            self.heads_kv,
            self.seq_q,
            length,
            self.head_dim,
            self.head_dim_v,
            self.causal,
            self.scale,
            left=self.left,
            right=self.right,
            softcap=self.softcap,
            reads=self.reads,
            returns_lse=self.returns_lse,
        )


def of_attention(problem: Problem) -> DecodeProblem:
    """Return the problem of `decode` whose sequences all have a problem's keys.

    Its score is to be one that `decode` takes.
    """
    p = problem
    heads, head_dims = (p.heads_q, p.heads_kv), (p.head_dim, p.head_dim_v)
    of_score = p.left, p.right, p.softcap, p.reads, p.returns_lse
    sizes = p.batch, *heads, p.seq_q, p.seq_kv, 0, 0, *head_dims
    return DecodeProblem(p.dtype, *sizes, p.causal, p.scale, None, *of_score)


class DecodeOperands(NamedTuple):
    """The arrays of a call of `decode`.

    Attributes
    ----------
    q, out : array
        (batch, heads, seq, head_dim) views; `out` may be None.
    k_cache, v_cache : array
        (batch, heads, capacity, head_dim) views, or (pages, heads, page_size, head_dim).
    lengths : array or None
        (batch,) int32, contiguous, on the device or the host; None for `capacity` of each.
    block_table : array or None
        (batch, pages a sequence) int32, its rows contiguous, on the device or the host.
    beside : mapping
        NumPy arrays that parts of the score read, as of `cufa.beside.parse_beside`.
    """

    q: Array
    k_cache: Array
    v_cache: Array
    lengths: Array
    block_table: Array
    out: Array
    beside: Mapping[str, Array] = MappingProxyType({})


def parse_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    lengths: Array | None,
    block_table: Array | None,
    causal: bool,
    scale: float | None,
    layout: str,
    out: Array | None,
    unified_max: float | None = None,
    window: tuple[int | None, int | None] = NO_WINDOW,
    softcap: float | None = None,
    beside: Mapping[str, Array | None] = NO_ARRAYS,
    return_lse: bool = False,
) -> tuple[DecodeProblem, DecodeOperands, ModuleType]:
    """Check the arguments of a call of `decode`. Nothing is written, or copied to the device.

    Parameters
    ----------
    q, k_cache, v_cache, lengths, block_table, causal, scale, layout, out, unified_max
        As of `cufa.decode`.
    window, softcap
        As of `cufa.decode`.
    beside : mapping
        Its arrays that parts of the score read, by argument; None where there is none.
    return_lse : bool
        As of `cufa.decode`.

    Returns
    -------
    DecodeProblem
    DecodeOperands
    module
        `numpy` or `cupy`: of q, the caches and `out`.

    Raises
    ------
    TypeError, ValueError
        As `cufa.decode`.
    """
    check_layout(layout)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    if out is not None:
        arrays["out"] = out
    xp = module_of_all(arrays)
    if xp is np:  # subclasses (memmap, matrix) become the plain arrays that they are views of
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
    dtype = check_dtypes(arrays)
    for name, array in arrays.items():
        if array.ndim != 4 and name != "out":
            raise ValueError(f"{name} has shape {array.shape}: 4 axes are needed")
    if xp is not np:
        check_devices(arrays, xp)
    out = arrays.pop("out", None)
    views = {name: as_bhsd(array, layout) for name, array in arrays.items()}
    if block_table is not None:
        module_of("block_table", block_table)
    problem = _problem(dtype, views, arrays, block_table, causal, scale)
    left, right = check_window(window, problem.causal)
    causal, right = right_edge(problem.causal, right)
    reads, of_score = parse_beside(beside, NOTHING, 4, problem.sizes, xp)
    problem = problem._replace(
        causal=causal,
        unified_max=_checked_max(unified_max, dtype),
        left=left,
        right=right,
        softcap=check_softcap(softcap),
        reads=reads,
        returns_lse=bool(return_lse),
    )
    arrays |= {name: array for name, array in beside.items() if array is not None}
    if lengths is not None:
        check_integers("lengths", lengths, (problem.batch,), xp)
        if isinstance(lengths, np.ndarray):
            check_lengths("lengths", lengths, problem.capacity)
            lengths = np.ascontiguousarray(lengths, np.int32)
        arrays["lengths"] = lengths
    if block_table is not None:
        per_sequence = block_table.shape[1]
        check_integers("block_table", block_table, (problem.batch, per_sequence), xp)
        if isinstance(block_table, np.ndarray):
            _check_table(block_table, lengths, problem)
            block_table = np.ascontiguousarray(block_table, np.int32)
        arrays["block_table"] = block_table
    if out is not None:
        b, h, s, d = problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v
        shape = (b, h, s, d) if layout == "bhsd" else (b, s, h, d)
        check_out(out, shape, {n: x for n, x in arrays.items() if module_of(n, x) is xp})
        out = as_bhsd(out, layout)
    operands = DecodeOperands(
        views["q"], views["k_cache"], views["v_cache"], lengths, block_table, out, of_score
    )
    return problem, operands, xp


def _problem(
    dtype: str,
    views: dict[str, Array],
    given: dict[str, Array],
    block_table: Array | None,
    causal: bool,
    scale: float | None,
) -> DecodeProblem:
    """Check shapes and scalars; errors quote the caller's own shapes, of `given`."""
    batch, heads_q, seq_q, head_dim = views["q"].shape
    blocks, heads_kv, keys, head_dim_k = views["k_cache"].shape
    head_dim_v = views["v_cache"].shape[3]

    def mismatch(name: str, what: str, other: str) -> ValueError:
        shown, shown_other = given[name].shape, given[other].shape
        return ValueError(f"{name} has shape {shown}, but {other} has shape {shown_other}: {what}")

    if head_dim_k != head_dim:
        raise mismatch("k_cache", f"head_dim {head_dim_k} and {head_dim} differ", "q")
    paged = block_table is not None
    names = ("pages", "heads", "page_size") if paged else ("batch", "heads", "capacity")
    for axis, what in enumerate(names):
        n, other = views["v_cache"].shape[axis], views["k_cache"].shape[axis]
        if n != other:
            raise mismatch("v_cache", f"{what} {n} and {other} differ", "k_cache")
    if heads_q % heads_kv if heads_kv else heads_q:
        raise mismatch("q", f"heads {heads_q} is no multiple of heads {heads_kv}", "k_cache")
    for name, dim in (("q", head_dim), ("v_cache", head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has shape {given[name].shape}: head_dim must be 1 to {MAX_HEAD_DIM}, "
                f"not {dim}"
            )
    capacity = keys
    if block_table is not None:
        if keys == 0:
            raise ValueError(f"k_cache has shape {given['k_cache'].shape}: pages hold no key")
        table = block_table.shape
        if len(table) != 2 or table[0] != batch:
            raise ValueError(
                f"block_table has shape {table}: (batch, pages a sequence) is needed, "
                f"batch being {batch} (q {given['q'].shape})"
            )
        capacity = table[1] * keys
    elif blocks != batch:
        raise mismatch("k_cache", f"batch {blocks} and {batch} differ", "q")
    if capacity > MAX_KEYS:
        name = "block_table" if paged else "k_cache"
        raise ValueError(f"{name}: {capacity} keys a sequence are more than {MAX_KEYS}")
    return DecodeProblem(
        dtype,
        batch,
        heads_q,
        heads_kv,
        seq_q,
        capacity,
        blocks if paged else 0,
        keys if paged else 0,
        head_dim,
        head_dim_v,
        check_flag("causal", causal),
        check_scale(scale, head_dim),
    )


def _checked_max(unified_max: float | None, dtype: str) -> float | None:
    """Return what takes the place of row maxima."""
    if unified_max is None:
        return None
    if isinstance(unified_max, bool) or not isinstance(unified_max, Real):
        raise TypeError(f"unified_max must be a number or None, not {type(unified_max).__name__}")
    if dtype == "float32":
        raise ValueError("unified_max is for float16 and bfloat16, q has float32")
    value = as_float(unified_max)
    if not abs(value) <= MAX_UNIFIED:
        raise ValueError(f"unified_max must be {MAX_UNIFIED} at most in magnitude, not {value!r}")
    return value


def _check_table(table: np.ndarray, lengths: Array | None, problem: DecodeProblem) -> None:
    """Refuse pages on the host that do not exist, as far as they are known to be in use."""
    if lengths is not None and not isinstance(lengths, np.ndarray):
        return  # only the device knows
    used = problem.capacity if lengths is None else lengths[:, None]
    bad = (table < 0) | (table >= problem.pages)
    first = np.arange(table.shape[1]) * problem.page_size  # keys
    bad &= first < used
    if problem.left is not None:
        ends = np.minimum(first + problem.page_size, used)
        bad &= ends > np.int64(used) - problem.seq_q - problem.left
    if bad.any():
        i, j = (int(x) for x in np.argwhere(bad)[0])
        raise ValueError(
            f"block_table[{i}, {j}] is {table[i, j]}, but the cache has {problem.pages} pages"
        )
