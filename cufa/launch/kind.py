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
from cufa.beside import placed
from cufa.compiler import jit
from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.launch import counters
from cufa.launch.counters import is_capturing
from cufa.launch.decode_launch import DecodeLaunch, LoadedDecode
from cufa.launch.launch import Launch, Loaded
from cufa.launch.params import FourInts, Ints
from cufa.lengths import arrays_of_lengths, of_lengths
from cufa.planner.rules import KEY_STEP
from cufa.problem import Problem
from cufa.score import ARRAYS, BLOCKS, is_uneven, part_named
from cufa.specs import KERNELS
from cufa.variant import Variant

_CALLS = 128  # of a kind that are remembered
_SEEN = 1024  # of which it is known that there was such a call

Key = tuple[Any, ...]
Described = tuple[Any, FourInts, FourInts, tuple[Any, ...]]
"""A problem; 4-D (batch, heads, seq, head_dim) shapes of q, k, v and the result; the strides of the
first three; and what a launch is to know of the arrays beside them."""

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
    launch : Launch or DecodeLaunch
    shape, lse_shape : tuple of int
        Of the result.
    needs_memory : bool
        For copies, or as a workspace.
    copies : tuple of str
        Which of q, k, v and out the kernel does not take as they are, see `Kind.names`.
    extents : tuple
        Where out, q, k, v and what is beside them begin and end, counted from their addresses;
        empty without an out.
    """

    launch: Launch | DecodeLaunch
    shape: Ints
    lse_shape: Ints
    needs_memory: bool
    copies: tuple[str, ...]
    extents: tuple[tuple[int, int], ...]

    def is_apart(self, out: int, *inputs: int) -> bool:
        """Whether an output at this address ends before each input, or begins after it."""
        low, high = self.extents[0][0] + out, self.extents[0][1] + out
        for (first, end), address in zip(self.extents[1:], inputs, strict=True):
            if first < end and address + first < high and low < address + end:
                return False
        return True


class Kind:
    """Calls that differ in nothing but lengths, numbers of heads, strides and addresses.

    Parameters
    ----------
    problem : Problem or DecodeProblem
        Of one of them.
    layout : str
    device : Device
    device_id : int
        The current device.
    planned : callable
        Returns the plan of such a problem.
    otherwise : callable, optional
        Returns the plan for a captured launch that has not the memory which blocks would share.

    Attributes
    ----------
    names : tuple of str
        Of the user's arrays that are q, k, v and out.
    problem : Problem or DecodeProblem
    layout : str
    has_seed : bool
        Whether a seed comes last of what is beside the arrays.
    calls : dict
        Those that came twice and are ready, the oldest first.
    latest : tuple
        The key of the latest one that has been made ready, and the call.
    """

    names = ("q", "k", "v", "out")
    _keys = "seq_kv"  # of a problem: how many keys there are

    def __init__(
        self,
        problem: Any,
        layout: str,
        device: Device,
        device_id: int,
        planned: Callable[[Any], Any],
        otherwise: Callable[[Any], Any] | None = None,
    ) -> None:
        self.problem = problem
        self.layout = layout
        self.calls: dict[Key, Call] = {}
        self.latest: tuple[Key, Call | None] = (), None
        self._seen: set[int] = set()
        self._itemsize = size = DTYPES[problem.dtype].bytes
        # Else some array is copied, and so is q where the scale is negative.
        whole = problem.head_dim * size % ALIGNMENT == problem.head_dim_v * size % ALIGNMENT == 0
        self._may_be_plain = whole and problem.scale >= 0
        self._uneven = is_uneven(problem.score)
        self._pairs = [name for name in problem.reads if "k" in part_named(name).axes]
        self.has_seed = "Dropout" in problem.score
        self._device, self._device_id = device, device_id
        self._planned, self._otherwise = planned, otherwise
        self._loaded: dict[Variant, Loaded | LoadedDecode] = {}
        self._example: tuple[Key, Any, Call] | None = None

    def ready(self, key: Key, address: int) -> Call | None:
        """Make a call ready; None if it is empty, or illegal: then `parse` says why.

        Parameters
        ----------
        key : tuple
            Shape and strides of q, of k and of v; whether each is aligned; shape, strides and
            alignment of `out`, or None; and shape, strides and dtype of each array beside them, if
            there is any.
        address : int
            Of q.
        """
        address &= -ALIGNMENT  # that of an array which may be copied
        call = self._with_other_keys(key, address)
        if call is None:
            made = self._made(key, address, self._planned)
            if made is None:
                return None
            problem, call = made
            self._example = key, problem, call
        # Lengths that do not come again are not kept.
        number = hash(key)
        if number in self._seen:
            remember(self.calls, key, call, _CALLS)
        else:
            if len(self._seen) >= _SEEN:
                self._seen.clear()
            self._seen.add(number)
        self.latest = key, call
        return call

    def alone(self, key: Key, address: int) -> Call | None:
        """Make a call ready whose blocks share no memory; None if there is no other way.

        Parameters
        ----------
        key, address
            As of `ready`.
        """
        made = self._otherwise and self._made(key, address, self._otherwise)
        return made[1] if made else None

    def _with_other_keys(self, key: Key, address: int) -> Call | None:
        """Make the latest call ready for another number of keys, as of a cache that grows.

        Nothing else may differ, not even the plan. That strides are legal is known where there was
        more than one key.
        """
        example = self._example  # other threads may replace it
        if example is None or example[0][0] != key[0] or BLOCKS in self.problem.reads:
            return None
        _, q_strides, k_shape, k_strides, v_shape, v_strides, aligned, given, beside = key
        latest, problem, call = example
        if not (
            k_strides == latest[3]
            and v_strides == latest[5]
            and q_strides == latest[1]
            and aligned == latest[6]
            and given is latest[7] is None
            and beside == latest[8]
            and not call.needs_memory
        ):
            return None
        axis = 1 if self.layout == "bshd" and len(k_shape) == 4 else len(k_shape) - 2
        keys, latest_k, latest_v = k_shape[axis], latest[2], latest[4]
        if (*latest_k[:axis], keys, *latest_k[axis + 1 :]) != k_shape:
            return None
        if (*latest_v[:axis], keys, *latest_v[axis + 1 :]) != v_shape:
            return None
        before = getattr(problem, self._keys)
        if keys < 2 or before < 2:
            return None
        if self._pairs:  # arrays that are as before may not fit other keys
            sizes = problem._replace(**{self._keys: keys}).sizes
            if placed(self._pairs, len(key[0]), sizes, beside) is None:
                return None
        if self._uneven or (keys - 1) // KEY_STEP != (before - 1) // KEY_STEP:
            problem = problem._replace(**{self._keys: keys})
            if self._planned(problem) != call.launch.plan:
                return None
        call = Call(call.launch.with_keys(keys, address), *call[1:])
        self._example = key, problem, call
        return call

    def _made(
        self, key: Key, address: int, planned: Callable[[Any], Any]
    ) -> tuple[Any, Call] | None:
        found = self._described(key)
        if found is None:
            return None
        problem, shapes, (of_q, of_k, of_v), beside = found
        q_shape, aligned, given = key[0], key[6], key[7]
        out = shapes[3]
        shape = (*q_shape[:-1], out[3])
        if given is not None and given[0] != shape:
            return None
        plan = planned(problem)
        loaded = self._loaded.get(plan.variant) or self._load(plan.variant)

        strides: FourInts = (of_q, of_k, of_v, self._of_result(out))
        copies: tuple[str, ...] = ()
        if given is not None or not self._is_plain(aligned, strides, loaded.tma):
            if not self._has_legal_strides(key):
                return None
            strides, copies = self._taken(key, shapes, strides, loaded.tma)
        if plan.variant.kv == "Varlen":  # the tiles' sequences are not along this axis
            strides = tuple((0, *steps[1:]) for steps in strides)
        launch = loaded.ready(plan, problem, shapes, strides, address, beside)
        lse_shape = out[:3] if len(shape) == 4 else shape[:-1]
        needs_memory = bool(copies) or launch.workspace_floats > 0
        call = Call(launch, shape, lse_shape, needs_memory, copies, self._extents(key))
        return problem, call

    def _described(self, key: Key) -> Described | None:
        """Return what a key stands for; None if that is empty, or illegal."""
        q, of_q, k, of_k, v, of_v, *_ = key
        if not 2 <= len(q) == len(k) == len(v) <= 4:
            return None
        if len(q) < 4 or self.layout != "bhsd":
            q, of_q = self._bhsd(q, of_q)
            k, of_k = self._bhsd(k, of_k)
            v, of_v = self._bhsd(v, of_v)
        batch, heads_q, seq_q, head_dim = q
        _, heads_kv, seq_kv, head_dim_v = v
        if k != (batch, heads_kv, seq_kv, head_dim) or v[0] != batch:
            return None
        if not (batch and heads_q and seq_q and heads_kv) or heads_q % heads_kv:
            return None
        dtype, _, _, _, _, _, _, _, causal, scale, *rest = self.problem
        problem = Problem(
            dtype,
            batch,
            heads_q,
            heads_kv,
            seq_q,
            seq_kv,
            head_dim,
            head_dim_v,
            causal,
            abs(scale),  # the kernels fold a positive scale into the exponent
            *rest,
        )
        if problem.kv != "Dense":
            sequences = of_lengths(problem, key[8][len(ARRAYS) :])
            if sequences is None:
                return None
            problem = problem._replace(sequences=sequences)
        lying = (*key[8][: len(ARRAYS)], *key[8][len(ARRAYS) + arrays_of_lengths(problem.kv) :])
        beside = placed(problem.reads, len(key[0]), problem.sizes, lying)
        if beside is None:
            return None
        shapes = (q, k, v, (batch, heads_q, seq_q, head_dim_v))
        return problem, shapes, (of_q, of_k, of_v), beside

    def _is_plain(self, aligned: tuple[bool, ...], strides: FourInts, tma: bool) -> bool:
        """Whether the kernel takes all arrays as they are, as far as can be seen at a glance."""
        (q0, q1, q2, q3), (k0, k1, k2, k3), (v0, v1, v2, v3), _ = strides
        return (
            self._may_be_plain
            and aligned[0]
            and aligned[1]
            and aligned[2]
            and q3 == k3 == v3 == self._itemsize
            and (q0 | q1 | q2 | k0 | k1 | k2 | v0 | v1 | v2) % ALIGNMENT == 0
            and (not tma or min(q0, q1, q2, k0, k1, k2, v0, v1, v2) > 0)
        )

    def _taken(
        self, key: Key, shapes: FourInts, strides: FourInts, tma: bool
    ) -> tuple[FourInts, tuple[str, ...]]:
        """Return the strides of the arrays that the kernel finds, and which of them are copies."""
        aligned, given = key[6], key[7]
        found, copies = [], []
        for i, name in enumerate(self.names[:3]):
            shape, own, repeats = shapes[i], strides[i], name != "q"
            read = self._as_read(name, shape)
            taken = aligned[i] and readable(read, own, self._itemsize, tma, repeats)
            if 0 not in shape and not (taken and (repeats or self.problem.scale >= 0)):
                copies.append(name)
                own = self._packed(shape)
            found.append(own)
        out, own, direct = shapes[3], strides[3], True
        if given is not None:
            _, own = self._bhsd(given[0], given[1])
            direct = given[2]
        if tma:
            direct = direct and readable(out, own, self._itemsize, tma)
        else:
            direct = own[3] == self._itemsize or out[3] == 1
        if not direct:
            copies.append("out")
            own = self._packed(out)
        return (*found, own), tuple(copies)

    def _as_read(self, name: str, shape: Ints) -> Ints:
        """Return the shape that an array has for the kernel, which reads whole chunks."""
        return shape

    def _has_legal_strides(self, key: Key) -> bool:
        """Whether they are multiples of an element, and those of `out` keep its elements apart."""
        given, size = key[7], self._itemsize
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
        given = key[7]
        if given is None:
            return ()
        arrays = (given[:2], key[0:2], key[2:4], key[4:6])
        found = [extent(shape, strides, self._itemsize) for shape, strides in arrays]
        for lying in key[8]:
            array = lying is not None and len(lying) == 3  # a `BlockMask` has four
            found.append(extent(lying[0], lying[1], lying[2].itemsize) if array else (0, 0))
        return tuple(found)

    def _bhsd(self, shape: Ints, strides: Ints) -> tuple[Ints, Ints]:
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

    def _of_result(self, shape: Ints) -> Ints:
        """Return the strides of a result that is made here."""
        _, heads, seq, head_dim = shape
        row = head_dim * self._itemsize
        if self.layout == "bhsd":
            return heads * seq * row, seq * row, row, self._itemsize
        return heads * seq * row, row, heads * row, self._itemsize

    def _packed(self, shape: Ints) -> Ints:
        """Return the strides of a copy, as `copied` and `padded` make it."""
        _, heads, seq, head_dim = shape
        row = whole_chunks(head_dim, self._itemsize) * self._itemsize
        return heads * seq * row, seq * row, row, self._itemsize

    def _load(self, variant: Variant) -> Loaded | LoadedDecode:
        function = jit.kernel(variant, self._device, self._device_id)
        of = LoadedDecode if KERNELS[variant.kernel].decodes else Loaded
        loaded: Loaded | LoadedDecode = of(variant, function, self._device_id)
        if not is_capturing():
            loaded.reserve()
            if self._otherwise is not None:  # what may be captured instead needs counters
                counters.of_device(self._device_id).reserve()
        return self._loaded.setdefault(variant, loaded)
