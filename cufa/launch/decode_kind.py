"""What calls of `decode` of a kind have in common, and how those of new shapes are made ready."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cufa.arrays import Array, whole_chunks
from cufa.beside import placed
from cufa.decode_problem import MAX_KEYS, DecodeProblem
from cufa.device import Device
from cufa.launch.counters import is_capturing
from cufa.launch.kind import Call, Described, Key, Kind
from cufa.launch.params import Ints
from cufa.planner.decode import DecodePlan

_INT32 = np.dtype(np.int32)
_SIZES = DecodeProblem._fields.index("causal")  # before it, the dtype and sizes


class DecodeKind(Kind):
    """Calls that differ in nothing but sizes, strides and addresses; see `Kind`.

    Beside their arrays are the lengths and the block table, each int32 on the device, or None; and
    then those of `cufa.score.ARRAYS`, if there is any.

    Parameters
    ----------
    problem, layout, device, device_id, planned
        As of `Kind`.
    padded : bool
        Whether zeros follow the rows of the caches, up to whole chunks of `ALIGNMENT` bytes.
    """

    names = ("q", "k_cache", "v_cache", "out")
    _keys = "capacity"

    def __init__(
        self,
        problem: DecodeProblem,
        layout: str,
        device: Device,
        device_id: int,
        planned: Callable[[DecodeProblem], DecodePlan],
        padded: bool,
    ) -> None:
        super().__init__(problem, layout, device, device_id, planned)
        self._padded = padded
        # A window may hide keys of longer caches only.
        self._uneven = self._uneven or problem.left is not None

    def _as_read(self, name: str, shape: Ints) -> Ints:
        if not self._padded or name == "q":
            return shape
        return (*shape[:3], whole_chunks(shape[3], self._itemsize))

    def _described(self, key: Key) -> Described | None:
        q_shape, q_strides, k_shape, k_strides, v_shape, v_strides, _, _, beside = key
        if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
            return None
        q, of_q = self._bhsd(q_shape, q_strides)
        k, of_k = self._bhsd(k_shape, k_strides)
        v, of_v = self._bhsd(v_shape, v_strides)
        batch, heads_q, seq_q, head_dim = q
        blocks, heads_kv, keys, head_dim_v = v
        if k != (blocks, heads_kv, keys, head_dim):
            return None
        lengths, table, *arrays = beside
        if any(of is not None and of[2] != _INT32 for of in (lengths, table)):
            return None
        if lengths is not None and not (
            lengths[0] == (batch,) and (batch == 1 or lengths[1] == (_INT32.itemsize,))
        ):
            return None
        pages = page_size = table_stride = 0
        capacity = keys
        if table is not None:
            shape, strides, _ = table
            if not _is_table(shape, strides, batch):
                return None
            pages, page_size, capacity = blocks, keys, shape[1] * keys
            table_stride = strides[0]
        elif blocks != batch:
            return None
        if not (blocks and heads_q and seq_q and heads_kv and 0 < capacity <= MAX_KEYS and batch):
            return None
        if heads_q % heads_kv:
            return None
        causal, scale, *rest = self.problem[_SIZES:]
        problem = DecodeProblem(
            self.problem.dtype,
            batch,
            heads_q,
            heads_kv,
            seq_q,
            capacity,
            pages,
            page_size,
            head_dim,
            head_dim_v,
            causal,
            abs(scale),
            *rest,
        )
        steps = placed(problem.reads, 4, problem.sizes, arrays)
        if steps is None:
            return None
        shapes = (q, k, v, (batch, heads_q, seq_q, head_dim_v))
        return problem, shapes, (of_q, of_k, of_v), (table_stride, steps)

    def _with_other_keys(self, key: Key, address: int) -> Call | None:
        table = key[8][1]
        return None if table else super()._with_other_keys(key, address)  # keys are those of a page


def on_device(name: str, array: Array | None) -> Array | None:
    """Return lengths or a block table where kernels read them: an int32 copy of one on the host."""
    if not isinstance(array, np.ndarray):
        return array
    if is_capturing():
        raise ValueError(
            f"{name} (shape {array.shape}) is on the host and would be copied, for which a call "
            "that is captured into a CUDA graph has no place"
        )
    import cupy

    return cupy.asarray(np.ascontiguousarray(array, np.int32))


def _is_table(shape: Ints, strides: Ints, batch: int) -> bool:
    """Whether it has a row for each sequence, of numbers that follow each other."""
    if len(shape) != 2 or shape[0] != batch:
        return False
    rows_follow = shape[1] == 1 or strides[1] == _INT32.itemsize
    return rows_follow and (batch == 1 or strides[0] % _INT32.itemsize == 0)
