"""`BlockMask`: which tiles of queries and keys a `mask_mod` hides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.checks import check_module, check_size
from cufa.cpu import block_mask as cpu
from cufa.cpu.functions import checked
from cufa.features.expression.tracing import indices_read, trace
from cufa.launch import block_mask as launch
from cufa.specs.variant import Variant

_MAX_SEQ = 2**30


class BlockMask:
    """Which tiles of queries and keys a `mask_mod` hides in whole, in part or not; made by `of`.

    `cufa.attention` takes it as `block_mask`, and needs no `mask_mod` then. Numbers of sequences,
    queries and keys are those of the arrays, also with `lengths_q` and `lengths_k`. Keep it for as
    long as a CUDA graph with a captured call is used.

    Attributes
    ----------
    mask_mod : function or str
        Says which pairs are seen.
    kinds : array of uint8, (batch, heads, rows of tiles, columns of tiles)
        0 where a tile is hidden, 2 where all of its pairs are seen, 1 where some are. The
        first two axes have length 1 where the mask is the same for all.
    block : tuple of int
        Queries and keys of a tile.
    seq_q, seq_kv : int
        Lengths; the last tiles may have fewer.
    key : tuple
        Shape of `kinds`, `block`, `seq_q`, `seq_kv`, and on which of b and h the mask depends: part
        of the key of prepared calls.
    """

    def __init__(
        self,
        mask_mod: Callable[..., Any] | str,
        kinds: Array,
        block: tuple[int, int],
        seq_q: int,
        seq_kv: int,
    ) -> None:
        self.mask_mod = mask_mod
        self.kinds, self.block, self.seq_q, self.seq_kv = kinds, block, seq_q, seq_kv
        depends_on = "".join(sorted(indices_read(mask_mod) & {"b", "h"}))
        self.key = kinds.shape, block, seq_q, seq_kv, depends_on
        self._lists: dict[tuple[int, int, int], Array] = {}

    @classmethod
    def of(
        cls,
        mask_mod: Callable[..., Any] | str,
        batch: int | None,
        heads: int | None,
        seq_q: int,
        seq_kv: int,
        *,
        block: tuple[int, int] = (128, 128),
        xp: Any = np,
    ) -> BlockMask:
        """Evaluate a `mask_mod` for all pairs, once for many calls of `attention`.

        Parameters
        ----------
        mask_mod : function or str
            As in `cufa.attention`.
        batch, heads : int or None
            Sequences and query heads; None if the mask is the same for all. 1 is also for calls
            with more, if the mask does not depend on b or h.
        seq_q, seq_kv : int
            Queries and keys.
        block : tuple of int
            Queries and keys of a tile: 16 to 1024, best powers of two, as the kernels' tiles are.
            Small tiles skip more pairs; large tiles cost less memory.
        xp : module
            `numpy` or `cupy`, like the arrays of `attention`; with `cupy`, on the current device
            and stream.

        Raises
        ------
        TypeError
            A `mask_mod` that cannot be traced, and arguments of the wrong type.
        ValueError
            Sizes that do not fit.
        CompileError
            NVRTC refused the kernel.

        Examples
        --------
        >>> import numpy as np, cufa
        >>> documents = np.repeat(np.arange(8), 128)
        >>> def within(b, h, q_idx, kv_idx):
        ...     return documents[q_idx] == documents[kv_idx]
        >>> tiles = cufa.BlockMask.of(within, None, None, 1024, 1024)
        >>> tiles
        BlockMask of 1 x 1 x 1024 x 1024 in tiles of 128 x 128: 87.5% hidden, 12.5% whole
        >>> q = k = v = np.ones((2, 4, 1024, 64), np.float32)
        >>> cufa.attention(q, k, v, block_mask=tiles).shape
        (2, 4, 1024, 64)
        """
        check_module(xp)
        sizes = (
            1 if batch is None else check_size("batch", batch, least=0),
            1 if heads is None else check_size("heads", heads, least=0),
            check_size("seq_q", seq_q, _MAX_SEQ, least=0),
            check_size("seq_kv", seq_kv, _MAX_SEQ, least=0),
        )
        if not isinstance(block, tuple) or len(block) != 2:
            raise TypeError(f"block must be a tuple (queries, keys), not {block!r}")
        # Plain integers, as those of NumPy may have too few bits, or no sign.
        queries, keys = (check_size("block", n, 1024, least=16) for n in block)
        block = queries, keys
        rows, columns = -(-sizes[2] // queries), -(-sizes[3] // keys)
        if math.prod((*sizes[:2], rows, columns)) >= 2**31:
            raise ValueError(f"block {block} makes {rows} x {columns} tiles, too many of all heads")
        if mask_mod is None:
            raise TypeError("mask_mod must be a function or a string of C++, not None")
        read = indices_read(mask_mod)
        for name, index, size in (("batch", "b", batch), ("heads", "h", heads)):
            if size is None and index in read:
                raise ValueError(
                    f"{name} is None, but mask_mod depends on {index}: give {name}, how many there "
                    "are"
                )
        kinds = xp.empty((*sizes[:2], rows, columns), np.uint8)
        on_host = xp is np
        function: Any = checked("mask_mod", mask_mod) if on_host else trace(None, mask_mod)
        if kinds.size:
            (cpu if on_host else launch).fill(kinds, function, sizes, block)
        return cls(mask_mod, kinds, block, sizes[2], sizes[3])

    def lists(self, variant: Variant) -> Array:
        """Return what a kernel reads of it, made on the current stream where there is none yet.

        Parameters
        ----------
        variant : Variant

        Raises
        ------
        ValueError
            There is none yet, and the stream is captured into a CUDA graph.
        """
        import cupy

        key = variant.bm, variant.bn, cupy.cuda.get_current_stream().ptr
        found = self._lists.get(key)
        if found is None:
            sizes, tile = (self.seq_q, self.seq_kv), (variant.bm, variant.bn)
            found = self._lists[key] = launch.lists(self.kinds, self.block, sizes, tile)
        return found

    def __repr__(self) -> str:
        """Say how many tiles there are of each kind."""
        kinds = self.kinds if isinstance(self.kinds, np.ndarray) else self.kinds.get()
        counts = np.bincount(kinds.ravel(), minlength=3)
        named = zip(("hidden", "in part", "whole"), counts, strict=True)
        parts = [f"{count / kinds.size:.1%} {kind}" for kind, count in named if count]
        sizes = " x ".join(map(str, (*kinds.shape[:2], self.seq_q, self.seq_kv)))
        queries, keys = self.block
        return f"BlockMask of {sizes} in tiles of {queries} x {keys}: {', '.join(parts) or 'none'}"


def mask_mod_of(block_mask: object, mask_mod: object) -> Any:
    """Return the function of a call that has a `block_mask`.

    Raises
    ------
    TypeError
        `block_mask` is no `BlockMask`.
    ValueError
        The call names another function.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, not {type(block_mask).__name__}")
    if mask_mod is not None and mask_mod != block_mask.mask_mod:
        raise ValueError(
            f"mask_mod {mask_mod!r} is not that of block_mask, {block_mask.mask_mod!r}: leave "
            "mask_mod out, or make the BlockMask of it; for both masks, make it of a function that "
            "calls both"
        )
    return block_mask.mask_mod
