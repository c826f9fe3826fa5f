"""Signature -> prepared call: what calls of a kind share, and launches for those of new shapes.

The calls of a kind have dtype, head dims, options and device in common, but no lengths. Addresses
are given to each launch.
"""

from __future__ import annotations

from typing import NamedTuple

from cufa.arrays import (
    ALIGNMENT,
    ArrayInfo,
    Ints,
    extent,
    overlaps_itself,
    readable,
    whole_chunks,
)
from cufa.compiler import jit
from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.user_functions import Blocks
from cufa.launch import counters
from cufa.launch.counters import is_capturing
from cufa.launch.launch import Launch
from cufa.launch.loaded import Loaded
from cufa.launch.params import FourInts
from cufa.launch.signature import Key, Out, Signature, remember
from cufa.planner.attention import Planner
from cufa.planner.plan import TiledPlanner
from cufa.problem.extras import NO_EXTRAS, Extras, placed
from cufa.problem.lengths import of_lengths
from cufa.problem.problem import CACHES, Problem, check_shapes
from cufa.specs.variant import Variant

_CALLS = 128  # of a kind that are remembered
_SEEN = 1024  # of which it is known that there was such a call


class PreparedCall(NamedTuple):
    """The state that the calls of a signature share.

    Attributes
    ----------
    launches : tuple of Launch
        One after the other. Each is given the addresses of q, k, v, the result and its LSE, and
        those of `Extras.flat` and the seed, or that of the workspace.
    variant : Variant
        Variant of the kernel that visits the tiles.
    shape, lse_shape : tuple of int
        Shapes of the result and its log-sum-exp.
    needs_memory : bool
        For copies, or as a workspace.
    workspace_floats : int
        float32 numbers that each call gives memory for.
    copies : tuple of str
        Which of q, k, v and out the kernel does not take as they are, see `Kind.names`.
    extents : tuple
        Where out, q, k, v and extras begin and end, counted from their addresses; empty without an
        out.
    """

    launches: tuple[Launch, ...]
    variant: Variant
    shape: Ints
    lse_shape: Ints
    needs_memory: bool
    workspace_floats: int
    copies: tuple[str, ...]
    extents: tuple[tuple[int, int], ...]

    def is_apart(self, out: int, *inputs: int) -> bool:
        """Whether an output at this address ends before each input, or begins after it."""
        low, high = self.extents[0][0] + out, self.extents[0][1] + out
        for (first, end), address in zip(self.extents[1:], inputs, strict=True):
            if first < end and address + first < high and low < address + end:
                return False
        return True


class _Views(NamedTuple):
    """Shapes and strides of q, k, v and the result as (batch, heads, seq, head_dim) arrays."""

    shapes: FourInts
    strides: FourInts


class Kind:
    """Calls that differ in nothing but sizes, strides and addresses.

    Parameters
    ----------
    problem : Problem
        The problem of one of them.
    layout : str
    device : Device
    device_id : int
        The current device.
    planner : Planner
    extras : Extras
        Those of one of them.
    padded : bool
        Whether zeros follow the rows of K and V, up to whole chunks of `ALIGNMENT` bytes.

    Attributes
    ----------
    names : tuple of str
        Names of the user's arrays that are q, k, v and out.
    problem : Problem
    layout : str
    has_block_mask : bool
        Whether a `cufa.BlockMask` says which tiles are visited.
    calls : dict
        Those that came twice and are prepared, the oldest first.
    latest : tuple
        The key of the latest one that has been prepared, and the call.
    """

    def __init__(
        self,
        problem: Problem,
        layout: str,
        device: Device,
        device_id: int,
        planner: Planner,
        extras: Extras,
        padded: bool = False,
    ) -> None:
        cached = problem.kv in CACHES
        self.names = ("q", "k_cache", "v_cache", "out") if cached else ("q", "k", "v", "out")
        self.problem = problem
        self.layout = layout
        self.calls: dict[Key, PreparedCall] = {}
        self.latest: tuple[Key, PreparedCall | None] = (), None
        self._seen: set[int] = set()
        self._itemsize = size = DTYPES[problem.dtype].bytes
        # Else some array is copied, and so is q where the scale is negative.
        whole = problem.head_dim * size % ALIGNMENT == problem.head_dim_v * size % ALIGNMENT == 0
        self._may_be_plain = whole and problem.scale >= 0
        self._positive = problem._replace(scale=abs(problem.scale))  # as the kernels take it
        self._extras = extras.described((None,) * len(extras.flat))  # keeps no array alive
        self._padded = padded
        self.has_block_mask = problem.of(Blocks) is not None
        self._device, self._device_id = device, device_id
        self._planner = planner
        self._loaded: dict[Variant, Loaded] = {}

    def prepare(self, key: Key, address: int) -> PreparedCall | None:
        """Prepare a call; None if it is empty.

        Parameters
        ----------
        key : tuple
            As in `Signature`.
        address : int
            Address of q.

        Raises
        ------
        ValueError
            The call is illegal.
        """
        call = self._prepared(Signature.of(key), address, self._planner)
        if call is None:
            return None
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

    def alone(self, key: Key, address: int) -> PreparedCall | None:
        """Prepare a call whose blocks share no memory; None if there is no other way.

        Parameters
        ----------
        key, address
            As in `prepare`.
        """
        otherwise = self._planner.otherwise
        return None if otherwise is None else self._prepared(Signature.of(key), address, otherwise)

    def _prepared(
        self, signature: Signature, address: int, planner: Planner | TiledPlanner
    ) -> PreparedCall | None:
        views = self._views(signature)
        extras = self._extras.described(signature.extras) if signature.extras else NO_EXTRAS
        problem = self._problem(views, extras)
        if problem is None:
            return None
        out = views.shapes[3]
        shape = (*signature.q_shape[:-1], out[3])
        if signature.out is not None and signature.out.shape != shape:
            raise ValueError(f"out has shape {signature.out.shape}, but {shape} is needed")
        numbers: tuple[Ints, ...] = ()
        reads = problem.reads
        if reads:
            numbers = placed(reads, len(signature.q_shape), problem.sizes, extras)
        plan = planner(problem)
        variant = plan.variant
        loaded = self._loaded.get(variant) or self._load(variant)

        strides = views.strides
        copies: tuple[str, ...] = ()
        if signature.out is not None or not self._is_plain(signature.aligned, strides, loaded.tma):
            self._check_strides(signature)
            strides, copies = self._taken(signature, views, loaded.tma)
        if problem.kv == "Varlen":  # the tiles' sequences are not along this axis
            strides = tuple((0, *steps[1:]) for steps in strides)
        address &= -ALIGNMENT  # that of an array which may be copied
        launch = loaded.launch(plan, problem, views.shapes, strides, address, numbers, extras)
        floats = plan.workspace_floats
        return PreparedCall(
            (launch,),
            variant,
            shape,
            out[:3] if len(shape) == 4 else shape[:-1],
            bool(copies) or floats > 0,
            floats,
            copies,
            () if signature.out is None else self._extents(signature, signature.out, extras),
        )

    def _views(self, signature: Signature) -> _Views:
        """Return the arrays as the kernels see them, with a result that is made here."""
        s = signature
        if not 2 <= len(s.q_shape) == len(s.k_shape) == len(s.v_shape) <= 4:
            raise ValueError("q, k and v need as many axes: 2, 3 or 4")
        q, of_q = self._bhsd(s.q_shape, s.q_strides)
        k, of_k = self._bhsd(s.k_shape, s.k_strides)
        v, of_v = self._bhsd(s.v_shape, s.v_strides)
        batch, heads, seq, _ = q
        out = batch, heads, seq, v[3]
        return _Views((q, k, v, out), (of_q, of_k, of_v, self._of_result(out)))

    def _problem(self, views: _Views, extras: Extras) -> Problem | None:
        """Return the problem of such arrays; None if it is empty."""
        q, k, v, _ = views.shapes
        kv, table = self.problem.kv, extras.table
        keys = check_shapes(kv, q, k, v, (), () if table is None else table.shape)
        batch, heads_q, seq_q, _ = q
        blocks, heads_kv, page_size, _ = v
        if 0 in (batch, heads_q, seq_q, heads_kv) or (kv in CACHES and 0 in (blocks, keys)):
            return None
        problem = self._positive.sized(batch, heads_q, heads_kv, seq_q, keys)
        if kv == "Dense":
            return problem
        sequences = of_lengths(kv, batch, extras.lengths)
        if kv == "Varlen":
            return problem._replace(sequences=sequences)
        return problem._replace(pages=blocks, page_size=page_size) if kv == "Paged" else problem

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
        self, signature: Signature, views: _Views, tma: bool
    ) -> tuple[FourInts, tuple[str, ...]]:
        """Return the strides of the arrays that the kernel finds, and which of them are copies."""
        found, copies = [], []
        for i, name in enumerate(self.names[:3]):
            shape, own, repeats = views.shapes[i], views.strides[i], name != "q"
            read = shape
            if self._padded and repeats:
                read = (*shape[:3], whole_chunks(shape[3], self._itemsize))
            taken = signature.aligned[i] and readable(read, own, self._itemsize, tma, repeats)
            if 0 not in shape and not (taken and (repeats or self.problem.scale >= 0)):
                copies.append(name)
                own = self._packed(shape)
            found.append(own)
        out, own, direct = views.shapes[3], views.strides[3], True
        if signature.out is not None:
            _, own = self._bhsd(signature.out.shape, signature.out.strides)
            direct = signature.out.is_aligned
        if tma:
            direct = direct and readable(out, own, self._itemsize, tma)
        else:
            direct = own[3] == self._itemsize or out[3] == 1
        if not direct:
            copies.append("out")
            own = self._packed(out)
        return (*found, own), tuple(copies)

    def _check_strides(self, signature: Signature) -> None:
        """See that they are multiples of an element, and those of `out` keep its elements apart."""
        s, size = signature, self._itemsize
        arrays = [(s.q_shape, s.q_strides), (s.k_shape, s.k_strides), (s.v_shape, s.v_strides)]
        if s.out is not None:
            arrays.append((s.out.shape, s.out.strides))
            if overlaps_itself(s.out.shape, s.out.strides, size):
                raise ValueError("elements of out share memory")
        for name, (shape, strides) in zip(self.names, arrays, strict=False):
            steps = (step for n, step in zip(shape, strides, strict=True) if n > 1)
            if 0 not in shape and any(step % size for step in steps):
                raise ValueError(f"{name} has strides {strides}: multiples of {size} are needed")

    def _extents(
        self, signature: Signature, out: Out, extras: Extras
    ) -> tuple[tuple[int, int], ...]:
        s = signature
        arrays = (
            (out.shape, out.strides),
            (s.q_shape, s.q_strides),
            (s.k_shape, s.k_strides),
            (s.v_shape, s.v_strides),
        )
        found = [extent(shape, strides, self._itemsize) for shape, strides in arrays]
        for info in extras.flat:
            array = isinstance(info, ArrayInfo)  # a `BlockMask` is none
            found.append(extent(info.shape, info.strides, info.dtype.itemsize) if array else (0, 0))
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

    def _load(self, variant: Variant) -> Loaded:
        function = jit.kernel(variant, self._device, self._device_id)
        loaded = Loaded(variant, function, self._device_id, self._extras)
        if not is_capturing():
            loaded.reserve()
            if self._planner.otherwise is not None:  # what may be captured instead needs counters
                counters.of_device(self._device_id).reserve()
        return self._loaded.setdefault(variant, loaded)
