"""Arrays -> launch: the path of a call, short where a call like it has been prepared."""

from __future__ import annotations

import itertools
from operator import is_
from typing import Any

import numpy as np

from cufa.arrays import ALIGNMENT, Array, Ints, as_bhsd, copied, padded
from cufa.features.parts import ARRAYS
from cufa.features.window import NO_WINDOW
from cufa.launch.capture import is_capturing, refuse_memory
from cufa.launch.clear_rows import clear_rows
from cufa.launch.prepare import PreparedCall, PreparedCalls
from cufa.launch.scratch import NotSetAsideError
from cufa.launch.signature import PLAIN, Key, types_in
from cufa.problem.extras import NO_EXTRAS, Extras
from cufa.problem.lengths import LENGTHS, as_int32, is_readable
from cufa.problem.parse import restore_shape
from cufa.problem.problem import Problem
from cufa.remembered import remember

_KINDS = 64  # that are remembered, besides those of the latest calls
_OPTIONS = 256  # and as many latest calls

_BLOCK_MASK, _SINKS = ARRAYS.index("block_mask"), ARRAYS.index("sinks")
_ALIGNED = (True, True, True)

_prepared: dict[Key, PreparedCalls] = {}
_numbers: dict[Key, int] = {}  # of options; a number is not used again
_next_number = itertools.count()
_NONE_YET = None, None
# By `common`: the choices of the latest call, and the number of its options.
_latest_choices: dict[Key, tuple[tuple[Any, ...], int]] = {}
# By the number of options: the latest call's key, dtypes and device, kind, and launch.
_latest_calls: dict[int, tuple[Key, Key, PreparedCalls, PreparedCall]] = {}

# CuPy's, imported by the first call.
_ndarray: Any = None
_current_device: Any = None


def dtype_of(array: object) -> object:
    """Return the dtype of what may be an array; None if it has none."""
    return getattr(array, "dtype", None)


def on_device(name: str, array: Array | None) -> Array | None:
    """Return lengths, offsets or a block table as kernels read them.

    An array is copied, on the current stream, if it is on the host, is not int32, or is not
    contiguous along its last axis.

    Raises
    ------
    ValueError
        It would be copied in a capture into a CUDA graph.
    """
    on_host = isinstance(array, np.ndarray)
    if array is None or (not on_host and is_readable(array)):
        return array
    shown = "is on the host" if on_host else f"has {array.dtype}, strides {array.strides}"
    refuse_memory(
        f"{name} (shape {array.shape}) {shown} and would be copied",
        "before the capture, make a contiguous int32 array of it with "
        "cupy.ascontiguousarray(cupy.asarray(x), np.int32)",
    )
    import cupy

    return cupy.ascontiguousarray(cupy.asarray(as_int32(array)), np.int32)


def number_of(choices: tuple[Any, ...], common: Key = (), *, made: bool = False) -> int | None:
    """Return the number of what calls of a kind share, except dtypes, head dims and the device.

    A number is looked up faster than all that. Types count, too: True == 1, and a known call must
    not accept what a new one refuses. Return None for options that have no number, unless `made`,
    and for options of other than plain types, whose comparisons may mean anything. Otherwise the
    choices are kept as the latest ones.

    Parameters
    ----------
    choices, common
        As in `run`.
    made : bool
        For a call that has been checked in full.
    """
    window, kernel = choices[1], choices[2]
    types = (*map(type, choices),)
    try:
        members = None if window is NO_WINDOW else types_in(window), types_in(kernel)
        if not (PLAIN.issuperset(types) and all(PLAIN.issuperset(x) for x in members if x)):
            return None
        options = choices, types, members, common
        number = _numbers.get(options)
    except Exception:  # something cannot be hashed, whatever it raises: the full check judges it
        return None
    if number is None and made:
        number = remember(_numbers, options, next(_next_number), _OPTIONS)
    if number is not None:
        if len(_latest_choices) >= _OPTIONS:
            _latest_choices.clear()
        _latest_choices[common] = choices, number
    return number


def run(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    choices: tuple[Any, ...],
    common: Key,
    extras: Extras,
    kind: PreparedCalls | None = None,
) -> Any:
    """Run a call of `attention`, `attention_varlen` or `decode` on the GPU.

    Without its kind, return None where the kind is not known or the call may be illegal.

    Parameters
    ----------
    q, k, v, out : object
    choices : tuple
        The caller's choices: `return_lse`, `window`, `kernel`, then others.
    common : tuple
        The rest of what calls of a kind have in common, such as the dtypes of `extras` and the
        caller's functions.
    extras : Extras
        Objects that may be arrays, or a `BlockMask`.
    kind : PreparedCalls, optional
        The kind of a call that has been checked in full.

    Raises
    ------
    TypeError, ValueError
        The call is illegal, or no kernel can take it.
    """
    try:
        latest, options = _latest_choices.get(common, _NONE_YET)
    except Exception:  # `common` cannot be hashed
        latest = None
    if latest is None or not all(map(is_, choices, latest)):  # else these are the same objects
        options = number_of(choices, common, made=kind is not None)
    return_lse = choices[0]
    if kind is None:
        if options is None:
            return None
        return _run_known(None, q, k, v, out, return_lse, options, extras)
    global _ndarray, _current_device
    import cupy

    _ndarray, _current_device = cupy.ndarray, cupy.cuda.runtime.getDevice
    problem = kind.problem
    if problem.is_empty:
        sinks = extras.arrays[_SINKS] if extras.arrays else None
        return nothing(problem, kind.layout, q, out, return_lse, sinks)
    has_gaps = True
    if extras.lengths:
        has_gaps = not isinstance(extras.lengths[0], np.ndarray)  # offsets on the host have none
        names = LENGTHS[problem.kv]
        extras = extras._replace(lengths=tuple(map(on_device, names, extras.lengths)))
    head_dims = problem.head_dim, problem.head_dim_v
    key = (q.dtype, k.dtype, v.dtype, _current_device(), *head_dims, options)
    if options is not None:
        kind = remember(_prepared, key, kind, _KINDS)
    result = _run_known(kind, q, k, v, out, return_lse, options, extras, has_gaps)
    if result is None:
        raise ValueError("an array besides q, k and v begins within an element of its dtype")
    return result


def nothing(
    problem: Problem,
    layout: str,
    q: Array,
    out: Array | None,
    return_lse: bool,
    sinks: Array | None = None,
) -> Any:
    """Return the result of a call without queries, or whose queries have no key."""
    import cupy

    shape, lse_shape = restore_shape(problem, q.ndim, layout)
    made = out is None
    if out is None:
        out = cupy.empty(shape, q.dtype)
    # Rows of a given `out` that no sequence has stay as they are.
    if out.size and (made or problem.is_cached):
        out.fill(0)
    if not return_lse:
        return out
    lse = cupy.empty(lse_shape, np.float32)
    if lse.size:
        lse.fill(-np.inf)
    if lse.size and problem.is_cached and sinks is not None:
        lse[...] = sinks[:, None]
    return out, lse


def _run_known(
    checked: PreparedCalls | None,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    return_lse: bool,
    options: int | None,
    extras: Extras = NO_EXTRAS,
    has_gaps: bool = True,
) -> Any:
    """Run a call whose kind is known; return None if it is not, or if the call may be illegal.

    Parameters
    ----------
    checked : PreparedCalls or None
        The kind of a call that has been checked in full; None to look the kind up.
    q, k, v, out, extras
        As in `run`.
    return_lse : bool
    options : int or None
        As `number_of` returns it; None only of a call that has been checked in full.
    has_gaps : bool
        Whether packed arrays may have rows that belong to no sequence.

    Raises
    ------
    ValueError
        The call was checked in full, but cannot be prepared.
    """
    if checked is None and not (
        type(q) is type(k) is type(v) is _ndarray and (out is None or type(out) is _ndarray)
    ):
        return None
    q_data, k_data, v_data, device_id = q.data, k.data, v.data, _current_device()
    if not q_data.device_id == k_data.device_id == v_data.device_id == device_id:
        return None
    q_shape, v_shape, dtype = q.shape, v.shape, q.dtype
    q_at, k_at, v_at = q_data.ptr, k_data.ptr, v_data.ptr
    aligned = _ALIGNED
    if (q_at | k_at | v_at) % ALIGNMENT:
        aligned = (q_at % ALIGNMENT == 0, k_at % ALIGNMENT == 0, v_at % ALIGNMENT == 0)
    into = None if out is None else (out.shape, out.strides, out.data.ptr % ALIGNMENT == 0)
    infos: Key = ()
    addresses: Ints = ()
    if extras is not NO_EXTRAS:
        described = _described(extras, device_id)
        if described is None:
            return None
        infos, addresses = described
    key = (q_shape, q.strides, k.shape, k.strides, v_shape, v.strides, aligned, into, infos)
    of_kind = dtype, k.dtype, v.dtype, device_id
    latest = _latest_calls.get(options) if checked is None and options is not None else None
    if latest is not None and latest[0] == key and latest[1] == of_kind:
        prepared, call = latest[2], latest[3]
    else:
        found = _prepared_call(checked, key, of_kind, options, q_at)
        if found is None:
            return None
        prepared, call = found
    is_odd = aligned is not _ALIGNED or into is not None
    if is_odd and checked is None:
        inputs, begins = (q, k, v), (q_at, k_at, v_at, *addresses)
        if not _is_legal(call, inputs, begins, out):
            return None
    if infos and prepared.has_block_mask:
        lists = extras.arrays[_BLOCK_MASK].lists(call.variant)
        addresses = (*addresses[:_BLOCK_MASK], lists.data.ptr, *addresses[_BLOCK_MASK + 1 :])
    if extras.seed is not None:
        addresses = (*addresses, extras.seed)
    needs_memory = call.needs_memory
    if needs_memory and is_capturing():
        raise _cannot_be_captured(call, prepared, (q, k, v, out))
    made = out is None
    if made:
        out = _ndarray(call.shape, dtype)
    lse, lse_at = None, 0
    if return_lse:
        lse = _ndarray(call.lse_shape, np.float32)
        lse_at = lse.data.ptr
    if needs_memory:
        _run_with_memory(prepared, call, (q, k, v, out), made, lse_at, addresses)
    else:
        addresses = (q_at, k_at, v_at, out.data.ptr, lse_at, *addresses)
        try:
            call.launch(*addresses)
        except NotSetAsideError:
            other = prepared.fallback(key, q_at)
            if other is None:
                raise
            if other.needs_memory:
                raise _cannot_be_captured(other, prepared, (q, k, v, out)) from None
            other.launch(*addresses)
    if infos and prepared.layout == "thd" and has_gaps and (made or return_lse):
        most = prepared.problem.max_seqlen_q
        clear_rows(out if made else None, lse, extras.lengths[0], most)
    return (out, lse) if return_lse else out


def _prepared_call(
    checked: PreparedCalls | None, key: Key, of_kind: Key, options: int | None, address: int
) -> tuple[PreparedCalls, PreparedCall] | None:
    """Return the kind of a call, and the call as it was prepared once, or is now.

    Return None if the kind is not known, or the call is empty or may be illegal.

    Parameters
    ----------
    checked, options
        As in `_run_known`.
    key, address
        As in `PreparedCalls.prepare`.
    of_kind : tuple
        The dtypes of q, k and v, and the device.

    Raises
    ------
    ValueError
        The call was checked in full, but cannot be prepared.
    """
    q_shape, v_shape = key[0], key[4]
    if not (q_shape and v_shape):
        return None
    kind = checked or _prepared.get((*of_kind, q_shape[-1], v_shape[-1], options))
    if kind is None:
        return None
    try:
        call = kind.calls.get(key) or kind.prepare(key, address)
    except ValueError:
        if checked is None:
            return None
        raise
    if call is None:
        return None
    if options is not None:
        if len(_latest_calls) >= _OPTIONS:
            _latest_calls.clear()
        _latest_calls[options] = key, of_kind, kind, call
    return kind, call


def _described(extras: Extras, device_id: int) -> tuple[Key, Ints] | None:
    """Return what arrays are like, and their addresses; None if one is not allowed.

    A `BlockMask` is allowed in its own place only: elsewhere, a kind does not tell it from None.
    """
    infos: list[Any] = []
    addresses = []
    for i, array in enumerate(extras.flat):
        if array is None:
            info, address = None, 0
        elif isinstance(array, _ndarray):
            data, dtype = array.data, array.dtype
            address = data.ptr
            if data.device_id != device_id or address % dtype.itemsize:
                return None
            info = array.shape, array.strides, dtype
        else:
            kinds = getattr(array, "kinds", None) if i == _BLOCK_MASK else None
            if not isinstance(kinds, _ndarray) or kinds.data.device_id != device_id:
                return None
            info, address = array.key, 0
        infos.append(info)
        addresses.append(address)
    return tuple(infos), tuple(addresses)


def _is_legal(
    call: PreparedCall, inputs: tuple[Array, ...], addresses: Ints, out: Array | None
) -> bool:
    """Whether arrays begin at multiples of their elements, and `out` fits and overlaps none.

    `addresses` are those of q, k and v, which are the inputs, and then of extras.
    """
    if any(at % x.itemsize for at, x in zip(addresses, inputs, strict=False)):
        return False
    q = inputs[0]
    return out is None or (
        out.dtype == q.dtype
        and out.data.device_id == q.data.device_id
        and out.data.ptr % q.itemsize == 0
        and call.is_apart(out.data.ptr, *addresses)
    )


def _run_with_memory(
    prepared: PreparedCalls,
    call: PreparedCall,
    arrays: tuple[Array, ...],
    made: bool,
    lse_at: int,
    addresses: Ints,
) -> None:
    """Run a call on copies of its arrays, or with a workspace.

    Parameters
    ----------
    prepared : PreparedCalls
    call : PreparedCall
    arrays : tuple of array
        q, k, v and out.
    made : bool
        Whether `out` was made for the call; what it holds does not matter then.
    lse_at : int
        Address of the log-sum-exp, or 0.
    addresses : tuple of int
        Those of the extras.
    """
    given = dict(zip(prepared.names, arrays, strict=True))
    taken = dict(given)
    for name in call.copies:
        view = as_bhsd(given[name], prepared.layout)
        if name == "out":
            taken[name] = padded(view.shape, view.dtype, _ndarray)
            if not made and prepared.problem.kv == "Varlen":  # rows that no sequence has
                taken[name][...] = view
        else:
            taken[name] = copied(view, negate=name == "q" and prepared.problem.scale < 0)
    if call.workspace_floats:
        workspace = _ndarray(call.workspace_floats, np.float32)
        addresses = (workspace.data.ptr,)
    call.launch(*(array.data.ptr for array in taken.values()), lse_at, *addresses)
    if "out" in call.copies:
        as_bhsd(given["out"], prepared.layout)[...] = taken["out"]


def _cannot_be_captured(
    call: PreparedCall, prepared: PreparedCalls, arrays: tuple[Array, ...]
) -> ValueError:
    what, way_out = f"kernel: {call.variant.kernel} needs memory of its own", ""
    if call.copies:
        name, scale = call.copies[0], prepared.problem.scale
        array = arrays[prepared.names.index(name)]
        what = f"{name} (shape {array.shape}, strides {array.strides}) would be copied"
        way_out = "; give a contiguous array whose rows are a multiple of 16 bytes"
        if name == "q" and scale < 0:
            way_out = f"; scale is {scale}: give q with the other sign"
    return ValueError(
        f"{what}, for which a call that is captured into a CUDA graph has no place{way_out}"
    )
