"""A mixture of experts for few tokens, on a GPU: kernels that read the matrices of chosen experts.

Nothing of it depends on the host's knowing which they are, so a CUDA graph can hold it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from models import cuda, flat
from models.backend import Array
from models.flat import GROUP_ROWS, OUTPUTS

#: Pairs of a token and an expert that there may be: the threads of a block.
MOST_PAIRS = 1024

MOST_EXPERTS = 4096

_SINGLE, _INT = np.dtype(np.float32), np.dtype(np.int32)


def takes(matrices: Iterable[Array], experts: int, chosen: int, tokens: int) -> bool:
    """Return whether these kernels are for `tokens`, which take `chosen` experts each.

    `matrices` are those of an expert.
    """
    fits = experts <= MOST_EXPERTS and tokens * chosen <= MOST_PAIRS
    return fits and all(flat.takes(matrix, tokens) for matrix in matrices)


class Route(NamedTuple):
    """Which tokens take which experts.

    Attributes
    ----------
    shares : cupy.ndarray, (tokens, chosen) float32
        The share of each expert that a token takes; together 1.
    pairs : cupy.ndarray, (tokens * chosen,) int32
        Numbers of what tokens take, sorted by expert.
    slots : cupy.ndarray, (slots, 3) int32
        Experts that are taken, where their pairs begin, and how many they are; 0 of them where
        fewer are taken.
    """

    shares: Array
    pairs: Array
    slots: Array


def route(logits: Array, chosen: int) -> Route:
    """Return the `chosen` experts of the largest logits of each token, (tokens, experts) float32.

    Shares are the softmax of these.
    """
    tokens, experts = logits.shape
    pairs = tokens * chosen
    found = Route(
        cuda.empty((tokens, chosen), _SINGLE),
        cuda.empty((pairs,), _INT),
        cuda.empty((min(pairs, experts), 3), _INT),
    )
    function = cuda.kernel("experts", f"route<{MOST_PAIRS}>")
    smem_bytes = 4 * (pairs + experts)
    cuda.launch(function, 1, MOST_PAIRS, smem_bytes, logits, *found, tokens, experts, chosen)
    return found


def product(weight: Array, bias: Array | None, x: Array, taken: Route) -> Array:
    """Return what its expert makes of each pair, (tokens * chosen, outputs) float32.

    Parameters
    ----------
    weight : cupy.ndarray, (experts, outputs, inputs)
    bias : cupy.ndarray or None, (experts, outputs) float32
    x : cupy.ndarray, (tokens * chosen, inputs)
    taken : Route
    """
    return _launch("STORE", weight, bias, x, taken)


def gated_product(weight: Array, bias: Array | None, x: Array, taken: Route, gate: str) -> Array:
    """Return the same with a gate, see `flat.gated_product`, of the tokens x (tokens, inputs)."""
    return _launch(f"GATE_{gate.upper()}", weight, bias, x, taken)


def add_shares(x: Array, taken: Route, sums: Array) -> None:
    """Add the pairs' `x`, (tokens * chosen, width) float32, by their shares to the tokens' sums."""
    threads = 256
    function = cuda.kernel("experts", f"add_shares<{threads}>")
    tokens, chosen = taken.shares.shape
    cuda.launch(function, tokens, threads, 0, x, taken.shares, sums, x.shape[1], chosen)


def _launch(finish: str, weight: Array, bias: Array | None, x: Array, taken: Route) -> Array:
    tokens, chosen = taken.shares.shape
    _, outputs, inputs = weight.shape
    tile = flat.tile_of(tokens, weight.itemsize)
    block_rows, block_outputs = tile.groups * GROUP_ROWS, tile.tiles * OUTPUTS
    halves = 2 if finish.startswith("GATE") else 1
    y = cuda.empty((tokens * chosen, outputs // halves), x.dtype if halves == 2 else _SINGLE)
    blocks = -(-y.shape[1] // (block_outputs // halves)) * -(-tokens // block_rows)
    function = cuda.kernel("experts", f"expert_product<{flat.arguments(weight, y, finish, tile)}>")
    smem_bytes = 4 * tile.warps * block_rows * block_outputs
    sharing = len(y) // len(x)  # pairs that a row of x is for
    cuda.launch(
        function,
        blocks * len(taken.slots),
        32 * tile.warps,
        smem_bytes,
        *(weight, bias, x, y, taken.pairs, taken.slots, outputs, inputs, tokens, sharing),
    )
    return y
