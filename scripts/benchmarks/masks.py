"""Masks, biases and sequences of unequal lengths: cufa and its peers by graph replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import cupy
import numpy as np

import cufa
from benchmarks import graphs
from benchmarks.cells import VARLEN_LENGTHS, Cell
from benchmarks.contestants import CUFA, columns, free_memory, reason, rounded, rows_of, say
from benchmarks.inputs import DTYPES, Operands, to_torch
from benchmarks.peers import PEERS, cufa_call
from benchmarks.race import Budget
from cufa.explorer.clock import Call, Clock

CAUSAL = "cufa_causal"
"""cufa's causal kernel on the same shape, a peer of every row."""

_DTYPE = "bfloat16"
_HIDDEN = 2048
_TOKENS = 16384
_HEAD_DIMS = (64, 128)
_SEQS = (8192, 16384)
_BIAS_SEQ = 4096
_SOFTCAP = 30.0
Arrays = Mapping[str, Any]


class Case(NamedTuple):
    """A feature on a shape.

    Attributes
    ----------
    feature : str
    cell : Cell
    call : callable
        Operands, random numbers and a package -> its call, and the arrays that peers need, too.
    """

    feature: str
    cell: Cell
    call: Callable[[Operands, Any, ModuleType], tuple[Call, Arrays]]

    def __str__(self) -> str:
        """In a few words."""
        return f"{self.feature} d{self.cell.d} s{self.cell.sq}"


def cases() -> list[Case]:
    """Return the rows of the table."""
    found = []
    for d in _HEAD_DIMS:
        for s in _SEQS:
            found += [Case(name, _cell(d, s, True), call) for name, call in _CAUSAL.items()]
        found += [Case(name, _cell(d, _BIAS_SEQ, False), call) for name, call in _FULL.items()]
        found.append(Case("varlen 16", _cell(d, _SEQS[0], True), _varlen))
        found.append(Case("documents", _cell(d, _TOKENS, True), _documents))
    return found


def rows(peers: Iterable[str], clock: Clock, budget: Budget, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a result row a case, and print a line for each.

    The peers are cufa's causal kernel, and cuDNN: with the bias or the mask where
    the feature is one, and else causal.

    Parameters
    ----------
    peers : iterable of str
        Keys of `PEERS`.
    clock : Clock
    budget : Budget
        The budget of a case.
    seed : int
        Seed of the random data.
    """
    rng = cupy.random.default_rng(seed)

    def row_of(case: Case) -> dict[str, Any]:
        operands = Operands(case.cell, rng)
        ours, arrays = case.call(operands, rng, cufa)
        causal = Operands(case.cell._replace(causal=True), rng)
        calls = {CUFA: ours, CAUSAL: cufa_call(causal, None)}
        for name in peers:
            try:
                calls[name] = _peer(name, operands, arrays)
                calls[name]()
            except Exception as error:  # whatever a library raises, the others can run
                say(f"{case}: no {name}: {reason(error)}")
                calls.pop(name, None)
                free_memory()
        ms, replayed = graphs.medians(calls, clock, budget, "graph")
        return {
            "feature": case.feature,
            **case.cell.row(),
            "kernel": "auto",
            "unit": "us",
            **columns({name: rounded(1e3 * each, 5) for name, each in ms.items()}),
            "replayed": replayed,
        }

    return rows_of(cases(), row_of)


def _cell(d: int, s: int, causal: bool) -> Cell:
    heads = _HIDDEN // d
    return Cell(_DTYPE, _TOKENS // s, heads, heads, s, s, d, d, causal)


def _with(
    make: Callable[[Operands, Any], dict[str, Any]],
) -> Callable[[Operands, Any, ModuleType], tuple[Call, Arrays]]:
    """Return a maker of calls of a package's `attention` with these options."""

    def prepared(operands: Operands, rng: Any, package: ModuleType) -> tuple[Call, Arrays]:
        options = {"causal": operands.cell.causal, **make(operands, rng)}
        q, k, v = operands.q, operands.k, operands.v
        return lambda: package.attention(q, k, v, **options), options

    return prepared


def _slopes(operands: Operands, rng: Any) -> dict[str, Any]:
    heads = operands.cell.hq
    return {"alibi_slopes": (2 ** (-8 * (cupy.arange(heads) + 1) / heads)).astype(np.float32)}


def _sinks(operands: Operands, rng: Any) -> dict[str, Any]:
    return {"sinks": rng.standard_normal(operands.cell.hq, dtype=np.float32)}


def _bias(operands: Operands, rng: Any) -> dict[str, Any]:
    cell = operands.cell
    bias = rng.standard_normal((1, cell.hq, cell.sq, cell.sk), dtype=np.float32)
    return {"bias": bias.astype(DTYPES[cell.dtype])}


def _mask(operands: Operands, rng: Any) -> dict[str, Any]:
    cell = operands.cell
    return {"mask": rng.random((cell.b, 1, cell.sq, cell.sk), dtype=np.float32) < 0.5}


def _bits(operands: Operands, rng: Any) -> dict[str, Any]:
    mask = _mask(operands, rng)["mask"]
    return {"mask": cupy.packbits(mask.ravel()).reshape(*mask.shape[:3], -1)}


def _identity(operands: Operands, rng: Any) -> dict[str, Any]:
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score}


def _alibi_mod(operands: Operands, rng: Any) -> dict[str, Any]:
    slopes = _slopes(operands, rng)["alibi_slopes"]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * abs(q_idx - kv_idx)

    return {"score_mod": score_mod}


def _documents(operands: Operands, rng: Any, package: ModuleType) -> tuple[Call, Arrays]:
    """Return a causal call with the sequences of `_varlen` as documents of one sequence."""
    documents = cupy.asarray(
        np.repeat(np.arange(len(VARLEN_LENGTHS), dtype=np.int32), VARLEN_LENGTHS)
    )

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] == documents[kv_idx]

    sizes = operands.cell.sq, operands.cell.sk
    tiles = package.BlockMask.of(mask_mod, None, None, *sizes, xp=cupy)
    options = {"mask_mod": mask_mod, "block_mask": tiles}
    return _with(lambda operands, rng: options)(operands, rng, package)


def _varlen(operands: Operands, rng: Any, package: ModuleType) -> tuple[Call, Arrays]:
    cell = operands.cell
    q, k, v = (
        x.swapaxes(1, 2).reshape(_TOKENS, cell.hq, cell.d)
        for x in (operands.q, operands.k, operands.v)
    )
    offsets = cupy.asarray(np.cumsum([0, *VARLEN_LENGTHS]).astype(np.int32))
    return lambda: package.attention_varlen(q, k, v, offsets, offsets, causal=True), {}


_CAUSAL = {
    "top-left": _with(lambda operands, rng: {"causal": "top-left"}),
    "window 1024": _with(lambda operands, rng: {"window": (1023, None)}),
    "window 4096": _with(lambda operands, rng: {"window": (4095, None)}),
    "softcap": _with(lambda operands, rng: {"softcap": _SOFTCAP}),
    "softcap, lse": _with(lambda operands, rng: {"softcap": _SOFTCAP, "return_lse": True}),
    "alibi": _with(_slopes),
    "sinks": _with(_sinks),
    "dropout": _with(lambda operands, rng: {"dropout_p": 0.1, "seed": 1}),
    "score_mod identity": _with(_identity),
    "alibi as score_mod": _with(_alibi_mod),
}
_FULL = {"bias": _with(_bias), "mask": _with(_mask), "mask of bits": _with(_bits)}


def _peer(name: str, operands: Operands, arrays: Arrays) -> Call:
    """Return a peer's call, with the array that is added to its scores or masks them."""
    array = arrays.get("bias", arrays.get("mask"))
    if array is None:
        return PEERS[name](operands)
    if name != "cudnn":
        raise ValueError("it is measured without such an array")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if array.dtype == np.uint8:
        raise ValueError("it takes no packed bits")
    q, k, v = operands.torch()
    mask = to_torch(array.view(np.uint8)).bool() if array.dtype == np.bool_ else to_torch(array)

    def call() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return call
