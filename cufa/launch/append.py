"""Arrays -> launch of ``kernels/append.cu``."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa import device as devices
from cufa.arrays import ALIGNMENT, Array
from cufa.compiler import jit
from cufa.launch.counters import is_capturing
from cufa.launch.launch import Launch, launcher
from cufa.launch.signature import Key, remember
from cufa.problem.tokens import Tokens
from cufa.specs.append import SPEC
from cufa.specs.instance import Instance
from cufa.specs.layout import numbers_of

_TENSORS = (*SPEC.inputs, *SPEC.outputs)
_OFFSETS = {name: offset for name, offset, _ in numbers_of(SPEC.params)}
_ADDRESSES = *map("{}.data".format, _TENSORS), "starts", "lengths", "table", "cos", "sin"
_PLACES = tuple((_OFFSETS[name] // 8, i) for i, name in enumerate(_ADDRESSES))
_PREPARED = 256  # launches that are remembered

_prepared: dict[Key, Launch] = {}


def append(tokens: Tokens) -> None:
    """Write tokens on the current device and stream.

    Parameters
    ----------
    tokens : Tokens
        Of CuPy arrays; starts and lengths contiguous.
    """
    import cupy

    if tokens.turned_q is None and tokens.q is not None:
        tokens = tokens._replace(q=None)  # they pass by
    device_id = cupy.cuda.runtime.getDevice()
    key: list[Any] = [device_id, tokens.k.dtype]
    addresses = []
    *arrays, turns = tokens
    for array in arrays:
        if array is None:
            key.append(None)
            addresses.append(0)
        else:
            address = array.data.ptr
            key += array.shape, array.strides, address % ALIGNMENT == 0
            addresses.append(address)
    if turns is None:
        addresses += 0, 0
    else:
        tables = turns.cos.data.ptr, turns.sin.data.ptr
        key += turns.interleaved, turns.cos.shape, (tables[0] | tables[1]) % ALIGNMENT == 0
        addresses += tables
    known = tuple(key)
    prepared = _prepared.get(known)
    if prepared is None:
        if tokens.k.size == 0:
            return
        in_rows = {name: _in_rows(name, getattr(tokens, name)) for name in ("k", "v", "q")}
        if any(array is not getattr(tokens, name) for name, array in in_rows.items()):
            append(tokens._replace(**in_rows))
            return
        prepared = remember(_prepared, known, _made(tokens, device_id), _PREPARED)
    prepared(*addresses)


def _made(tokens: Tokens, device_id: int) -> Launch:
    """Return the launch for such tokens, of which there are some."""
    batch, _, seq, _ = tokens.k.shape
    instance = instance_of(tokens)
    parameter = filled(tokens)
    p, elements = parameter[0], instance.arguments[0]
    units = (int(p["head_dim"]) - int(p["rotary_dim"]) // 2) // elements
    units_v = int(p["head_dim_v"]) // elements
    items = int(p["heads_q"]) * units + int(p["heads_kv"]) * (units + units_v)
    function = jit.kernel(instance, devices.of_id(device_id), device_id)
    grid = batch * seq, -(-items // SPEC.threads), 1
    return Launch(launcher(function, grid, SPEC.threads), parameter, _PLACES)


def _in_rows(name: str, array: Array | None) -> Array | None:
    """Return an array whose last axis is contiguous: as it is, or a copy."""
    if array is None or array.shape[3] == 1 or array.strides[3] == array.itemsize:
        return array
    import cupy

    if is_capturing():
        raise ValueError(
            f"{name} (shape {array.shape}, strides {array.strides}) would be copied, for which a "
            "call that is captured into a CUDA graph has no place: give an array whose last axis "
            "is contiguous"
        )
    return cupy.ascontiguousarray(array)


def _tensors(tokens: Tokens) -> list[tuple[str, Array]]:
    """Return those that there are, by name: queries pass through only where they are turned."""
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
    return Instance(SPEC.name, (tokens.k.dtype.name,), (elements if whole else 1, interleaved))


def filled(tokens: Tokens) -> np.ndarray:
    """Return the kernel's parameter."""
    parameter = np.zeros(1, SPEC.params)
    p = parameter[0]
    for name, array in _tensors(tokens):
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
