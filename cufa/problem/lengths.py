"""How long sequences are, where they differ: arrays of lengths and of offsets, and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np

from cufa.arrays import Array, ArrayInfo, module_of
from cufa.checks import check_devices, shown_dtype

_INT32 = np.dtype(np.int32)


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
    if kv == "Varlen":
        offsets_q, offsets_k, used = lengths
        if offsets_q is None or len(offsets_q.shape) != 1 or offsets_q.shape[0] < 2:
            raise ValueError("cu_seqlens_q does not fit")
        batch = offsets_q.shape[0] - 1
        needed = {"cu_seqlens_q": (offsets_q, 1), "cu_seqlens_k": (offsets_k, 1)}
        needed |= {} if used is None else {"seqused_k": (used, 0)}
    else:
        names = ("lengths_k", "lengths_q") if kv == "Padded" else ("lengths",)
        named = zip(names, lengths, strict=False)  # a block table may follow
        needed = {name: (info, 0) for name, info in named if info is not None}
    for name, (info, more) in needed.items():
        if info is None or not _is_row(info, batch + more):
            raise ValueError(f"{name} does not fit")
    if kv == "Paged" and not _is_table(lengths[1]):
        raise ValueError("block_table does not fit")
    return batch


def _is_row(info: ArrayInfo, n: int) -> bool:
    is_contiguous = n == 1 or info.strides == (_INT32.itemsize,)
    return info.dtype == _INT32 and info.shape == (n,) and is_contiguous


def _is_table(info: ArrayInfo | None) -> bool:
    """Whether it has rows of numbers that follow each other."""
    if info is None or info.dtype != _INT32:
        return False
    batch, pages = info.shape
    rows_follow = pages == 1 or info.strides[1] == _INT32.itemsize
    return rows_follow and (batch == 1 or info.strides[0] % _INT32.itemsize == 0)


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
    if module is not np:
        check_devices({name: array}, xp)


def is_readable(array: Array) -> bool:
    """Whether kernels read lengths, offsets or a table of the device as they are."""
    follow = array.shape[-1] <= 1 or array.strides[-1] == _INT32.itemsize
    return bool(array.dtype == _INT32 and follow)


def check_lengths(name: str, lengths: np.ndarray, most: int, room: str = "") -> None:
    """Refuse lengths on the host that are negative, or more than there is room for.

    `room` says what there is room for, for the end of the message.
    """
    bad = np.flatnonzero((lengths < 0) | (lengths > most))
    if bad.size:
        i = int(bad[0])
        raise ValueError(f"{name}[{i}] is {lengths[i]}: it must be 0 to {most}{room}")


def parse_offsets(
    arrays: Mapping[str, Array | None], totals: Mapping[str, int], xp: ModuleType
) -> tuple[int, dict[str, Array | None]]:
    """Check where sequences begin and how many of their keys are in use.

    Parameters
    ----------
    arrays : mapping
        ``cu_seqlens_q``, ``cu_seqlens_k`` and ``seqused_k``; the last one may be None.
    totals : mapping
        Numbers of rows, by the names of the first two.
    xp : module
        The module that q belongs to.

    Returns
    -------
    int
        How many sequences there are.
    dict
        The arrays, as int32 if they are on the host.

    Raises
    ------
    TypeError, ValueError
        For other kinds, dtypes and shapes; and on the host, for offsets that do not begin with 0,
        decrease or exceed the rows, and for lengths that are negative or beyond their sequence.
    """
    first = arrays["cu_seqlens_q"]
    module_of("cu_seqlens_q", first)
    if first is None or first.ndim != 1 or first.size < 1:
        shape = getattr(first, "shape", None)
        raise ValueError(f"cu_seqlens_q has shape {shape}, but (sequences + 1,) is needed")
    sequences = first.size - 1
    checked = dict(arrays)
    for name, array in arrays.items():
        if array is None and name not in totals:
            continue
        check_integers(name, array, (sequences + (name in totals),), xp)
        if not isinstance(array, np.ndarray):
            continue
        if name in totals:
            check_offsets(name, array, totals[name])
        else:
            _check_used(name, array, arrays["cu_seqlens_k"])
        checked[name] = np.ascontiguousarray(array, np.int32)
    return sequences, checked


def _check_used(name: str, used: np.ndarray, offsets: Array) -> None:
    """Refuse lengths on the host that are negative, or beyond sequences known on the host."""
    if not isinstance(offsets, np.ndarray):
        check_lengths(name, used, 2**31 - 1)
        return
    rows = np.diff(offsets)
    bad = np.flatnonzero((used < 0) | (used > rows))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"{name}[{i}] is {used[i]}: it must be 0 to {rows[i]}, the keys of sequence {i} in "
            "cu_seqlens_k"
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


def check_longest(name: str, most: int, offsets: Array, used: Array | None = None) -> None:
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
