"""Key -> prepared call: what calls of a kind share, and the launch of each new size.

The calls of a kind have dtype, head dims, options and device in common, but no lengths. Addresses
are given to each launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cufa import device as devices
from cufa.arrays import ALIGNMENT, Ints
from cufa.compiler import jit
from cufa.features.user_functions import Blocks
from cufa.launch import counters
from cufa.launch.capture import is_capturing
from cufa.launch.launch import Launch
from cufa.launch.loaded import LoadedKernel
from cufa.launch.signature import Key
from cufa.launch.views import Extent, Viewer, Views
from cufa.planner.attention import Planner
from cufa.planner.plan import Plan
from cufa.problem.extras import NO_EXTRAS, Extras, placed
from cufa.problem.lengths import of_lengths
from cufa.problem.parse import restore_shape
from cufa.problem.problem import CACHES, Problem, check_shapes
from cufa.problem.scales import scale_infos
from cufa.remembered import remember
from cufa.specs import KERNELS
from cufa.specs.variant import Variant
from cufa.tuned import user_table

_CALLS = 128  # prepared calls that a kind remembers
_SEEN = 1024  # calls that came once, of which it remembers the keys


class PreparedCall(NamedTuple):
    """The state that calls with the same key share.

    Attributes
    ----------
    launch : callable
        It is given the addresses of q, k, v, the result and its LSE, then those of `Extras.flat`
        and the seed, or else that of the workspace.
    variant : Variant
        Variant of the kernel that visits the tiles.
    shape, lse_shape : tuple of int
        Shapes of the result and its log-sum-exp.
    needs_memory : bool
        Whether the call needs memory, for copies or as a workspace.
    workspace_floats : int
        float32 numbers that each call gives memory for.
    copies : tuple of str
        Which of q, k, v and out the kernel does not take as they are, see `PreparedCalls.names`.
    extents : tuple
        Where out, q, k, v and extras begin and end, counted from their addresses; empty without an
        out.
    """

    launch: Launch
    variant: Variant
    shape: Ints
    lse_shape: Ints
    needs_memory: bool
    workspace_floats: int
    copies: tuple[str, ...]
    extents: tuple[Extent, ...]

    def is_apart(self, out: int, *inputs: int) -> bool:
        """Whether an output at this address ends before each input, or begins after it."""
        low, high = self.extents[0][0] + out, self.extents[0][1] + out
        for (first, end), address in zip(self.extents[1:], inputs, strict=True):
            if first < end and address + first < high and low < address + end:
                return False
        return True


class PreparedCalls:
    """Calls of a kind: those that differ in nothing but sizes, strides and addresses.

    Parameters
    ----------
    problem : Problem
        The problem of one of them, with its arrays on the current device.
    layout : str
    extras : Extras
        The extras of one of them.
    kernel, batch_invariant, num_splits
        As in `cufa.planner.attention.Planner`.
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
        Calls that came twice and are prepared, the oldest first.

    Raises
    ------
    TypeError, ValueError
        As `Planner`.
    """

    def __init__(
        self,
        problem: Problem,
        layout: str,
        extras: Extras,
        kernel: str | Variant | None = None,
        *,
        batch_invariant: bool = False,
        num_splits: int | None = None,
        padded: bool = False,
    ) -> None:
        import cupy

        self.problem = problem
        self.layout = layout
        self.calls: dict[Key, PreparedCall] = {}
        self._seen: set[int] = set()
        self._viewer = Viewer(problem, layout, padded)
        self.names = self._viewer.names
        self._may_be_plain = problem.kv == "Dense" and layout == "bhsd"
        self._positive = problem._replace(scale=abs(problem.scale))  # as the kernels take it
        self._extras = extras.described((None,) * len(extras.flat))  # keeps no array alive
        self._reads = problem.reads  # the same for all lengths
        self.has_block_mask = problem.of(Blocks) is not None
        self._device_id = cupy.cuda.runtime.getDevice()
        self._device = device = devices.of_id(self._device_id)
        table = user_table(device) if problem.kv == "Dense" else None  # others are not tuned
        self._planner = Planner(problem, device, kernel, table, batch_invariant, num_splits)
        self._loaded: dict[Variant, LoadedKernel] = {}

    def prepare(self, key: Key, address: int) -> PreparedCall | None:
        """Prepare a call; None if it is empty.

        Parameters
        ----------
        key : tuple
            Shape and strides of q, of k and of v, as the caller has them; whether each is aligned;
            shape and strides of the caller's `out` and whether it is aligned, or None; a tuple for
            `Extras.flat`: shape, strides and dtype of each array, the key of a `cufa.BlockMask`,
            or None.
        address : int
            Address of q.

        Raises
        ------
        ValueError
            The call is illegal.
        """
        call = self._plain(key, address) or self._prepared(key, address, self._planner)
        if call is None:
            return None
        # A call is kept when its key comes for the second time; the latest ones are kept anyway.
        number = hash(key)
        if number in self._seen:
            remember(self.calls, key, call, _CALLS)
        else:
            if len(self._seen) >= _SEEN:
                self._seen.clear()
            self._seen.add(number)
        return call

    def fallback(self, key: Key, address: int) -> PreparedCall | None:
        """Prepare a call by a kernel whose blocks share no memory; None if there is none.

        Parameters
        ----------
        key, address
            As in `prepare`.
        """
        planner = self._planner.fallback
        return None if planner is None else self._prepared(key, address, planner)

    def _plain(self, key: Key, address: int) -> PreparedCall | None:
        """Prepare a call on 4-D arrays that its kernel takes as they are; None for other calls.

        For such a call `_prepared` returns the same, in twice the time.
        """
        q, of_q, k, of_k, v, of_v, aligned, out, infos = key
        if not self._may_be_plain or out is not None or infos or not len(q) == len(k) == 4:
            return None
        batch, heads, rows, head_dim = q
        of_batch, heads_kv, keys, head_dim_k = k
        if v[:-1] != k[:-1] or of_batch != batch or head_dim_k != head_dim:
            return None
        if 0 in (batch, heads, rows, heads_kv, keys) or heads % heads_kv:
            return None
        result = batch, heads, rows, v[3]
        strides = of_q, of_k, of_v, self._viewer.made(result)
        problem = self._positive.sized(batch, heads, heads_kv, rows, keys)
        plan = self._planner(problem)
        loaded = self._loaded.get(plan.variant) or self._load(plan.variant)
        floats = plan.workspace_floats
        if floats or not self._viewer.is_plain(aligned, strides, loaded.tma):
            return None
        launch = loaded.prepared(plan, problem, (q, k, v, result), strides, address, (), NO_EXTRAS)
        return PreparedCall(launch, plan.variant, result, result[:3], False, 0, (), ())

    def _prepared(
        self, key: Key, address: int, planner: Planner | Callable[[Problem], Plan]
    ) -> PreparedCall | None:
        q, of_q, k, of_k, v, of_v, aligned, out, infos = key
        inputs = (q, of_q), (k, of_k), (v, of_v)
        views = self._viewer.views(inputs)
        extras = self._extras.described(infos) if infos else NO_EXTRAS
        if extras.scales:
            extras = extras._replace(
                scales=scale_infos(extras.scales, views.shapes[1:3], self.layout)
            )
        problem = self._problem(views, extras)
        if problem is None:
            return None
        shape, lse_shape = restore_shape(problem, len(q), self.layout)
        if out is not None and out[0] != shape:
            raise ValueError(f"out has shape {out[0]}, but {shape} is needed")
        reads, ndim = self._reads, 4 if self.layout == "thd" else len(shape)
        numbers = placed(reads, ndim, problem.sizes, extras) if reads else ()
        plan = planner(problem)
        loaded = self._loaded.get(plan.variant) or self._load(plan.variant)
        strides, copies = self._viewer.taken(inputs, out, aligned, views, loaded.tma)
        if problem.kv == "Varlen":  # packed sequences are not along this axis
            strides = tuple((0, *steps[1:]) for steps in strides)
        address &= -ALIGNMENT  # the array may be copied, and a copy is aligned
        floats = plan.workspace_floats
        return PreparedCall(
            loaded.prepared(plan, problem, views.shapes, strides, address, numbers, extras),
            plan.variant,
            shape,
            lse_shape,
            bool(copies) or floats > 0,
            floats,
            copies,
            self._viewer.extents(inputs, out, extras),
        )

    def _problem(self, views: Views, extras: Extras) -> Problem | None:
        """Return the problem of arrays with new sizes; None if it is empty.

        Calls of a kind differ in sizes only: the rest has been parsed and checked.
        """
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

    def _load(self, variant: Variant) -> LoadedKernel:
        function = jit.kernel(variant, self._device, self._device_id)
        loaded = LoadedKernel(variant, function, self._device_id, self._extras)
        # So does the fallback, which a capture may run instead
        draws = KERNELS[variant.kernel].persistent or self._planner.fallback is not None
        if draws and not is_capturing():
            counters.of_device(self._device_id).reserve()
        return self._loaded.setdefault(variant, loaded)
