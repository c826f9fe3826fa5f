"""The tiles of a mask on the CPU: its function called with many pairs at once."""

from __future__ import annotations

import numpy as np

from cufa.cpu.functions import Function, seen
from cufa.cpu.spans import spans
from cufa.features.feature import Tile

_PAIRS = 1 << 22  # that are looked at together


def fill(
    kinds: np.ndarray, mask_mod: Function, sizes: tuple[int, ...], block: tuple[int, int]
) -> None:
    """Write the kinds of all tiles.

    Parameters
    ----------
    kinds : ndarray of uint8
        As in `cufa.BlockMask`.
    mask_mod : function
    sizes : tuple of int
        Sequences, heads, queries and keys.
    block : tuple of int
        Queries and keys of a tile.
    """
    batch, heads, seq_q, seq_kv = sizes
    queries, keys = block
    columns = max(1, _PAIRS // (batch * heads * queries * keys))
    for row, of_queries in enumerate(spans(0, seq_q, queries)):
        for of_keys in spans(0, seq_kv, columns * keys):
            found = seen(mask_mod, Tile(slice(0, batch), slice(0, heads), of_queries, of_keys))
            starts = np.arange(0, found.shape[3], keys)
            some = np.logical_or.reduceat(found.any(axis=2), starts, axis=2)
            whole = np.logical_and.reduceat(found.all(axis=2), starts, axis=2)
            first = of_keys.start // keys
            kinds[:, :, row, first : first + len(starts)] = some.astype(np.uint8) + whole
