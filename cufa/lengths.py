"""How long sequences are, where they differ: arrays of lengths and of offsets, and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from cufa.arrays import Array, module_of
from cufa.beside import Lying
from cufa.checks import check_devices, shown_dtype

if TYPE_CHECKING:
    from cufa.problem import Problem

_INT32 = np.dtype(np.int32)


def arrays_of_lengths(kv: str) -> int:
    """Return how many arrays say the lengths of such sequences, see `cufa.problem.Problem.kv`."""
    return {"Padded": 1, "Varlen": 3}.get(kv, 0)


def of_lengths(problem: Problem, lying: Sequence[Lying]) -> int | None:
    """Return how many sequences arrays of lengths are of; None if kernels cannot read them.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Padded" or "Varlen".
    lying : sequence
        ``lengths_k``; or ``cu_seqlens_q``, ``cu_seqlens_k`` and ``seqused_k``, which may be None.
    """
    if problem.kv == "Padded":
        return problem.batch if _is_row(lying[0], problem.batch) else None
    cu_seqlens_q, cu_seqlens_k, seqused_k = lying[:3]
    if cu_seqlens_q is None or len(cu_seqlens_q[0]) != 1:
        return None
    n = cu_seqlens_q[0][0] - 1
    if n < 1 or not (_is_row(cu_seqlens_q, n + 1) and _is_row(cu_seqlens_k, n + 1)):
        return None
    return n if seqused_k is None or _is_row(seqused_k, n) else None


def _is_row(lying: Lying, n: int) -> bool:
    if lying is None:
        return False
    shape, strides, dtype = lying
    return dtype == _INT32 and shape == (n,) and (n == 1 or strides == (_INT32.itemsize,))


def check_integers(name: str, array: Array, shape: tuple[int, ...], xp: ModuleType) -> None:
    """Check kind, dtype and shape of lengths, of offsets or of a table.

    Parameters
    ----------
    name : str
        The argument.
    array : array
        Of integers on the host, or of int32 where `xp` is.
    shape : tuple of int
        That is needed.
    xp : module
        That q belongs to.
    """
    module = module_of(name, array)
    if module is not np and xp is np:
        raise TypeError(
            f"{name} is a cupy array, but q is a numpy array: all must be on the host then"
        )
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, but {shape} is needed")
    if module is np:
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} has dtype {shown_dtype(array.dtype)}: integers are needed")
        return
    if array.dtype != np.int32:
        raise TypeError(f"{name} has dtype {shown_dtype(array.dtype)}: int32 is needed")
    check_devices({name: array}, xp)
    if array.size and shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise ValueError(
            f"{name} (shape {array.shape}, strides {array.strides}) must be contiguous "
            "along its last axis"
        )


def check_lengths(name: str, lengths: np.ndarray, most: int) -> None:
    """Refuse lengths on the host that are negative, or more than there is room for."""
    bad = np.flatnonzero((lengths < 0) | (lengths > most))
    if bad.size:
        i = int(bad[0])
        raise ValueError(f"{name}[{i}] is {lengths[i]}: it must be 0 to {most}")


def parse_offsets(
    arrays: Mapping[str, Array | None], totals: Mapping[str, int], xp: ModuleType
) -> tuple[int, dict[str, Array | None]]:
    """Check where sequences begin and how many of their keys are in use.

    Parameters
    ----------
    arrays : mapping
        ``cu_seqlens_q``, ``cu_seqlens_k`` and ``seqused_k``; the last one may be None.
    totals : mapping
        Rows that there are, by the names of the first two.
    xp : module
        That q belongs to.

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
        decrease or exceed the rows, and for negative lengths.
    """
    first = arrays["cu_seqlens_q"]
    module_of("cu_seqlens_q", first)
    if first is None or first.ndim != 1 or first.size < 2:
        shape = getattr(first, "shape", None)
        raise ValueError(f"cu_seqlens_q has shape {shape}, but (sequences + 1,) is needed")
    sequences = first.size - 1
    found = dict(arrays)
    for name, array in arrays.items():
        if array is None and name not in totals:
            continue
        check_integers(name, array, (sequences + (name in totals),), xp)
        if not isinstance(array, np.ndarray):
            continue
        if name in totals:
            _check_offsets(name, array, totals[name])
        else:
            check_lengths(name, array, 2**31 - 1)
        found[name] = np.ascontiguousarray(array, np.int32)
    return sequences, found


def _check_offsets(name: str, offsets: np.ndarray, total: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"{name}[0] is {offsets[0]}: it must be 0")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        i = int(falls[0]) + 1
        raise ValueError(f"{name}[{i}] is {offsets[i]}, less than the {offsets[i - 1]} before it")
    if offsets[-1] > total:
        raise ValueError(f"{name}[-1] is {offsets[-1]}, but there are {total} rows")
