"""How gradients of a bias, and of arrays that a `score_mod` reads, are added up in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cufa.arrays import Ints
from cufa.features.bias import SUMS, in_sums
from cufa.features.expression.cpp import sums_of_read
from cufa.features.part import Parameter, Part
from cufa.features.parts import part_named, register
from cufa.problem.problem import Problem

CHAINS = "chains"
"""The parameter that is the address of the chains of blocks."""

_STEPS = (
    *("chain_batch", "chain_head", "chain_key"),
    *("rank_batch", "rank_head", "rank_number"),
)

IN_TURN = Part(
    "InTurn",
    "deterministic",
    parameters=(Parameter(CHAINS, "u8"), *(Parameter(step, "i4") for step in _STEPS)),
)
"""The part of a score whose sums have a fixed order: see ``kernels/array_sums.cuh``."""

register(IN_TURN)


class Wanted(NamedTuple):
    """An array whose gradient is asked for.

    Attributes
    ----------
    part : str
        The part of the score that reads it.
    dtype : str
        As NumPy writes it.
    lengths : tuple of int
        The lengths of a bias along batch, heads, queries and keys; the shape of another array.
    """

    part: str
    dtype: str
    lengths: Ints


class ArraySums(NamedTuple):
    """The sums of the gradient of an array.

    Attributes
    ----------
    part : str
        The part of the score that adds to them.
    parameter : str
        The part's parameter that is their address.
    dtype : str
        The dtype of the gradient.
    lengths : tuple of int
        The four axes of the gradient; if the array is no bias, the last axis has all elements.
    sums : tuple of int
        The same of the sums, which are contiguous.
    place : int
        Where they begin in the workspace, in 32-bit words; -1 if the gradient itself holds them.
    """

    part: str
    parameter: str
    dtype: str
    lengths: Ints
    sums: Ints
    place: int

    @property
    def size(self) -> int:
        """The number of sums."""
        return math.prod(self.sums)

    @property
    def numbers(self) -> dict[str, int]:
        """The parameters of the part, by name; the address is 0."""
        found = {self.parameter: 0}
        if self.parameter == SUMS:
            step = 1
            for axis, n in zip("kqhb", self.sums[::-1], strict=True):
                found[f"{SUMS}_stride_{axis}"] = step if n > 1 else 0
                step *= n
        return found


class Planned(NamedTuple):
    """The sums of a call.

    Attributes
    ----------
    score : tuple of str
        The parts of its score, those that add to sums in place of others.
    sums : tuple of ArraySums
        In the order of what is wanted.
    start, end : int
        The words of the workspace that sums and chains take, and that are to be 0.
    chains : int
        Where the chains begin, a 32-bit word each; -1 where any order is allowed, or gives the same
        bits.
    steps : tuple of int
        How a block's chain grows along batch, heads of K and V, and tiles of keys; how its rank in
        the chain grows along the first two, and from one block to the next one that begins. A
        head's blocks begin one after the other, the last tile of keys first, and then those of the
        next head.
    """

    score: tuple[str, ...]
    sums: tuple[ArraySums, ...]
    start: int
    end: int
    chains: int = -1
    steps: Ints = ()

    @property
    def numbers(self) -> dict[str, int]:
        """The parameters of the parts that add to sums, by name; addresses are 0."""
        found = {CHAINS: 0, **dict(zip(_STEPS, self.steps, strict=True))} if self.steps else {}
        for each in self.sums:
            found |= each.numbers
        return found


def planned_sums(
    problem: Problem, wanted: Sequence[Wanted], key_tiles: int, deterministic: bool, start: int
) -> Planned:
    """Plan the sums of a call.

    Parameters
    ----------
    problem : Problem
    wanted : sequence of Wanted
        Arrays that a `score_mod` reads in the order of its parameters.
    key_tiles : int
        Tiles of keys of a K/V head.
    deterministic : bool
        Whether each sum has a fixed order.
    start : int
        Where the sums begin in the workspace, in 32-bit words.
    """
    score, found = list(problem.score), []
    words, reads = 0, 0
    orders: list[_Order | None] = []
    for name, dtype, lengths in wanted:
        part = part_named(name)
        if part.axes:
            sums = _sums_of_bias(lengths, problem)
            *_, queries, keys = sums
            part = in_sums(part, queries == problem.sizes["q"], keys == problem.sizes["k"])
            register(part)
            score[score.index(name)] = part.name
            parameter = SUMS
            orders.append(_order_of_bias(sums, problem, key_tiles))
        else:
            lengths = sums = (1, 1, 1, math.prod(lengths))
            parameter, reads = sums_of_read(reads), reads + 1
            orders.append(_ONE_CHAIN)
        in_place = dtype == "float32" and sums == lengths
        place = -1 if in_place else start + words
        each = ArraySums(part.name, parameter, dtype, lengths, sums, place)
        words += 0 if in_place else each.size
        found.append(each)
    needed = [order for order in orders if order is not None]
    end = start + words
    if not deterministic or not needed:
        return Planned(tuple(score), tuple(found), start, end)
    count, steps = needed[0] if len(needed) == 1 and problem.kv != "Varlen" else _ONE_CHAIN
    return Planned((*score, IN_TURN.name), tuple(found), start, end + count, end, steps)


_Order = tuple[int, Ints]
"""The number of chains, and the steps of `Planned`."""

_ONE_CHAIN: _Order = 1, (0, 0, 0, 0, 0, 1)


def _sums_of_bias(lengths: Ints, problem: Problem) -> Ints:
    """Return the axes of the sums of a bias.

    A bias that lacks queries, or keys, has sums of each sequence and head, so that few blocks add
    to one number; these sums are added up in the end.
    """
    batch, heads, queries, keys = problem.sizes.values()
    if lengths[2:] == (queries, keys):
        return lengths
    return (batch, heads, 1, keys) if lengths[3] == keys else (batch, heads, queries, 1)


def _order_of_bias(sums: Ints, problem: Problem, key_tiles: int) -> _Order | None:
    """Return the order in which blocks add to the sums of a bias; None where each has its own."""
    of_batch, of_heads, of_queries, of_keys = sums
    batch, heads, queries, keys = problem.sizes.values()
    heads_kv = problem.heads_kv
    if of_keys < keys:  # blocks of a head
        return batch * heads_kv, (heads_kv, 1, 0, -heads_kv * key_tiles, -key_tiles, 1)
    lacks_batch, lacks_heads = of_batch < batch, of_heads < heads and heads_kv > 1
    if of_queries < queries or not (lacks_batch or lacks_heads):
        return None
    chains_batch, chains_heads = (1 if lacks_batch else batch), (1 if lacks_heads else heads_kv)
    ranks_heads = heads_kv if lacks_heads else 1
    return chains_batch * chains_heads * key_tiles, (
        *(0 if lacks_batch else chains_heads * key_tiles, 0 if lacks_heads else key_tiles, 1),
        *(ranks_heads if lacks_batch else 0, 1 if lacks_heads else 0, 0),
    )
