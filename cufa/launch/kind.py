"""What calls of a kind have in common, and how those of new shapes are made ready.

The calls of a kind have dtype, head dims, options and device in common, but no lengths. What
depends on shapes and strides is patched in, and the last of it is remembered. Addresses are given
to each launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from cufa.arrays import ALIGNMENT, extent, overlaps_itself, readable, whole_chunks
from cufa.compiler import jit
from cufa.device import Device
from cufa.kernel import ELEMENT_BYTES
from cufa.launch.counters import is_capturing
from cufa.launch.launch import Launch, Loaded
from cufa.planner.plan import KEY_STEP, Plan
from cufa.problem import Problem
from cufa.variant import Variant

_CALLS = 128  # of a kind that are remembered

Key = tuple[Any, ...]
_Ints = tuple[int, ...]
_Given = tuple[_Ints, _Ints, bool] | None  # of `out`: shape, strides, whether it is aligned
_T = TypeVar("_T")

_lock = threading.Lock()


def remember(memory: dict[Key, _T], key: Key, value: _T, limit: int) -> _T:
    """Put a value into a memory, unless there is one; from a full memory the oldest goes."""
    with _lock:
        found = memory.setdefault(key, value)
        while len(memory) > limit:
            del memory[next(iter(memory))]
        return found


class Call(NamedTuple):
    """A call that is ready: what those of the same shapes and strides have in common.

    Attributes
    ----------
    launch : Launch
    shape, lse_shape : tuple of int
        Of the result.
    needs_memory : bool
        For copies, or as a workspace.
    copies : tuple of str
        Which of q, k, v and out the kernel does not take as they are.
    extents : tuple
        Where out, q, k and v begin and end, counted from their addresses; empty without an out.
    """

    launch: Launch
    shape: _Ints
    lse_shape: _Ints
    needs_memory: bool
    copies: tuple[str, ...]
    extents: tuple[tuple[int, int], ...]

    def is_apart(self, out: int, *inputs: int) -> bool:
        """Whether an output at this address ends before each input, or begins after it."""
        low, high = self.extents[0][0] + out, self.extents[0][1] + out
        for (first, end), address in zip(self.extents[1:], inputs, strict=True):
            if address + first < high and low < address + end:
                return False
        return True


class Kind:
    """Calls that differ in nothing but lengths, numbers of heads, strides and addresses.

    Parameters
    ----------
    problem : Problem
        Of one of them.
    layout : str
    device : Device
    device_id : int
        The current device.
    planned : callable
        Returns the plan of such a problem.

    Attributes
    ----------
    problem : Problem
    layout : str
    calls : dict
        Those that are ready, the oldest first.
    """

    def __init__(
        self,
        problem: Problem,
        layout: str,
        device: Device,
        device_id: int,
        planned: Callable[[Problem], Plan],
    ) -> None:
        self.problem = problem
        self.layout = layout
        self.calls: dict[Key, Call] = {}
        self._itemsize = ELEMENT_BYTES[problem.dtype]
        self._device, self._device_id = device, device_id
        self._planned = planned
        self._loaded: dict[Variant, Loaded] = {}
        self._latest: tuple[Key, Problem, Plan, Call] | None = None

    def ready(self, key: Key, address: int) -> Call | None:
        """Make a call ready; None if it is empty, or illegal: then `parse` says why.

        Parameters
        ----------
        key : tuple
            Shape and strides of q, of k and of v; whether each is aligned; and shape, strides and
            alignment of `out`, or None.
        address : int
            Of q.
        """
        address &= -ALIGNMENT  # that of an array which may be copied
        return self._with_other_keys(key, address) or self._made(key, address)

    def _with_other_keys(self, key: Key, address: int) -> Call | None:
        """Make the latest call ready for another number of keys, as of a cache that grows.

        Nothing else may differ, not even the plan. That strides are legal is known where there was
        more than one key.
        """
        if self._latest is None:
            return None
        q_shape, q_strides, k_shape, k_strides, v_shape, v_strides, aligned, given = key
        latest, problem, plan, call = self._latest
        if not (
            q_shape == latest[0]
            and k_strides == latest[3]
            and v_strides == latest[5]
            and q_strides == latest[1]
            and aligned == latest[6]
            and given is latest[7] is None
            and not call.needs_memory
        ):
            return None
        axis = 1 if self.layout == "bshd" and len(k_shape) == 4 else len(k_shape) - 2
        keys, latest_k, latest_v = k_shape[axis], latest[2], latest[4]
        if (*latest_k[:axis], keys, *latest_k[axis + 1 :]) != k_shape:
            return None
        if (*latest_v[:axis], keys, *latest_v[axis + 1 :]) != v_shape:
            return None
        if keys < 2 or problem.seq_kv < 2:
            return None
        if problem.causal or (keys - 1) // KEY_STEP != (problem.seq_kv - 1) // KEY_STEP:
            problem = problem._replace(seq_kv=keys)
            if self._planned(problem) != plan:
                return None
        call = Call(call.launch.with_keys(keys, address), *call[1:])
        self._latest = key, problem, plan, call
        return remember(self.calls, key, call, _CALLS)

    def _made(self, key: Key, address: int) -> Call | None:
        q_shape, q_strides, k_shape, k_strides, v_shape, v_strides, aligned, given = key
        if not 2 <= len(q_shape) == len(k_shape) == len(v_shape) <= 4:
            return None
        q, of_q = self._bhsd(q_shape, q_strides)
        k, of_k = self._bhsd(k_shape, k_strides)
        v, of_v = self._bhsd(v_shape, v_strides)
        batch, heads_q, seq_q, head_dim = q
        _, heads_kv, seq_kv, head_dim_v = v
        if k != (batch, heads_kv, seq_kv, head_dim) or v[0] != batch:
            return None
        if not (batch and heads_q and seq_q and heads_kv) or heads_q % heads_kv:
            return None
        shape = (*q_shape[:-1], head_dim_v)
        if given is not None and given[0] != shape:
            return None
        dtype, _, _, _, _, _, _, _, causal, scale = self.problem
        sizes = (batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v)
        # The kernels fold a positive scale into the exponent.
        problem = Problem(dtype, *sizes, causal, abs(scale))
        plan = self._planned(problem)
        loaded = self._loaded.get(plan.variant) or self._load(plan.variant)

        size, tma = self._itemsize, loaded.tma
        out = (batch, heads_q, seq_q, head_dim_v)
        of_out, writable = self._result(out, given, tma)
        copies: tuple[str, ...] = ()
        if not (aligned[0] and scale >= 0 and readable(q, of_q, size, tma)):
            copies, of_q = ("q",), self._packed(q)
        if seq_kv and not (aligned[1] and readable(k, of_k, size, tma, repeats=True)):
            copies, of_k = (*copies, "k"), self._packed(k)
        if seq_kv and not (aligned[2] and readable(v, of_v, size, tma, repeats=True)):
            copies, of_v = (*copies, "v"), self._packed(v)
        if not writable:
            copies, of_out = (*copies, "out"), self._packed(out)
        if (copies or given) and not self._has_legal_strides(key):
            return None
        launch = Launch(loaded, plan, problem, (of_q, of_k, of_v, of_out), address)
        lse_shape = out[:3] if len(shape) == 4 else shape[:-1]
        needs_memory = bool(copies) or plan.workspace_floats > 0
        call = Call(launch, shape, lse_shape, needs_memory, copies, self._extents(key))
        self._latest = key, problem, plan, call
        return remember(self.calls, key, call, _CALLS)

    def _has_legal_strides(self, key: Key) -> bool:
        """Whether they are multiples of an element, and those of `out` keep its elements apart."""
        given, size = key[-1], self._itemsize
        if given is not None and overlaps_itself(given[0], given[1], size):
            return False
        arrays = [key[0:2], key[2:4], key[4:6], *([given[:2]] if given is not None else [])]
        return all(
            n <= 1 or step % size == 0
            for shape, strides in arrays
            if 0 not in shape
            for n, step in zip(shape, strides, strict=True)
        )

    def _extents(self, key: Key) -> tuple[tuple[int, int], ...]:
        given = key[-1]
        if given is None:
            return ()
        arrays = (given[:2], key[0:2], key[2:4], key[4:6])
        return tuple(extent(shape, strides, self._itemsize) for shape, strides in arrays)

    def _bhsd(self, shape: _Ints, strides: _Ints) -> tuple[_Ints, _Ints]:
        """Return shape and strides with the axes (batch, heads, seq, head_dim)."""
        if len(shape) == 4:
            if self.layout == "bhsd":
                return shape, strides
            (b, s, h, d), (of_b, of_s, of_h, of_d) = shape, strides
            return (b, h, s, d), (of_b, of_h, of_s, of_d)
        # Missing axes have length 1, and any stride.
        missing = 4 - len(shape)
        if missing == 1:
            return (shape[0], 1, *shape[1:]), (strides[0], ALIGNMENT, *strides[1:])
        return (1, 1, *shape), (ALIGNMENT, ALIGNMENT, *strides)

    def _result(self, shape: _Ints, given: _Given, tma: bool) -> tuple[_Ints, bool]:
        """Return the strides of the result, and whether a kernel writes it as it is."""
        size = self._itemsize
        if given is not None:
            _, strides = self._bhsd(*given[:2])
            if tma:
                return strides, given[2] and readable(shape, strides, size, tma)
            return strides, strides[3] == size or shape[3] == 1
        _, heads, seq, head_dim = shape
        row = head_dim * size
        steps = (seq * row, row) if self.layout == "bhsd" else (row, heads * row)
        return (heads * seq * row, *steps, size), not tma or row % ALIGNMENT == 0

    def _packed(self, shape: _Ints) -> _Ints:
        """Return the strides of a copy, as `copied` and `padded` make it."""
        _, heads, seq, head_dim = shape
        row = whole_chunks(head_dim, self._itemsize) * self._itemsize
        return heads * seq * row, seq * row, row, self._itemsize

    def _load(self, variant: Variant) -> Loaded:
        function = jit.kernel(variant, self._device, self._device_id)
        loaded = Loaded(variant, function, self._device_id)
        if loaded.counters is not None and not is_capturing():
            loaded.counters.reserve()
        return self._loaded.setdefault(variant, loaded)
