"""Calls with features drawn at random, all of which must go together.

A draw depends on a number alone, so that a call which fails can be made again. Lengths grow
with `longest`; the rest is as in the draw of the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import score_mods
from drawn_values import DRAWINGS
from reference import DTYPES, random_inputs
from score_arrays import Sizes

from cufa.features import VALUES

HEAD_DIMS = (
    *((64, 64), (64, 64), (128, 128), (128, 128), (40, 40), (72, 72), (100, 100), (96, 96)),
    *((192, 128), (256, 256), (33, 57), (1, 8)),
)
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 2), (7, 1), (8, 2))
#: Names of a caller's own functions, see `score_mods.FEATURES`.
OWN = {
    "score_mod": (
        "alibi",
        "even steps",
        "two distances",
        "relative positions",
        "softcap",
        "functions of functions",
    ),
    "mask_mod": ("documents", "sliding window", "prefix"),
}
#: Kernels that a GPU may be asked for.
KERNELS = {
    "float16": ("fa2_mma", "fa3_wgmma"),
    "bfloat16": ("fa2_mma", "fa3_wgmma"),
    "float32": ("fa2_fp32",),
}


class Drawn:
    """The arguments of a call of `cufa.attention`, `attention_varlen` or `decode`.

    Parameters
    ----------
    number : int
        Number of the draw.
    longest : int
        Length of the longest sequence, at most: 64 or more.

    Attributes
    ----------
    function : str
        That is called.
    dtype : str
    batch, heads_q, heads_kv, seq_q, seq_kv : int
        Sequences, heads, and the longest sequences that there may be.
    rows, keys : ndarray or None
        For `attention_varlen`: how many each sequence has.
    lengths : ndarray or None
        How many of the keys each sequence has in use.
    options : dict
        Arguments that are no arrays, and the same wherever the call runs.
    arrays : dict
        Arrays next to q, k and v.
    own : dict
        The caller's own functions, by argument: what makes options that have them of `own_arrays`.
    block : tuple of int or None
        Sizes of the tiles of a `block_mask`.
    kernel, page_size
        For a call on a GPU; for one that decodes. None for any, and for none.
    q, k, v : ndarray
        (batch, heads, seq, head_dim), where of `attention_varlen` the batch is 1 and there are
        three rows behind the last sequence. Keys that are not in use are NaN.
    """

    def __init__(self, number: int, longest: int) -> None:
        self._rng = rng = np.random.default_rng([number, 20251123])
        functions = ["attention", "attention_varlen", "decode"]
        self.function = str(rng.choice(functions, p=(0.6, 0.25, 0.15)))
        self.dtype = self._one_of(*DTYPES)
        self.heads_q, self.heads_kv = self._one_of(*HEADS)
        self._head_dims = self._one_of(*HEAD_DIMS)
        self.batch = self._one_of(1, 2, 3, 5) if self.is_varlen else self._one_of(1, 2)
        self.options: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.own: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self.own_arrays: dict[str, np.ndarray] = {}
        self.block: tuple[int, int] | None = None
        self.kernel: str | None = None
        self.page_size: int | None = None
        self._draw_lengths(longest)
        self._draw_options()
        self._draw_arrays()
        if self.decodes:
            self._draw_of_decode()
        else:
            self._draw_of_attention()
        self._draw_qkv()

    def __str__(self) -> str:
        """Say what was drawn."""
        shapes = " ".join(str(x.shape) for x in (self.q, self.k, self.v))
        arrays = ", ".join(f"{n} {x.dtype} {x.shape}" for n, x in self.arrays.items())
        own = ", ".join((*self.own, str(self.block))) if self.own else "none"
        return (
            f"{self.function} {self.dtype} {shapes}, {self.options}, arrays {arrays}, own {own}, "
            f"rows {self.rows}, keys {self.keys}, lengths {self.lengths}, kernel {self.kernel}"
        )

    @property
    def is_varlen(self) -> bool:
        """Whether sequences follow each other in the arrays."""
        return self.function == "attention_varlen"

    @property
    def decodes(self) -> bool:
        """Whether keys lie in a cache."""
        return self.function == "decode"

    @property
    def sizes(self) -> Sizes:
        """The sizes of arrays of pairs, and of heads."""
        return self.batch, self.heads_q, self.heads_kv, self.seq_q, self.seq_kv

    def _maybe(self, p: float) -> bool:
        return bool(self._rng.random() < p)

    def _one_of(self, *values: Any) -> Any:
        return values[self._rng.integers(len(values))]

    def _length(self, longest: int) -> int:
        rng = self._rng
        any_length = int(rng.integers(1, longest + 1))
        short, whole = int(rng.integers(2, 18)), 64 * int(rng.integers(1, longest // 64 + 1))
        return self._one_of(1, short, short, whole, any_length, any_length, any_length)

    def _draw_lengths(self, longest: int) -> None:
        rng, n = self._rng, self.batch
        self.seq_q, self.seq_kv = self._length(longest), self._length(longest)
        if self.decodes:
            self.seq_q = self._one_of(1, 1, 2, 5, 16)
        self.rows = self.keys = self.lengths = None
        if self.is_varlen:
            self.rows, self.keys = (rng.integers(0, m + 1, n) for m in (self.seq_q, self.seq_kv))
            self.rows[0], self.keys[-1] = self.seq_q, self.seq_kv
        if self._maybe(0.8 if self.decodes else 0.3):
            self.lengths = rng.integers(0, self.seq_kv + 1, n)
            self.lengths[0] = max(self.lengths[0], self._one_of(0, self.seq_kv // 2, self.seq_kv))

    def _draw_options(self) -> None:
        options = self.options
        for name, kind in VALUES.items():
            likely, draw = DRAWINGS[name]
            if self._maybe(likely) and (not self.decodes or kind.PARTS[0].decodes):
                options[name] = draw(self._rng, self.seq_q, self.seq_kv)
        if self.decodes and options.get("causal") == "top-left":
            options["causal"] = True
        options.setdefault("causal", False)
        if "dropout_p" in options:
            options["seed"] = int(self._rng.integers(2**63))
        if self._maybe(0.3):
            options["scale"] = self._one_of(0.0, -0.2, 0.05, 8 * self._head_dims[0] ** -0.5, None)
        if not self.is_varlen:
            options["layout"] = self._one_of("bhsd", "bshd")

    def _draw_arrays(self) -> None:
        rng, heads = self._rng, self.heads_q
        if self._maybe(0.3):
            shape = self._one_of((heads,), (self.batch, heads))
            slopes = rng.standard_normal(shape) * self._one_of(0.02, 0.3, 2.0)
            slopes = self._one_of(slopes, abs(slopes), abs(slopes), -abs(slopes) / 8, slopes * 0)
            self.arrays["alibi_slopes"] = slopes.astype(np.float32)
        if self._maybe(0.2):
            sinks = 3 * rng.standard_normal(heads)
            sinks[0] = self._one_of(sinks[0], -np.inf, 20.0)
            self.arrays["sinks"] = sinks.astype(np.float32)

    def _draw_of_decode(self) -> None:
        if self._maybe(0.3):
            self.options["num_splits"] = self._one_of(1, 3)
        if self.dtype != "float32" and self._maybe(0.3):
            self.options["unified_max"] = self._one_of(2.0, -30.0)
        if self.lengths is not None and self._maybe(0.5):
            self.page_size = self._one_of(1, 7, 16, 64)

    def _draw_of_attention(self) -> None:
        if self._maybe(0.4):
            self.kernel = self._one_of(*KERNELS[self.dtype])
        if not self.is_varlen and self._maybe(0.1):
            self.options["batch_invariant"] = True
        if self._maybe(0.25):
            self.arrays["bias"] = self._bias()
        if self._maybe(0.25):
            self.arrays["mask"] = self._mask()
        for argument, names in OWN.items():
            if self._maybe(0.2):
                draw, self.own[argument] = score_mods.FEATURES[self._one_of(*names)]
                self.own_arrays |= draw(self._rng, self.sizes)
        if "mask_mod" in self.own and not self.is_varlen and self._maybe(0.7):
            self.block = self._one_of((128, 128), (64, 32), (16, 80))

    def _broadcast(self) -> tuple[int, ...]:
        """Draw a shape that is broadcast to one of pairs."""
        b, heads, _, rows, keys = self.sizes
        shape = tuple(n if self._maybe(0.7) else 1 for n in (b, heads, rows, keys))
        return shape[self._one_of(0, 0, 1, 2, 3) :]

    def _bias(self) -> np.ndarray:
        bias = 2 * self._rng.standard_normal(self._broadcast())
        hidden = self._one_of(0.0, 0.1, 0.6) if bias.shape[-1] > 1 else 0.0
        bias[self._rng.random(bias.shape) < hidden] = -np.inf
        return bias.astype(self._one_of(np.float16, ml_dtypes.bfloat16, np.float32))

    def _mask(self) -> np.ndarray:
        shape, seen = self._broadcast(), self._one_of(0.3, 0.9)
        if self._maybe(0.4):
            return np.packbits(self._rng.random((*shape[:-1], self.seq_kv)) < seen, axis=-1)
        mask = self._rng.random(shape) < seen
        first = int(self._rng.integers(shape[-1]))
        mask[..., first : first + shape[-1] // 4] = self._maybe(0.5)
        return mask

    def _draw_qkv(self) -> None:
        sizes = dict(zip(("b", "hq", "hk", "sq", "sk"), self.sizes, strict=True))
        if self.rows is not None and self.keys is not None:
            more = {"sq": self.rows.sum(), "sk": self.keys.sum()}
            sizes |= {"b": 1} | {name: int(n) + 3 for name, n in more.items()}
        d, dv = self._head_dims
        self.q, self.k, self.v = random_inputs(self._rng, self.dtype, **sizes, d=d, dv=dv)
        # Where something is added to large scores, float32 does not tell what is left of them.
        if not (self.own or {"alibi_slopes", "bias"} & self.arrays.keys()):
            self.q *= np.array(self._one_of(1, 1, 4, 8), self.q.dtype)
        used = np.zeros((self.k.shape[0], self.k.shape[2]), bool)
        for _, (sequence, keys) in self.sequences():
            used[sequence, keys] = True
        for array in (self.k, self.v):
            array[np.broadcast_to(~used[:, None], array.shape[:3])] = np.nan

    def sequences(self) -> list[tuple[tuple[slice, slice], tuple[slice, slice]]]:
        """Return where in q, and where in k and v, each sequence is: batch, and rows in use."""
        found, row, key = [], 0, 0
        for i in range(self.batch):
            used = self.seq_kv if self.lengths is None else int(self.lengths[i])
            if self.rows is None or self.keys is None:
                one = slice(i, i + 1)
                found.append(((one, slice(0, self.seq_q)), (one, slice(0, used))))
                continue
            rows, keys, one = int(self.rows[i]), int(self.keys[i]), slice(0, 1)
            its_keys = one, slice(key, key + min(used, keys))
            found.append(((one, slice(row, row + rows)), its_keys))
            row, key = row + rows, key + keys
        return found
