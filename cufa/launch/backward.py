"""Arrays -> launches of the backward pass: sums over rows, the products, dQ of its sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cufa import device as devices
from cufa.arrays import ALIGNMENT, Array, Ints, Operands, copied, readable, whole_chunks
from cufa.dtypes import DTYPES
from cufa.features.parts import ARRAYS
from cufa.launch import workspace
from cufa.launch.array_sums import finishing, wanted_of
from cufa.launch.auxiliary import prepared
from cufa.launch.capture import refuse_copy
from cufa.launch.clear_rows import clear_rows
from cufa.launch.launch import Launch
from cufa.launch.params import Layout, encoded_map, numbers_of_params, steps_of
from cufa.launch.signature import AddressSlot, Key
from cufa.planner.array_sums import CHAINS, IN_TURN, Wanted
from cufa.planner.backward import BackwardPlan, backward_plan
from cufa.problem.extras import Extras, placed
from cufa.problem.parse_backward import Gradients, Results
from cufa.problem.problem import Problem
from cufa.remembered import remember
from cufa.specs import BACKWARD_KERNELS
from cufa.specs.backward import MAPPED, parameter
from cufa.specs.tile import panel_columns
from cufa.specs.variant import BackwardVariant
from cufa.tuned import user_table

_PREPARED = 128  # calls that are remembered

_TENSORS = ("q", "k", "v", "o", "d_out", "dq", "dk", "dv")
_ADDRESSES = (
    *(f"params.{name}.data" for name in _TENSORS),
    *("params.lse", "params.sinks", "params.d_sinks"),
    *("params.row_lse", "params.row_delta", "params.dq_sums", "params.kv_sums"),
    *("params.turns", "params.turns_drawn", f"{IN_TURN.name}.{CHAINS}"),
)
"""The first addresses of a launch; those of sums, and of the gradients of these, come next."""

_WAY_OUT = (
    "give a contiguous array whose rows are a multiple of 16 bytes, and a scale that is not "
    "negative"
)
_SINKS = ARRAYS.index("sinks")


class Prepared(NamedTuple):
    """The launches of calls with the same shapes, strides and options.

    Each is given `_ADDRESSES`, those of sums, those of `Extras.flat`, and the seed.
    """

    plan: BackwardPlan
    launches: tuple[Launch, ...]


_prepared: dict[Key, Prepared] = {}


def attention_backward(
    problem: Problem,
    operands: Operands,
    results: Results,
    gradients: Gradients,
    extras: Extras,
    deterministic: bool,
    ndim: int = 4,
    forced: BackwardVariant | None = None,
) -> Prepared | None:
    """Compute gradients on the current device and stream.

    Returns what `run` needs for a call of arrays like these; None if `run` is not all: if arrays
    are copied, or if there are others.

    Parameters
    ----------
    problem : Problem
        The problem of the forward call.
    operands : Operands
        Its q, k and v.
    results : Results
    gradients : Gradients
        Where they go; all of it is written. Gradients of a bias, and of arrays that a `score_mod`
        reads, are contiguous and have the axes of the caller's. The latter are the arrays that the
        part of the `score_mod` adds to, in order.
    extras : Extras
        As in the forward call; lengths are on the device.
    deterministic : bool
        Whether all sums have a fixed order.
    ndim : int
        Axes of the caller's q.
    forced : BackwardVariant, optional
        As in `cufa.planner.backward.backward_plan`.

    Raises
    ------
    ValueError
        In a capture into a CUDA graph, where the call needs memory that nothing was set aside for.
    """
    import cupy

    q, k, v, *_ = operands
    given = {"q": q, "k": k, "v": v, "o": results.out, "d_out": results.dout}
    written = {f"d{name}": getattr(gradients, name) for name in "qkv"}
    wanted = {name: array for name, array in written.items() if array is not None}
    sizes = (problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_kv)
    bias = () if gradients.bias is None else (gradients.bias,)
    sinks = () if gradients.sinks is None else (gradients.sinks,)
    others = (*bias, *gradients.read.values())  # in the order of `BackwardPlan.sums`
    if 0 in sizes or (problem.kv == "Varlen" and problem.sequences == 0):
        for array in (*wanted.values(), *sinks, *others):
            array.fill(0)
        return None
    arrays = _taken(given, wanted, negative=problem.scale < 0)
    lse = results.lse
    if not lse.flags.c_contiguous:
        refuse_copy("lse", lse, _WAY_OUT)
        lse = cupy.ascontiguousarray(lse)
    device_id = cupy.cuda.runtime.getDevice()
    infos = extras.infos
    key = (
        *(problem, device_id, deterministic, ndim, infos, gradients.sinks is None, not bias),
        forced,
        tuple(arrays[name].strides if name in arrays else None for name in _TENSORS),
    )
    call = _prepared.get(key)
    if call is None:
        wrt = [name for name in (*"qkv", "sinks") if getattr(gradients, name) is not None]
        asked = wrt, deterministic, wanted_of(problem, gradients, ndim), forced
        call = _prepare(problem, arrays, extras.described(infos), asked, ndim, device_id)
        remember(_prepared, key, call, _PREPARED)
    unwritten = () if problem.kv == "Dense" else tuple(wanted)

    def clear() -> None:
        for name in unwritten:
            _clear_rows(name, arrays[name], problem, extras)

    of_sinks = (extras.arrays[_SINKS], *sinks) if sinks else ()
    addresses = extras.addresses(call.plan.variant)
    run(call, arrays, lse, _Rest(of_sinks, others, addresses, clear))
    for name, array in wanted.items():
        if arrays[name] is not array:
            array[...] = arrays[name]
    has_rest = bool(sinks or others or unwritten or any(addresses)) or extras.seed is not None
    copies = lse is not results.lse or any(
        arrays[name] is not array for name, array in (given | wanted).items()
    )
    return None if has_rest or copies else call


class _Rest(NamedTuple):
    """Other arrays of a call, and what it does before its launches.

    Attributes
    ----------
    sinks : tuple of array
        The sinks and their gradient, if that is asked for.
    gradients : tuple of array
        Those of other arrays, in the order of the plan's sums.
    addresses : tuple of int
        Those of `Extras`.
    clear : callable
        Zeroes what the products do not write.
    """

    sinks: tuple[Array, ...] = ()
    gradients: tuple[Array, ...] = ()
    addresses: Ints = ()
    clear: Callable[[], object] = lambda: None


_NO_REST = _Rest()


def run(call: Prepared, arrays: Mapping[str, Array], lse: Array, rest: _Rest = _NO_REST) -> None:
    """Run prepared launches on the current stream.

    Parameters
    ----------
    call : Prepared
    arrays : mapping
        q, k, v, o, d_out, and the gradients dq, dk and dv that are asked for.
    lse : array
        C-contiguous.
    rest : _Rest
        Nothing, for a call that `attention_backward` returned.
    """
    import cupy

    (plan, launches), kept = call, workspace.of_device(cupy.cuda.runtime.getDevice())
    with kept.lock:
        memory = kept.take(plan.workspace_words)
        start = memory.data.ptr
        rows = plan.row_lse, plan.row_delta, plan.dq_sums, plan.kv_sums
        places = *rows, plan.turns, plan.drawn, plan.arrays.chains
        rest.clear()
        sums = _cleared(plan, memory, rest.gradients)
        of_sinks = [x.data.ptr for x in rest.sinks] or [0, 0]
        addresses = (
            *(arrays[name].data.ptr if name in arrays else 0 for name in _TENSORS),
            *(lse.data.ptr, *of_sinks),
            *(start + 4 * place if place >= 0 else 0 for place in places),
            *(x.data.ptr for pair in zip(sums, rest.gradients, strict=True) for x in pair),
            *rest.addresses,
        )
        for launch in launches:
            launch(*addresses)
        for each, found, array in zip(plan.arrays.sums, sums, rest.gradients, strict=True):
            if each.dtype not in DTYPES:
                array[...] = found.reshape(array.shape)


def _clear_rows(name: str, gradient: Array, problem: Problem, extras: Extras) -> None:
    """Zero the rows of dq, dk or dv that the products do not write, or all rows."""
    rows = gradient[0].swapaxes(0, 1)
    is_aligned = gradient.data.ptr % ALIGNMENT == 0  # the caller's may not be
    if problem.kv == "Varlen" and rows.flags.c_contiguous and is_aligned:
        offsets_q, offsets_k, used = extras.lengths
        if name == "dq":
            clear_rows(rows, None, offsets_q, problem.max_seqlen_q)
        else:
            clear_rows(rows, None, offsets_k, problem.max_seqlen_k, used)
    else:  # in the order of memory, which CuPy fills several times as fast
        order = sorted(range(gradient.ndim), key=lambda axis: -gradient.strides[axis])
        gradient.transpose(order).fill(0)


def _cleared(plan: BackwardPlan, memory: Array, gradients: Sequence[Array]) -> list[Array]:
    """Set sums, and chains, to 0; return the sums."""
    first, end = plan.arrays.start, plan.arrays.end
    if first < end:
        memory[first:end].fill(0)
    found = []
    for sums, gradient in zip(plan.arrays.sums, gradients, strict=True):
        if sums.place < 0:
            gradient.fill(0)
        found.append(gradient if sums.place < 0 else memory[sums.place : sums.place + sums.size])
    return found


def _taken(given: dict[str, Array], wanted: dict[str, Array], negative: bool) -> dict[str, Array]:
    """Return arrays as the kernels take them: as they are, or in place of others."""
    import cupy

    taken = {}
    for name, array in given.items():
        negate = name == "q" and negative
        plain = readable(array.shape, array.strides, array.itemsize)
        if negate or not plain or array.data.ptr % ALIGNMENT:
            refuse_copy({"o": "out", "d_out": "dout"}.get(name, name), array, _WAY_OUT)
            array = copied(array, negate)
        taken[name] = array
    for name, array in wanted.items():
        if array.shape[3] > 1 and array.strides[3] != array.itemsize:
            refuse_copy(name, array, _WAY_OUT)
            array = cupy.empty(array.shape, array.dtype)
        taken[name] = array
    return taken


def _prepare(
    problem: Problem,
    arrays: dict[str, Array],
    extras: Extras,
    asked: tuple[list[str], bool, tuple[Wanted, ...], BackwardVariant | None],
    ndim: int,
    device_id: int,
) -> Prepared:
    """Return the plan and the launches of calls like this one."""
    device = devices.of_id(device_id)
    # Kernels take a scale that is not negative: Q comes negated, and dQ takes the sign.
    positive = problem._replace(scale=abs(problem.scale), returns_lse=True)
    wrt, deterministic, more, forced = asked
    maps = all(_has_map(name, arrays[name]) for name in MAPPED)
    table = user_table(device)
    plan = backward_plan(positive, device, wrt, deterministic, maps, forced, more, table)
    sinks = extras.arrays[_SINKS]
    known = {
        **numbers_of_params(plan.problem, plan.q_units, plan.section_heads),
        **steps_of(plan.problem, arrays),
        "stride_sinks": 0 if sinks is None else sinks.strides[0] // sinks.dtype.itemsize,
        "scale": plan.problem.scale,
        "dq_factor": problem.scale,
        "workspace_rows": plan.workspace_rows,
        "kv_tiles": plan.key_tiles,
        "kv_splits": plan.kv_splits,
        "split_heads": -(-problem.group // plan.kv_splits),
    }
    strides = placed(plan.problem.reads, ndim, plan.problem.sizes, extras)
    variant = plan.variant
    of_variant = variant.kv, (variant.bm, variant.bn)
    with_maps = {name: spec for name, spec in BACKWARD_KERNELS.items() if spec.tma}
    launches = []
    for step in plan.steps:
        spec, score = with_maps.get(step.instance.kernel), step.instance.score
        layout = Layout(parameter(score, variant.kv, tma=spec is not None), score, *of_variant)
        of_score = layout.of_score(plan.problem, strides if score else (), plan.arrays.numbers)
        content = layout.filled(known | of_score)
        if spec is not None:
            content = _maps(plan, spec.copied_rows or variant.bm, arrays) + content
        places = _places(plan, layout, extras)
        launches.append(prepared(step.instance, step.grid, content, places, step.threads))
    for i, sums in enumerate(plan.arrays.sums):
        last = finishing(sums, len(_ADDRESSES) + 2 * i)
        if last is not None:
            launches.append(last)
    return Prepared(plan, tuple(launches))


def _has_map(name: str, array: Array) -> bool:
    """Whether TMA can describe an array whose rows are made of whole chunks, see `_taken`."""
    size = array.itemsize
    shape = *array.shape[:3], whole_chunks(array.shape[3], size)
    return readable(shape, array.strides, size, tma=True, repeats=name in "kv")


def _maps(plan: BackwardPlan, copied_rows: int, arrays: dict[str, Array]) -> bytes:
    """Return the tensor maps of `MAPPED`."""
    problem, variant, maps = plan.problem, plan.variant, b""
    for name in MAPPED:
        array = arrays[name]
        steps = (0, *array.strides[1:]) if problem.kv == "Varlen" else array.strides
        rows = variant.bn if name in "kv" else copied_rows
        box = 1, rows, panel_columns(variant.head_dim)
        maps += encoded_map(problem.dtype, array.data.ptr, array.shape, steps, box)
    return maps


def _places(plan: BackwardPlan, layout: Layout, extras: Extras) -> tuple[AddressSlot, ...]:
    """Return where addresses go in the parameter of a launch."""
    addresses = [(name, i) for i, name in enumerate(_ADDRESSES)]
    addresses += ((f"maps.{name}", _TENSORS.index(name)) for name in MAPPED)
    first = len(_ADDRESSES)
    for sums in plan.arrays.sums:
        addresses.append((f"{sums.part}.{sums.parameter}", first))
        first += 2
    return layout.places(addresses, first, extras)
