"""Arrays next to q, k and v, which parts of a score read: slopes, biases, masks, sinks.

They are read where they are, with whatever strides. Along an axis that they lack, or of length 1,
all is the same. Arrays that a caller's own expressions read may have any axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Array, ArrayInfo, Ints, aligned_address, has_odd_stride, module_of
from cufa.checks import check_devices, shown_dtype
from cufa.features.expression.tracing import TracedFunctions
from cufa.features.part import Part
from cufa.features.parts import ARRAYS, PARTS, part_named
from cufa.features.user_functions import BLOCKS, Blocks, MaskMod
from cufa.problem.problem import Problem

_PARTS = {
    argument: {np.dtype(part.dtype): part for part in PARTS.values() if part.argument == argument}
    for argument in ARRAYS
}

#: Axes by their number: (b, hq, sq, sk), (b, sq, sk) or (sq, sk).
_PAIRS = {4: "bhqk", 3: "bqk", 2: "qk"}
_BLOCK_MASK = ARRAYS.index("block_mask")
_OF_BLOCKS = {"b": "sequences", "h": "heads", "q": "queries", "k": "keys"}

Sizes = Mapping[str, int]
"""Batch, query heads, queries and keys, by their letters: b, h, q and k."""


def arrays_of(arguments: Mapping[str, Any]) -> dict[str, Array | None]:
    """Return the arguments of a call that are arrays which parts of the score read."""
    return {name: arguments[name] for name in ARRAYS if name in arguments and name != "block_mask"}


class Extras(NamedTuple):
    """Arrays besides q, k and v that a kernel reads, or what each is like; None for none.

    Attributes
    ----------
    arrays : tuple
        All of `cufa.features.parts.ARRAYS`, or nothing if there is none of them.
    lengths : tuple
        Arrays that say how long sequences are, and where: ``lengths_k``, ``lengths_q``; or
        ``cu_seqlens_q``, ``cu_seqlens_k`` and ``seqused_k``; or the lengths and the block table of
        `decode`.
    mods : tuple
        Arrays that the caller's own functions read.
    seed : int or None
        The seed of a dropout.
    scales : tuple
        Scales of K and of V in 8 bits.
    """

    arrays: tuple[Any, ...] = ()
    lengths: tuple[Any, ...] = ()
    mods: tuple[Any, ...] = ()
    seed: int | None = None
    scales: tuple[Any, ...] = ()

    @property
    def flat(self) -> tuple[Any, ...]:
        """All arrays, in the order in which a launch is given their addresses."""
        return self.arrays + self.lengths + self.mods + self.scales

    @property
    def table(self) -> ArrayInfo | None:
        """The block table of `decode`."""
        tables = (info for info in self.lengths if info is not None and len(info.shape) == 2)
        return next(tables, None)

    @property
    def block_mask(self) -> Any:
        """The `cufa.BlockMask`, or None."""
        return self.arrays[_BLOCK_MASK] if self.arrays else None

    @property
    def infos(self) -> tuple[Any, ...]:
        """Shape, strides and dtype of each of `flat`, or the key of a `cufa.BlockMask`."""
        mask = self.block_mask
        return tuple(
            None if x is None else x.key if x is mask else (x.shape, x.strides, x.dtype)
            for x in self.flat
        )

    def addresses(self, tile: Any) -> Ints:
        """Return the address of each of `flat`, 0 for none, and the seed if there is one.

        Parameters
        ----------
        tile : object
            Has `bm` and `bn` of the kernel, for which a `cufa.BlockMask` makes lists.
        """
        mask = self.block_mask
        lists = None if mask is None else mask.lists(tile)
        arrays = (lists if x is mask else x for x in self.flat)
        found = (0 if x is None else aligned_address(x) for x in arrays)
        return *found, *(() if self.seed is None else (self.seed,))

    def described(self, infos: tuple[Any, ...]) -> Extras:
        """Return by name what each of `flat` is like."""
        named = tuple(
            ArrayInfo(*each) if each is not None and len(each) == _INFO else each for each in infos
        )
        lengths = len(self.arrays)
        mods = lengths + len(self.lengths)
        scales = mods + len(self.mods)
        return Extras(
            named[:lengths], named[lengths:mods], named[mods:scales], scales=named[scales:]
        )

    def place(self, which: int) -> int:
        """Return where in `flat` an array is; the seed is last.

        Parameters
        ----------
        which : int
            Its number if all of `cufa.features.parts.ARRAYS` come first; -1 is the seed.
        """
        return which if which < 0 or self.arrays else which - len(ARRAYS)


NO_EXTRAS = Extras()
_INFO = len(ArrayInfo._fields)  # a `BlockMask`'s key has more


def steps(part: Part, ndim: int, sizes: Sizes, shape: Ints, strides: Ints) -> Ints | None:
    """Return the steps of an array along the axes that its part knows, in bytes.

    Parameters
    ----------
    part : Part
    ndim : int
        Axes of q.
    sizes : mapping
    shape, strides : tuple of int
        Shape and strides of the array.

    Returns
    -------
    tuple of int or None
        0 along axes that make no difference; None for a shape that does not fit.
    """
    of_pairs = "q" in part.axes
    axes = _PAIRS.get(max(ndim, len(shape)), "") if of_pairs else part.axes
    first = len(axes) - len(shape)
    # An array with keys as bits, or with a number a head, has no missing axes.
    if not 0 <= first <= len(axes) - (not of_pairs or part.dtype == "uint8"):
        return None
    step_along = dict.fromkeys(part.axes, 0)
    for axis, n, step in zip(axes[first:], shape, strides, strict=True):
        bits = part.dtype == "uint8" and axis == "k"
        if n == (-(-sizes[axis] // 8) if bits else sizes[axis]):
            step_along[axis] = step
        elif n != 1 or bits or not of_pairs:
            return None
    return tuple(step_along.values())


def placed(reads: Sequence[str], ndim: int, sizes: Sizes, extras: Extras) -> tuple[Ints, ...]:
    """Return the numbers of the arrays that parts read.

    They are the last ones of `Part.numbers`: steps in elements, of arrays of a caller's own
    expressions in bytes, and 0 for addresses. In place of the steps of a `cufa.BlockMask`, which
    has others for each kernel, are the lengths of its axes.

    Parameters
    ----------
    reads : sequence of str
        The parts.
    ndim, sizes
        As in `steps`.
    extras : Extras
        Shapes, strides and dtypes of the arrays; the `key` of a `cufa.BlockMask`.

    Raises
    ------
    ValueError
        An array does not fit.
    """
    found: list[Ints] = []
    mods = iter(extras.mods)
    for name in reads:
        part = part_named(name)
        numbers: list[int] = []
        if part.source:
            for info in islice(mods, len(part.arrays)):
                _check_readable(part.argument, info, sizes)
                numbers += 0, *info.strides, *info.shape
        else:
            info = extras.arrays[ARRAYS.index(part.argument)]
            numbers += 0, *_steps_of(part, info, ndim, sizes)
        found.append(tuple(numbers))
    return tuple(found)


def _steps_of(part: Part, info: Any, ndim: int, sizes: Sizes) -> Ints:
    """Return the steps of an array that a part reads, or what `placed` has in their place."""
    if info is not None and part.name == BLOCKS and _unlike(info, sizes) is None:
        return info[0][:2]
    if info is not None and part.name != BLOCKS and not has_odd_stride(info):
        of_dtype, strides = _fitted(part.argument, info, ndim, sizes)
        if of_dtype is part:
            return tuple(step // info.dtype.itemsize for step in strides)
    raise ValueError(f"{part.argument} does not fit")


def _check_readable(name: str, array: Array | ArrayInfo, sizes: Sizes) -> None:
    """Refuse an array that no expression can read."""
    complaint = ""
    if 0 in array.shape and 0 not in sizes.values():
        complaint = "there is nothing to read"
    elif any(n >= 2**31 for n in array.shape):
        complaint = "no axis may be longer than 2147483647"
    elif has_odd_stride(array):
        complaint = f"strides {array.strides} must be multiples of an element"
    if complaint:
        raise ValueError(f"{name} has shape {array.shape}: {complaint}")


def _unlike(key: Any, sizes: Sizes) -> tuple[str, int] | None:
    """Return the axis on which a `cufa.BlockMask` differs from a call, and its size; or None.

    Parameters
    ----------
    key : tuple
        As in `BlockMask`.
    sizes : mapping
    """
    (batch, heads, _, _), _, seq_q, seq_kv, depends_on = key
    for axis, n in zip("bhqk", (batch, heads, seq_q, seq_kv), strict=True):
        is_for_all = n == 1 and axis in "bh" and axis not in depends_on
        if n != sizes[axis] and not is_for_all:
            return axis, n
    return None


def with_block_mask(problem: Problem, block_mask: Any, xp: ModuleType) -> Problem:
    """Return the problem of a call that has a `cufa.BlockMask`, if that fits its other arguments.

    Raises
    ------
    TypeError
        Its arrays are of another kind.
    ValueError
        Sizes or the device differ.
    """
    if module_of("block_mask", block_mask.kinds) is not xp:
        raise TypeError(f"block_mask must be of {xp.__name__} arrays, as q is")
    difference = _unlike(block_mask.key, problem.sizes)
    if difference is not None:
        axis, has = difference
        needed = problem.sizes[axis]
        if has != 1 or axis not in "bh":
            raise ValueError(f"block_mask has {has} {_OF_BLOCKS[axis]}, but the call has {needed}")
        name = "batch" if axis == "b" else "heads"
        raise ValueError(
            f"block_mask was made with {name}=1, and its mask_mod depends on {axis}, but the call "
            f"has {needed}: make it with {name}={needed}"
        )
    check_devices({"block_mask": block_mask.kinds}, xp)
    # On the CPU, or where all is seen, or nothing
    if problem.of(MaskMod) is None or problem.seq_kv == 0:
        return problem
    return problem.having(Blocks())


def check_function_arrays(
    functions: TracedFunctions, sizes: Sizes, xp: ModuleType, why: str
) -> None:
    """Refuse arrays that a caller's functions cannot read; as `parse_score_arrays`."""
    for name, array in zip(functions.names, functions.arrays, strict=True):
        if module_of(name, array) is not xp:
            raise TypeError(f"{name} must be a {xp.__name__} array, {why}")
        check_devices({name: array}, xp)
        _check_readable(name, array, sizes)


def parse_score_arrays(
    arrays: Mapping[str, Array | None],
    functions: TracedFunctions,
    ndim: int,
    sizes: Sizes,
    xp: ModuleType,
) -> tuple[tuple[str, ...], dict[str, Array]]:
    """Check the arrays next to q, k and v.

    Parameters
    ----------
    arrays : mapping
        By argument; None where there is none.
    functions : TracedFunctions
    ndim, sizes
        As in `steps`.
    xp : module
        The module that q, k and v belong to.

    Returns
    -------
    tuple of str
        The parts that read them, and the call's own.
    dict
        NumPy arrays as views whose axes are those of the part.

    Raises
    ------
    TypeError
        For what is no array of `xp`, and for dtypes that no part reads.
    ValueError
        For shapes and devices that do not fit.
    """
    reads: list[str] = []
    views: dict[str, Array] = {}
    for argument in ARRAYS:
        array = arrays.get(argument)
        if array is None:
            continue
        if module_of(argument, array) is not xp:
            raise TypeError(f"{argument} must be a {xp.__name__} array, as q is")
        part, strides = _fitted(argument, array, ndim, sizes)
        check_devices({argument: array}, xp)
        if xp is np:
            if part.dtype == "uint8":
                _check_bits(argument, array, sizes["k"])
            views[argument] = _spread(np.asarray(array), part, strides, sizes, np)
        reads.append(part.name)
    check_function_arrays(functions, sizes, xp, "as q is")
    return (*reads, *functions.parts), views


def _fitted(argument: str, array: Array | ArrayInfo, ndim: int, sizes: Sizes) -> tuple[Part, Ints]:
    """Return the part that reads an array, and what `steps` returns, if the array fits."""
    parts = _PARTS[argument]
    part = parts.get(array.dtype)
    if part is None:
        needed = " or ".join(dtype.name for dtype in parts)
        raise TypeError(
            f"{argument} has dtype {shown_dtype(array.dtype)}: {needed} is needed"
            f"{_other_mask(array.dtype) if argument == 'mask' else ''}"
        )
    strides = steps(part, ndim, sizes, array.shape, array.strides)
    if strides is None:
        raise ValueError(f"{argument} has shape {array.shape}: {_needed(part, ndim, sizes)}")
    return part, strides


def _other_mask(dtype: np.dtype) -> str:
    """Return what to do with a mask of another library, for the end of a message."""
    if dtype.kind in "iu":
        return ", such as mask != 0"
    return "; a mask that is added to the scores is a bias" if dtype.kind in "fV" else ""


def _check_bits(argument: str, array: np.ndarray, keys: int) -> None:
    """Refuse packed bits beyond the last key, as uint8 with an element for each key has."""
    if keys % 8 and (array[..., -1] & (0xFF >> keys % 8)).any():
        raise ValueError(
            f"{argument} has bits beyond the last of {keys} keys: uint8 holds eight keys a byte, "
            f"as numpy.packbits packs them; of an element a key, {argument}.astype(bool) is needed"
        )


def all_axes(argument: str, array: Array, ndim: int, sizes: Sizes, xp: Any) -> Array:
    """Return a view of an array that fits whose axes are those of its part.

    Parameters
    ----------
    argument : str
    array : array
    ndim, sizes
        As in `steps`.
    xp : module
        Module of the array.
    """
    return _spread(array, *_fitted(argument, array, ndim, sizes), sizes, xp)


def _spread(array: Array, part: Part, strides: Ints, sizes: Sizes, xp: Any) -> Array:
    as_strided = xp.lib.stride_tricks.as_strided
    view: Array = as_strided(array, _lengths(part, part.axes, sizes), strides)
    if xp is np:
        view.flags.writeable = False
    return view


def _lengths(part: Part, axes: str, sizes: Sizes) -> list[int]:
    """Return the lengths of a part's array along axes."""
    shape = [sizes[axis] for axis in axes]
    if part.dtype == "uint8":
        shape[-1] = -(-shape[-1] // 8)
    return shape


def _needed(part: Part, ndim: int, sizes: Sizes) -> str:
    axes = _PAIRS[ndim] if "q" in part.axes else part.axes
    shape = tuple(_lengths(part, axes, sizes))
    if part.axes == "bh":
        return f"({shape[1]},) or {shape} is needed"
    if part.axes == "h":
        return f"{shape} is needed"
    if part.dtype == "uint8":
        return f"{shape} is needed: packed bits, along all keys; or bool, an element a key"
    ways = f"a shape that broadcasts to {shape} is needed"
    if part.argument == "mask" and ndim == 4:
        ways += "; a padding mask (batch, keys) is mask[:, None, None]"
    return ways
