"""Arrays -> launches of the backward pass: sums over rows, the products, dQ of its sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cufa import device as devices
from cufa.arrays import ALIGNMENT, Array, Ints, aligned_address, copied, readable, whole_chunks
from cufa.compiler import jit
from cufa.dtypes import DTYPES
from cufa.features.parts import ARRAYS
from cufa.launch import by_name, workspace
from cufa.launch.array_sums import finishing, wanted_of
from cufa.launch.by_name import NamedLayout
from cufa.launch.capture import refuse_copy
from cufa.launch.clear_rows import clear_rows
from cufa.launch.launch import PreparedLaunch, launcher
from cufa.launch.params import encoded_map
from cufa.launch.signature import AddressSlot, Key
from cufa.planner.array_sums import CHAINS, IN_TURN, Wanted
from cufa.planner.backward import BackwardPlan, Step, backward_plan
from cufa.problem.extras import Extras, placed
from cufa.problem.parse_backward import Gradients, Results
from cufa.problem.problem import Problem
from cufa.remembered import remember
from cufa.specs import BACKWARD_KERNELS
from cufa.specs.backward import MAPPED, parameter
from cufa.specs.backward_variant import BackwardVariant
from cufa.specs.tile import panel_columns
from cufa.tuned import user_table

_PREPARED = 128  # calls that are remembered

_TENSORS = ("q", "k", "v", "o", "d_out", "dq", "dk", "dv")
_NUMBERS = (
    *("params.row_lse", "params.row_delta", "params.dq_sums", "params.kv_sums"),
    *("params.turns", "params.turns_drawn", "params.sinks", "params.d_sinks"),
)
_FIRST_SUMS = len(_TENSORS) + 1 + len(_NUMBERS) + 1  # behind lse and chains
_WAY_OUT = (
    "give a contiguous array whose rows are a multiple of 16 bytes, and a scale that is not "
    "negative"
)
_SINKS = ARRAYS.index("sinks")


class Tensors(NamedTuple):
    """Q, K and V of a call, as (batch, heads, seq, head_dim) views."""

    q: Array
    k: Array
    v: Array


class _Prepared(NamedTuple):
    """The launches of calls with the same shapes, strides and options.

    Attributes
    ----------
    plan : BackwardPlan
    launches : tuple of PreparedLaunch
        Each is given the addresses of `_TENSORS`, of the log-sum-exp, of `_NUMBERS`, those of
        `Extras.flat` and the seed.
    """

    plan: BackwardPlan
    launches: tuple[PreparedLaunch, ...]


_prepared: dict[Key, _Prepared] = {}


def attention_backward(
    problem: Problem,
    tensors: Tensors,
    results: Results,
    gradients: Gradients,
    extras: Extras,
    deterministic: bool,
    ndim: int = 4,
    forced: BackwardVariant | None = None,
) -> None:
    """Compute gradients on the current device and stream.

    Parameters
    ----------
    problem : Problem
        The problem of the forward call.
    tensors : Tensors
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

    written = {f"d{name}": getattr(gradients, name) for name in "qkv"}
    wanted = {name: array for name, array in written.items() if array is not None}
    given = {**tensors._asdict(), "o": results.out, "d_out": results.dout}
    sizes = (problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_kv)
    bias = () if gradients.bias is None else (gradients.bias,)
    sinks = () if gradients.sinks is None else (gradients.sinks,)
    others = (*bias, *gradients.read.values())  # in the order of `BackwardPlan.arrays`
    if 0 in sizes or (problem.kv == "Varlen" and problem.sequences == 0):
        for array in (*wanted.values(), *sinks, *others):
            array.fill(0)
        return
    arrays = _taken(given, wanted, negative=problem.scale < 0)
    lse = results.lse if results.lse.flags.c_contiguous else _contiguous(results.lse)
    device_id = cupy.cuda.runtime.getDevice()
    infos = extras.infos
    key = (
        *(problem, device_id, deterministic, ndim, infos, gradients.sinks is None, not bias),
        forced,
        tuple(arrays[name].strides if name in arrays else None for name in _TENSORS),
    )
    call = _prepared.get(key)
    if call is None:
        strides = {name: array.strides for name, array in arrays.items()}
        wrt = [name for name in (*"qkv", "sinks") if getattr(gradients, name) is not None]
        described = extras.described(infos)
        address = arrays["q"].data.ptr
        more = wanted_of(problem, gradients, ndim)
        asked = wrt, more, deterministic, forced
        call = _prepare(problem, strides, address, described, asked, ndim, device_id)
        remember(_prepared, key, call, _PREPARED)
    plan, kept = call.plan, workspace.of_device(device_id)
    with kept.lock:
        memory = kept.take(plan.workspace_words)
        start = memory.data.ptr
        places = plan.row_lse, plan.row_delta, plan.dq_sums, plan.kv_sums, plan.turns, plan.drawn
        numbers = [start + 4 * place if place >= 0 else 0 for place in places]
        for name in wanted if problem.kv != "Dense" else ():
            _clear_rows(name, arrays[name], problem, extras)
        chains, sums = _cleared(plan, memory, others)
        addresses = (
            *(arrays[name].data.ptr if name in arrays else 0 for name in _TENSORS),
            aligned_address(lse),
            *numbers,
            extras.arrays[_SINKS].data.ptr if sinks else 0,
            sinks[0].data.ptr if sinks else 0,
            chains,
            *(x.data.ptr for pair in zip(sums, others, strict=True) for x in pair),
            *extras.addresses(plan.variant),
        )
        for launch in call.launches:
            launch(*addresses)
        for each, found, array in zip(plan.arrays.sums, sums, others, strict=True):
            if each.dtype not in DTYPES:
                array[...] = found.reshape(array.shape)
    for name, array in wanted.items():
        if arrays[name] is not array:
            array[...] = arrays[name]


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


def _cleared(plan: BackwardPlan, memory: Array, gradients: Sequence[Array]) -> tuple[int, Any]:
    """Set sums, and chains, to 0; return the address of the chains, and the sums."""
    first, end = plan.arrays.start, plan.arrays.end
    if first < end:
        memory[first:end].fill(0)
    found = []
    for sums, gradient in zip(plan.arrays.sums, gradients, strict=True):
        if sums.place < 0:
            gradient.fill(0)
        found.append(gradient if sums.place < 0 else memory[sums.place : sums.place + sums.size])
    chains = plan.arrays.chains
    return memory.data.ptr + 4 * chains if chains >= 0 else 0, found


def _taken(given: dict[str, Array], wanted: dict[str, Array], negative: bool) -> dict[str, Array]:
    """Return arrays as the kernels take them: as they are, or in place of others."""
    import cupy

    taken = {}
    for name, array in given.items():
        negate = name == "q" and negative
        plain = array.data.ptr % ALIGNMENT == 0 and readable(
            array.shape, array.strides, array.itemsize
        )
        if not plain or negate:
            refuse_copy({"o": "out", "d_out": "dout"}.get(name, name), array, _WAY_OUT)
            array = copied(array, negate)
        taken[name] = array
    for name, array in wanted.items():
        if not _has_rows(array):
            refuse_copy(name, array, _WAY_OUT)
            array = cupy.empty(array.shape, array.dtype)
        taken[name] = array
    return taken


def _has_rows(array: Array) -> bool:
    """Whether the elements of a row are one after the other, and all are aligned."""
    size = array.itemsize
    steps = (step for n, step in zip(array.shape, array.strides, strict=True) if n > 1)
    return (
        (array.shape[3] == 1 or array.strides[3] == size)
        and array.data.ptr % size == 0
        and all(step % size == 0 for step in steps)
    )


def _contiguous(lse: Array) -> Array:
    import cupy

    refuse_copy("lse", lse, _WAY_OUT)
    return cupy.ascontiguousarray(lse)


def _prepare(
    problem: Problem,
    strides: dict[str, Ints],
    address: int,
    extras: Extras,
    asked: tuple[list[str], tuple[Wanted, ...], bool, BackwardVariant | None],
    ndim: int,
    device_id: int,
) -> _Prepared:
    device = devices.of_id(device_id)
    # Kernels take a scale that is not negative: Q comes negated, and dQ takes the sign.
    positive = problem._replace(scale=abs(problem.scale), returns_lse=True)
    wrt, more, deterministic, forced = asked
    maps = all(_has_map(problem, name, strides[name]) for name in MAPPED)
    table = user_table(device)
    plan = backward_plan(positive, device, wrt, deterministic, maps, forced, more, table)
    reads = plan.problem.reads
    numbers = placed(reads, ndim, plan.problem.sizes, extras) if reads else ()
    launches = []
    for step in plan.steps:
        function = jit.kernel(step.instance, device, device_id)
        content, places = _parameter(plan, step, strides, numbers, extras, problem.scale)
        if _uses_tma(step):
            content = _maps(plan, step, strides, address) + content
        launch = launcher(function, (step.grid, 1, 1), step.threads, step.instance.smem_bytes)
        launches.append(PreparedLaunch(launch, content, places))
    for i, sums in enumerate(plan.arrays.sums):
        last = finishing(sums, _FIRST_SUMS + 2 * i)
        if last is not None:
            launches.append(last)
    return _Prepared(plan, tuple(launches))


def _shape(problem: Problem, name: str) -> Ints:
    """Return the shape of one of `MAPPED`."""
    heads, seq = (
        (problem.heads_kv, problem.seq_kv) if name in "kv" else (problem.heads_q, problem.seq_q)
    )
    return problem.batch, heads, seq, problem.head_dim if name in "qk" else problem.head_dim_v


def _has_map(problem: Problem, name: str, strides: Ints) -> bool:
    """Whether TMA can describe an array whose rows are made of whole chunks, see `_taken`."""
    *sizes, columns = _shape(problem, name)
    itemsize = DTYPES[problem.dtype].bytes
    shape = *sizes, whole_chunks(columns, itemsize)
    return readable(shape, strides, itemsize, tma=True, repeats=name in "kv")


def _uses_tma(step: Step) -> bool:
    spec = BACKWARD_KERNELS.get(step.instance.kernel)
    return spec is not None and spec.tma


def _maps(plan: BackwardPlan, step: Step, strides: dict[str, Ints], address: int) -> bytes:
    """Return the tensor maps of `MAPPED`; `address` is that of any array."""
    problem, variant, found = plan.problem, plan.variant, []
    copied_rows = BACKWARD_KERNELS[step.instance.kernel].copied_rows or variant.bm
    for name in MAPPED:
        steps = (0, *strides[name][1:]) if problem.kv == "Varlen" else strides[name]
        rows = variant.bn if name in "kv" else copied_rows
        box = 1, rows, panel_columns(variant.head_dim)
        found.append(encoded_map(problem.dtype, address, _shape(problem, name), steps, box))
    return b"".join(found)


def _parameter(
    plan: BackwardPlan,
    step: Step,
    strides: dict[str, Ints],
    numbers: tuple[Ints, ...],
    extras: Extras,
    scale: float,
) -> tuple[bytes, tuple[AddressSlot, ...]]:
    """Return the parameter of a launch without maps, its addresses 0, and where these go."""
    problem, variant = plan.problem, plan.variant._replace(score=step.instance.score)
    layout = NamedLayout(variant, parameter(variant.score, variant.kv, _uses_tma(step)))
    itemsize, sinks = DTYPES[problem.dtype].bytes, extras.arrays[_SINKS]
    steps = {name: [each // itemsize for each in found[:3]] for name, found in strides.items()}
    known = {
        **by_name.numbers(problem, plan.q_units, plan.section_heads, steps),
        "stride_sinks": 0 if sinks is None else sinks.strides[0] // sinks.dtype.itemsize,
        "scale": problem.scale,
        "dq_factor": scale,
        "workspace_rows": plan.workspace_rows,
        "kv_tiles": plan.key_tiles,
        "kv_splits": plan.kv_splits,
        "split_heads": -(-problem.group // plan.kv_splits),
    }
    content = layout.filled(known, problem, numbers if variant.score else (), plan.arrays.numbers)
    names = (*(f"params.{name}.data" for name in _TENSORS), "params.lse", *_NUMBERS)
    first = _FIRST_SUMS + 2 * len(plan.arrays.sums)
    places = [*layout.places(names, first, extras)]
    if _uses_tma(step):
        places += ((layout.words[f"maps.{name}"], _TENSORS.index(name)) for name in MAPPED)
    if variant.score and plan.arrays.chains >= 0:
        places.append((layout.words[f"{IN_TURN.name}.{CHAINS}"], len(names)))
    if variant.score:
        places += (
            (layout.words[f"{sums.part}.{sums.parameter}"], _FIRST_SUMS + 2 * i)
            for i, sums in enumerate(plan.arrays.sums)
        )
    return content, tuple(places)
