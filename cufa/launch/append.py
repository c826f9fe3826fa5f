"""Arrays -> launch of ``kernels/append.cu``, or of ``append8.cu`` for a cache of 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.arrays import ALIGNMENT, Array
from cufa.launch.counters import is_capturing
from cufa.launch.launch import Launches, PreparedLaunch, ready
from cufa.launch.signature import Key, remember
from cufa.problem.tokens import Tokens
from cufa.quantized.rows import kind_of as kind_of_rows
from cufa.specs import means8
from cufa.specs.append import MEANS, PARAMS, SCALES, SPEC
from cufa.specs.append8 import SPEC as SPEC8
from cufa.specs.instance import Instance
from cufa.specs.structs import numbers_of

_TENSORS = (*SPEC.inputs, *SPEC.outputs)
_OFFSETS = {name: offset for name, offset, _ in numbers_of(PARAMS)}
_ADDRESSES = (
    *map("{}.data".format, _TENSORS),
    *("starts", "lengths", "table", "cos", "sin"),
    *map("{}.data".format, (*SCALES, *MEANS)),
)
_PLACES = tuple((_OFFSETS[name] // 8, i) for i, name in enumerate(_ADDRESSES))
_PREPARED = 256  # launches that are remembered
_WARP = 32  # threads

_prepared: dict[Key, PreparedLaunch | Launches] = {}


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

    ndarray = cupy.ndarray
    if type(k) is not ndarray or type(v) is not ndarray:
        return None
    of_k, of_v = k.data, v.data
    key = (
        *(cupy.cuda.runtime.getDevice(), of_k.device_id, of_v.device_id),
        *(k.dtype, k.shape, k.strides, of_k.ptr % ALIGNMENT),
        *(v.dtype, v.shape, v.strides, of_v.ptr % ALIGNMENT),
    )
    if q is None:
        return key
    if type(q) is not ndarray:
        return None
    of_q = q.data
    return (*key, of_q.device_id, q.dtype, q.shape, q.strides, of_q.ptr % ALIGNMENT)


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
    known = (0 if array is None else array.data.ptr for array in _arrays(tokens))
    return tuple(known)


def _arrays(tokens: Tokens) -> tuple[Array | None, ...]:
    """Return the arrays of a launch, in the order of `_ADDRESSES`."""
    turns = tokens.rotary
    q = None if tokens.turned_q is None else tokens.q  # else queries pass by
    return (
        *(tokens.k, tokens.v, q, tokens.turned_q, tokens.k_cache, tokens.v_cache),
        *(tokens.starts, tokens.lengths, tokens.block_table),
        *((None, None) if turns is None else (turns.cos, turns.sin)),
        *(tokens.k_scale, tokens.v_scale, tokens.k_mean),
    )


def prepared(tokens: Tokens) -> PreparedLaunch | Launches:
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
    key += (address % ALIGNMENT == 0 for address in addresses(tokens))
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

    if is_capturing():
        raise ValueError(
            f"{name} (shape {array.shape}, strides {array.strides}) would be copied, for which a "
            "call that is captured into a CUDA graph has no place: give an array whose last axis "
            "is contiguous"
        )
    return cupy.ascontiguousarray(array)


def _made(tokens: Tokens) -> PreparedLaunch | Launches:
    """Return the launch for tokens of these shapes; there is at least one token."""
    batch, _, seq, _ = tokens.k.shape
    instance = instance_of(tokens)
    parameter = filled(tokens)
    p, elements = parameter[0], instance.arguments[0]
    units = (int(p["head_dim"]) - int(p["rotary_dim"]) // 2) // elements
    of_queries, heads_kv = int(p["heads_q"]) * units, int(p["heads_kv"])
    grid: int | tuple[int, int]
    if tokens.k_scale is not None:
        warps = -(-of_queries // _WARP) + heads_kv
        grid = batch * seq * -(-warps * _WARP // SPEC8.threads)
    else:
        items = of_queries + heads_kv * (units + int(p["head_dim_v"]) // elements)
        grid = batch * seq, -(-items // SPEC.threads)
    appends = PreparedLaunch(ready(instance, grid, SPEC.threads), parameter, _PLACES)
    if tokens.k_mean is None:
        return appends
    first = means8.instance(tokens.k.dtype.name, bool(instance.arguments[1]))
    threads = means8.SPEC.threads
    launch = ready(first, batch * heads_kv, threads, first.smem_bytes)
    return Launches((PreparedLaunch(launch, parameter, _PLACES), appends))


def _tensors(tokens: Tokens) -> list[tuple[str, Array]]:
    """Return the arrays that a launch takes, by name: queries only where they are turned."""
    arrays = [(name, getattr(tokens, name)) for name in _TENSORS]
    return [
        (name, array) for name, array in arrays if tokens.turned_q is not None or "q" not in name
    ]


def instance_of(tokens: Tokens) -> Instance:
    """Return the instantiation that reads and writes the most at once that all arrays allow."""
    elements = ALIGNMENT // tokens.k.itemsize
    steps = [tokens.k.shape[3] * tokens.k.itemsize, tokens.v.shape[3] * tokens.v.itemsize]
    for _, array in _tensors(tokens):
        steps.append(array.data.ptr)
        axes = zip(array.shape[:3], array.strides[:3], strict=True)
        steps += [step for n, step in axes if n > 1]
    interleaved = False
    if tokens.rotary is not None:
        interleaved = tokens.rotary.interleaved
        steps += [tokens.rotary.dim // 2 * tokens.k.itemsize]
        steps += [tokens.rotary.cos.data.ptr, tokens.rotary.sin.data.ptr]
    whole = all(step % ALIGNMENT == 0 for step in steps)
    types, arguments = (tokens.k.dtype.name,), (elements if whole else 1, interleaved)
    if tokens.k_scale is None:
        return Instance(SPEC.name, types, arguments)
    is_integer = kind_of_rows(tokens.k_cache).is_integer
    return Instance(SPEC8.name, types, (*arguments, is_integer))


def filled(tokens: Tokens) -> np.ndarray:
    """Return the kernel's parameter."""
    parameter = np.zeros(1, PARAMS)
    p = parameter[0]
    tensors = _tensors(tokens)
    if tokens.k_scale is not None:
        tensors += (("k_scale", tokens.k_scale), ("v_scale", tokens.v_scale))
    if tokens.k_mean is not None:
        tensors += (("k_mean", tokens.k_mean[:, :, None]),)
    for name, array in tensors:
        steps = (step // array.itemsize for step in array.strides[:3])
        p[name] = (array.data.ptr, *steps)
    p["starts"], p["lengths"] = tokens.starts.data.ptr, tokens.lengths.data.ptr
    _, p["heads_kv"], p["seq"], p["head_dim"] = tokens.k.shape
    p["head_dim_v"] = tokens.v.shape[3]
    p["heads_q"] = 0 if tokens.turned_q is None else tokens.turned_q.shape[1]
    if tokens.rotary is not None:
        p["cos"], p["sin"] = tokens.rotary.cos.data.ptr, tokens.rotary.sin.data.ptr
        p["rotary_dim"], p["positions"] = tokens.rotary.dim, tokens.rotary.positions
    p["pages"], _, p["page_size"], _ = tokens.k_cache.shape
    p["pages_a_sequence"] = 1
    table = tokens.block_table
    if table is not None:
        p["table"], p["table_stride"] = table.data.ptr, table.strides[0] // table.itemsize
        p["pages_a_sequence"] = table.shape[1]
    return parameter
