"""Arrays -> launch of ``kernels/append.cu``, or of ``append8.cu`` for a cache of 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.arrays import ALIGNMENT, Array
from cufa.launch.auxiliary import address, are_aligned, tensor
from cufa.launch.auxiliary import prepared as launch_of
from cufa.launch.capture import refuse_copy
from cufa.launch.launch import Launch
from cufa.launch.signature import Key
from cufa.problem.tokens import Tokens
from cufa.quantized.rows import kind_of as kind_of_rows
from cufa.remembered import remember
from cufa.specs import append8, means8
from cufa.specs.append import MEANS, PARAMS, ROWS, SCALES, SPEC
from cufa.specs.instance import Instance
from cufa.specs.structs import numbers_of

_NAMES = (*ROWS, "starts", "lengths", "table", "cos", "sin", *SCALES, *MEANS)  # of arrays
_OFFSETS = {name.removesuffix(".data"): offset for name, offset, _ in numbers_of(PARAMS)}
_PLACES = tuple((_OFFSETS[name] // 8, i) for i, name in enumerate(_NAMES))
_PREPARED = 256  # launches that are remembered
_WARP = 32  # threads

_prepared: dict[Key, Launch] = {}


def kind_of(k: Array, v: Array, q: Array | None) -> Key | None:
    """Return what a launch depends on, but for addresses, among writes of one layer.

    Parameters
    ----------
    k, v, q : object
        In the caller's layout.

    Returns
    -------
    tuple or None
        Equal for arrays of which all or none are legal; None for objects of another type.
    """
    import cupy

    ndarray, key = cupy.ndarray, [cupy.cuda.runtime.getDevice()]
    for x in (k, v) if q is None else (k, v, q):
        if type(x) is not ndarray:
            return None
        data = x.data
        key += data.device_id, x.dtype, x.shape, x.strides, data.ptr % ALIGNMENT
    return tuple(key)


def append(tokens: Tokens) -> None:
    """Write tokens on the current device and stream.

    Parameters
    ----------
    tokens : Tokens
        CuPy arrays; starts and lengths are contiguous, and so is the last axis of k, v and q.
    """
    if tokens.k.size or (tokens.turned_q is not None and tokens.turned_q.size):
        prepared(tokens)(*addresses(tokens))


def addresses(tokens: Tokens) -> tuple[int, ...]:
    """Return what a launch is given: the addresses of k, v, q, turned_q and then of the layer."""
    return tuple(map(address, _arrays(tokens)))


def _arrays(tokens: Tokens) -> tuple[Array | None, ...]:
    """Return the arrays of a launch, in the order of `_NAMES`."""
    k, v, q, turned_q, k_cache, v_cache, starts, lengths, pages, turns, *scaled = tokens
    q = None if turned_q is None else q  # queries pass by
    tables = (None, None) if turns is None else (turns.cos, turns.sin)
    return k, v, q, turned_q, k_cache, v_cache, starts, lengths, pages, *tables, *scaled


def prepared(tokens: Tokens) -> Launch:
    """Return the launch of these tokens, and of others of their shapes, strides and alignment.

    Parameters
    ----------
    tokens : Tokens
        As in `append`, and at least one.
    """
    import cupy

    device_id = cupy.cuda.runtime.getDevice()
    key: list[Any] = [device_id, tokens.k.dtype, tokens.k_cache.dtype]
    for array in _arrays(tokens):
        key.append(None if array is None else (array.shape, array.strides))
    key += (at % ALIGNMENT == 0 for at in addresses(tokens))
    key.append(tokens.rotary is not None and tokens.rotary.interleaved)
    known = tuple(key)
    return _prepared.get(known) or remember(_prepared, known, _made(tokens), _PREPARED)


def in_rows(name: str, array: Array) -> Array:
    """Return an array whose last axis is contiguous: as it is, or a copy.

    Raises
    ------
    ValueError
        It would be copied in a capture into a CUDA graph.
    """
    if array.shape[-1] == 1 or array.strides[-1] == array.itemsize:
        return array
    import cupy

    refuse_copy(name, array, "give an array whose last axis is contiguous")
    return cupy.ascontiguousarray(array)


def _made(tokens: Tokens) -> Launch:
    """Return the launch for tokens of these shapes; there is at least one token."""
    batch, _, seq, _ = tokens.k.shape
    instance = _instance_of(tokens)
    parameter = _filled(tokens)
    p, elements = parameter[0], instance.arguments[0]
    units = (int(p["head_dim"]) - int(p["rotary_dim"]) // 2) // elements
    of_queries, heads_kv = int(p["heads_q"]) * units, int(p["heads_kv"])
    grid: int | tuple[int, int]
    if tokens.k_scale is not None:
        warps = -(-of_queries // _WARP) + heads_kv
        grid = batch * seq * -(-warps * _WARP // append8.SPEC.threads)
    else:
        items = of_queries + heads_kv * (units + int(p["head_dim_v"]) // elements)
        grid = batch * seq, -(-items // SPEC.threads)
    appends = launch_of(instance, grid, parameter, _PLACES)
    if tokens.k_mean is None:
        return appends
    first = means8.instance(tokens.k.dtype.name, bool(instance.arguments[1]))
    takes_means = launch_of(first, batch * heads_kv, parameter, _PLACES)

    def both(*addresses: int) -> None:
        takes_means(*addresses)
        appends(*addresses)

    return both


def _instance_of(tokens: Tokens) -> Instance:
    """Return the instantiation that reads and writes the most at once that all arrays allow."""
    size, turns = tokens.k.itemsize, tokens.rotary
    steps = [tokens.k.shape[3] * size, tokens.v.shape[3] * size]
    if turns is not None:
        steps += turns.dim // 2 * size, turns.cos.data.ptr, turns.sin.data.ptr
    rows = (array for array in _arrays(tokens)[: len(ROWS)] if array is not None)
    whole = are_aligned(*rows) and all(step % ALIGNMENT == 0 for step in steps)
    arguments = ALIGNMENT // size if whole else 1, turns is not None and turns.interleaved
    if tokens.k_scale is None:
        return Instance(SPEC.name, (tokens.k.dtype.name,), arguments)
    is_integer = kind_of_rows(tokens.k_cache).is_integer
    return Instance(append8.SPEC.name, (tokens.k.dtype.name,), (*arguments, is_integer))


def _filled(tokens: Tokens) -> np.ndarray:
    """Return the kernel's parameter, but for the addresses."""
    parameter = np.zeros(1, PARAMS)
    p = parameter[0]
    arrays = dict(zip(_NAMES, _arrays(tokens), strict=True))
    for name in (*ROWS, *SCALES, *MEANS):
        p[name] = tensor(arrays[name])
    _, p["heads_kv"], p["seq"], p["head_dim"] = tokens.k.shape
    p["head_dim_v"] = tokens.v.shape[3]
    p["heads_q"] = 0 if tokens.turned_q is None else tokens.turned_q.shape[1]
    if tokens.rotary is not None:
        p["rotary_dim"], p["positions"] = tokens.rotary.dim, tokens.rotary.positions
    p["pages"], _, p["page_size"], _ = tokens.k_cache.shape
    _, p["table_stride"], *_ = tensor(tokens.block_table)
    p["pages_a_sequence"] = 1 if tokens.block_table is None else tokens.block_table.shape[1]
    return parameter
