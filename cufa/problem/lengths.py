"""How long sequences are, where they differ: arrays of lengths and of offsets, and their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cufa.arrays import Array, ArrayInfo, module_of
from cufa.checks import check_devices, check_size, shown_dtype
from cufa.problem.problem import Problem

LENGTHS = {
    "Padded": ("lengths_k", "lengths_q"),
    "Varlen": ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
    **dict.fromkeys(("Contiguous", "Paged"), ("lengths", "block_table")),
}
"""The arguments that say how long sequences are, and where, by `Problem.kv`."""

OFFSETS = {"x": "cu_seqlens", "q": "cu_seqlens_q", "k": "cu_seqlens_k", "v": "cu_seqlens_k"}
"""The argument that says where the sequences of an array begin."""

_ANY = 2**31 - 1
_INT32 = np.dtype(np.int32)


def which_rows(name: str, lengths: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return where sequences of q, k or v begin, and how many of their rows count.

    Parameters
    ----------
    name : str
        "q", "k" or "v".
    lengths : mapping
        Arguments of `attention` or of `attention_varlen`, by name.
    """
    used_k = lengths.get("lengths_k", lengths.get("seqused_k"))
    return lengths.get(OFFSETS[name]), lengths.get("lengths_q") if name == "q" else used_k


def of_lengths(kv: str, batch: int, lengths: Sequence[ArrayInfo | None]) -> int:
    """Return the number of sequences that arrays of lengths are for.

    Parameters
    ----------
    kv : str
        As in `cufa.problem.problem.Problem`, but for "Dense".
    batch : int
        The batch of q.
    lengths : sequence
        As in `cufa.problem.extras.Extras`.

    Raises
    ------
    ValueError
        Kernels cannot read them.
    """
    named = dict(zip(LENGTHS[kv], lengths, strict=False))  # `lengths_q` may be left out
    table = named.pop("block_table", None)
    if kv == "Varlen":
        first = named["cu_seqlens_q"]
        batch = 0 if first is None else math.prod(first.shape) - 1
    for name, info in named.items():
        is_offsets = name.startswith("cu_seqlens")
        if info is None and not is_offsets:
            continue
        if info is None or info.shape != (batch + is_offsets,) or not is_readable(info):
            raise ValueError(f"{name} does not fit")
    if batch < 1:
        raise ValueError("there are no sequences")
    if kv == "Paged" and (table is None or not is_readable(table)):
        raise ValueError("block_table does not fit")
    return batch


def is_readable(array: Array | ArrayInfo) -> bool:
    """Whether kernels read lengths, offsets or a table of the device as they are."""
    shape, (*steps, step) = array.shape, array.strides
    if array.dtype != _INT32 or (shape[-1] > 1 and step != _INT32.itemsize):
        return False
    return all(n <= 1 or step % _INT32.itemsize == 0 for n, step in zip(shape, steps, strict=False))


def as_int32(array: Array | None) -> Array | None:
    """Return integers of the host as contiguous int32; what is not on the host as it is."""
    return np.ascontiguousarray(array, np.int32) if isinstance(array, np.ndarray) else array


def check_integers(name: str, array: Array, shape: tuple[int, ...], xp: ModuleType) -> None:
    """Check kind, dtype and shape of lengths, of offsets or of a table.

    Parameters
    ----------
    name : str
        The argument.
    array : array
        Integers, on the host or where `xp` is.
    shape : tuple of int
        The shape that is needed.
    xp : module
        The module that q belongs to.
    """
    module = module_of(name, array)
    if module is not np and xp is np:
        raise TypeError(
            f"{name} is a cupy array, but q is a numpy array: all must be on the host then"
        )
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, but {shape} is needed")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {shown_dtype(array.dtype)}: integers are needed")
    check_devices({name: array}, module)


def check_lengths(name: str, lengths: Array, most: int | np.ndarray, room: str = "") -> None:
    """Refuse lengths on the host that are negative, or more than there is room for.

    `room` says what there is room for, for the end of the message; `{i}` in it is the sequence.
    """
    if not isinstance(lengths, np.ndarray):
        return
    bad = np.flatnonzero((lengths < 0) | (lengths > most))
    if bad.size:
        i = int(bad[0])
        most_of_it = np.broadcast_to(most, lengths.shape)[i]
        raise ValueError(
            f"{name}[{i}] is {lengths[i]}: it must be 0 to {most_of_it}{room.format(i=i)}"
        )


def with_lengths(
    problem: Problem, arguments: Mapping[str, Any], xp: ModuleType
) -> tuple[Problem, dict[str, Array | None]]:
    """Check the arrays that say how long sequences are, and where.

    Parameters
    ----------
    problem : Problem
        The problem without them.
    arguments : mapping
        The arguments of the call by name.
    xp : module
        The module that q belongs to.

    Returns
    -------
    Problem
    dict
        The arrays; offsets, and lengths that go with them, as int32 if they are on the host.

    Raises
    ------
    TypeError, ValueError
        For other kinds, dtypes and shapes; and on the host, for lengths that are negative or beyond
        their sequence, and for offsets that do not begin with 0, decrease or exceed the rows.
    """
    if "cu_seqlens_q" in arguments:
        return _packed(problem, arguments, xp)
    if problem.is_cached:
        return problem, _in_cache(problem, arguments, xp)
    lengths = {name: arguments.get(name) for name in LENGTHS["Padded"]}
    if all(array is None for array in lengths.values()):
        return problem, {}
    for (name, array), most in zip(lengths.items(), (problem.seq_kv, problem.seq_q), strict=True):
        if array is not None:
            check_integers(name, array, (problem.batch,), xp)
            check_lengths(name, array, most)
    return problem._replace(kv="Padded"), lengths


def _packed(
    problem: Problem, arguments: Mapping[str, Any], xp: ModuleType
) -> tuple[Problem, dict[str, Array | None]]:
    """Do what `with_lengths` does, for packed sequences."""
    first = arguments["cu_seqlens_q"]
    module_of("cu_seqlens_q", first)
    if first.ndim != 1 or first.size < 1:
        raise ValueError(f"cu_seqlens_q has shape {first.shape}, but (sequences + 1,) is needed")
    sequences = first.size - 1
    rows = {"cu_seqlens_q": problem.seq_q, "cu_seqlens_k": problem.seq_kv}
    lengths = {name: arguments[name] for name in LENGTHS["Varlen"]}
    for name, array in lengths.items():
        if array is None and name not in rows:
            continue
        check_integers(name, array, (sequences + (name in rows),), xp)
        if not isinstance(array, np.ndarray):
            continue
        if name in rows:
            check_offsets(name, array, rows[name])
        elif isinstance(lengths["cu_seqlens_k"], np.ndarray):
            room = ", the keys of sequence {i} in cu_seqlens_k"
            check_lengths(name, array, np.diff(lengths["cu_seqlens_k"]), room)
        else:
            check_lengths(name, array, _ANY)
        lengths[name] = as_int32(array)
    longest_q, longest_k = (
        _ANY if arguments[name] is None else check_size(name, arguments[name], least=0)
        for name in ("max_seqlen_q", "max_seqlen_k")
    )
    offsets_q, offsets_k, used = lengths.values()
    _check_longest("max_seqlen_q", longest_q, offsets_q)
    _check_longest("max_seqlen_k", longest_k, offsets_k, used)
    for name in ("bias", "mask"):
        if arguments[name] is not None and _ANY in (longest_q, longest_k):
            raise ValueError(f"{name}: max_seqlen_q and max_seqlen_k are needed with it")
    problem = problem._replace(
        kv="Varlen", sequences=sequences, max_seqlen_q=longest_q, max_seqlen_k=longest_k
    )
    return problem, lengths


def _in_cache(
    problem: Problem, arguments: Mapping[str, Any], xp: ModuleType
) -> dict[str, Array | None]:
    """Return the arrays of `with_lengths`, for a cache: None for `capacity` keys of each."""
    lengths, table = (arguments[name] for name in LENGTHS[problem.kv])
    if lengths is not None:
        check_integers("lengths", lengths, (problem.batch,), xp)
        room = ""
        if table is not None:
            pages, size = table.shape[1], problem.page_size
            room = f", the {pages} pages of {size} tokens of a sequence's table"
        check_lengths("lengths", lengths, problem.seq_kv, room)
    if table is not None:
        check_integers("block_table", table, (problem.batch, table.shape[1]), xp)
        if isinstance(table, np.ndarray):
            _check_table(table, lengths, problem)
    return {"lengths": as_int32(lengths), "block_table": as_int32(table)}


def _check_table(table: np.ndarray, lengths: Array | None, problem: Problem) -> None:
    """Refuse pages on the host that do not exist, as far as they are known to be in use."""
    if lengths is not None and not isinstance(lengths, np.ndarray):
        return  # only the device knows
    used = problem.seq_kv if lengths is None else lengths[:, None]
    bad = (table < 0) | (table >= problem.pages)
    first = np.arange(table.shape[1]) * problem.page_size  # keys
    bad &= first < used
    seen, _ = problem.seen(0, np.int64(used) - problem.seq_q)
    if seen is not None:
        bad &= np.minimum(first + problem.page_size, used) > seen
    if bad.any():
        i, j = (int(x) for x in np.argwhere(bad)[0])
        raise ValueError(
            f"block_table[{i}, {j}] is {table[i, j]}, but the cache has {problem.pages} pages"
        )


def check_offsets(name: str, offsets: np.ndarray, total: int) -> None:
    """Refuse offsets on the host that do not begin with 0, decrease, or exceed the rows."""
    if offsets[0] != 0:
        raise ValueError(f"{name}[0] is {offsets[0]}: it must be 0")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        i = int(falls[0]) + 1
        raise ValueError(f"{name}[{i}] is {offsets[i]}, less than the {offsets[i - 1]} before it")
    if offsets[-1] > total:
        raise ValueError(f"{name}[-1] is {offsets[-1]}, but there are {total} rows")
    if name == "cu_seqlens_q" and offsets[-1] < total:
        raise ValueError(
            f"{name}[-1] is {offsets[-1]}, but q has {total} rows: no sequence has the last ones, "
            "so leave them out of q, and of out"
        )


def _check_longest(name: str, most: int, offsets: Array, used: Array | None = None) -> None:
    """Refuse a maximum that a sequence exceeds, where lengths are on the host.

    Parameters
    ----------
    name : str
        The argument that says the maximum.
    most : int
    offsets : array
    used : array, optional
        How many of each sequence's rows count.
    """
    if not isinstance(offsets, np.ndarray) or not (used is None or isinstance(used, np.ndarray)):
        return
    lengths = np.diff(offsets)
    lengths = lengths if used is None else np.minimum(lengths, used)
    longer = np.flatnonzero(lengths > most)
    if longer.size:
        i = int(longer[0])
        raise ValueError(f"{name} is {most}, but sequence {i} has length {lengths[i]}")
