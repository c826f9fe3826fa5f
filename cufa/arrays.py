"""Arrays of a call: their kind, 4-D views, the memory that they take, copies that a kernel needs.

CuPy is not imported before an array of it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

#: A NumPy or a CuPy array inside the package, where no type checker tells them apart.
Array = Any


class CuPyArray(Protocol):
    """A CuPy array as type checkers see it: CuPy is optional, and has no types of its own."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return its address and layout."""

    @property
    def shape(self) -> Ints:
        """Return the length of each axis."""

    @property
    def dtype(self) -> np.dtype:
        """Return the type of an element."""

    def get(self) -> np.ndarray:
        """Return a copy on the host."""


#: An array that a public function takes.
AnyArray = np.ndarray | CuPyArray

#: The array whose kind the result has: ``numpy.ndarray``, of any shape and dtype, or CuPy's.
ArrayT = TypeVar("ArrayT", np.ndarray, CuPyArray)

Ints = tuple[int, ...]

ALIGNMENT = 16
"""Bytes that are copied at once: the rows that kernels read begin at multiples of it."""

#: Steps that NumPy's exact overlap solver may take (well under 1 ms). Views of one regular buffer
#: need a handful; what it cannot decide by then counts as overlapping.
_OVERLAP_WORK: Any = 10_000  # NumPy's stub knows only its two special values


class ArrayInfo(NamedTuple):
    """Shape, strides and dtype of an array, without its address."""

    shape: Ints
    strides: Ints
    dtype: np.dtype


class Operands(NamedTuple):
    """The arrays of a call as 4-D (batch, heads, seq, head_dim) views; `out` may be None.

    `score_arrays` are the arrays that parts of the score read, by argument, with all of the part's
    axes, on the CPU only. `seed` is that of a dropout. `lengths` are the arrays that say how long
    sequences are, by argument, in order. `scales` are those of K and of V in a cache of 8 bits,
    (batch, heads, capacity), or (pages, heads, page_size).
    """

    q: Array
    k: Array
    v: Array
    out: Array
    score_arrays: Mapping[str, Array] = MappingProxyType({})
    seed: int = 0
    lengths: Mapping[str, Array | None] = MappingProxyType({})
    scales: tuple[Array, ...] = ()


# --- kinds and views ---


def module_of_all(arrays: Mapping[str, Array]) -> ModuleType:
    """Find the module, numpy or cupy, that all arrays of a call belong to, given by name.

    Raises
    ------
    TypeError
        For an object that is neither a NumPy nor a CuPy array, for a masked array (its mask would
        be ignored), and when the two kinds are mixed.
    """
    (first, reference), *others = arrays.items()
    module = module_of(first, reference)
    for name, array in others:
        other = module_of(name, array)
        if other is not module:
            raise TypeError(
                f"{name} is a {other.__name__} array, but {first} is a {module.__name__} array: "
                "all arrays of a call must be of one kind"
            )
    return module


def check_unmasked(name: str, values: object) -> None:
    """Raise TypeError for a NumPy array with a mask."""
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array: its mask would be ignored; give its filled(...) instead"
        )


def module_of(name: str, array: Array) -> ModuleType:
    """Return numpy or cupy for one array of a call; as `module_of_all`."""
    if isinstance(array, np.ndarray):
        check_unmasked(name, array)
        return np
    # No `ndarray` yet while another thread is still importing CuPy.
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return cupy
    raise TypeError(
        f"{name} must be a NumPy or a CuPy array, not {type(array).__name__}{_way_out(name, array)}"
    )


def _way_out(name: str, array: object) -> str:
    """Return how an array of another kind becomes one of NumPy or CuPy."""
    if not hasattr(array, "__dlpack__"):  # PyTorch's tensors have a dequantize, too
        if hasattr(array, "host_lengths"):
            return (
                f": {name}.layer() returns a cache's keys and values; {name}.decode(q) reads them"
            )
        return f": {name}.dequantize() is one" if hasattr(array, "dequantize") else ""
    of, back = "x.detach()" if getattr(array, "requires_grad", False) else "x", ""
    if "bfloat16" in str(getattr(array, "dtype", "")):  # which DLPack has not for NumPy
        of, back = f"{of}.view(torch.uint16)", ".view(ml_dtypes.bfloat16)"
    calls = " or ".join(f"{module}.from_dlpack({of}){back}" for module in ("numpy", "cupy"))
    return f": {calls} shares its memory"


def as_bhsd(array: Array, layout: str) -> Array:
    """View an array of rank 2 to 4 as (batch, heads, seq, head_dim); missing axes have length 1.

    With layout "thd" the array is (tokens, heads, head_dim), and the batch has length 1.
    """
    if layout == "thd":
        return array.swapaxes(0, 1)[None]
    if array.ndim == 2:
        return array[None, None]
    if array.ndim == 3:
        return array[:, None]
    return array if layout == "bhsd" else array.swapaxes(1, 2)


# --- memory ---


def aligned_address(array: Array) -> int:
    """Return the address of a CuPy array, which must be a multiple of an element."""
    address = int(array.data.ptr)
    if address % array.itemsize:
        raise ValueError(
            f"an array of {array.dtype} begins within an element, at {address:#x}: give a copy"
        )
    return address


def extent(shape: Ints, strides: Ints, itemsize: int) -> tuple[int, int]:
    """Return where an array's memory begins and ends, in bytes from its first element."""
    if 0 in shape:
        return 0, 0
    reaches = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    return sum(min(0, x) for x in reaches), sum(max(0, x) for x in reaches) + itemsize


def has_odd_stride(array: Array | ArrayInfo) -> bool:
    """Whether a stride is no multiple of an element, along an axis that has several."""
    steps = zip(array.shape, array.strides, strict=True)
    return any(n > 1 and step % array.dtype.itemsize for n, step in steps)


def overlaps_itself(shape: Ints, strides: Ints, itemsize: int) -> bool:
    """Whether elements may share memory: no order of the axes nests them without touching.

    Sufficient for every view that slicing, transposing and reshaping can make.
    """
    if 0 in shape:
        return False
    reach = itemsize
    axes = [(abs(t), n) for n, t in zip(shape, strides, strict=True) if n > 1]
    for step, n in sorted(axes):
        if step < reach:
            return True
        reach += (n - 1) * step
    return False


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays share an element; interleaved views do not."""
    if isinstance(a, np.ndarray) is not isinstance(b, np.ndarray):
        return False
    if not isinstance(a, np.ndarray):
        a, b = (np.asarray(_AddressOnly(array)) for array in (a, b))
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


def bounds(array: Array) -> tuple[int, int]:
    """Return the first address of a CuPy array's elements, and the one after their last."""
    low, high = extent(array.shape, array.strides, array.itemsize)
    address = array.data.ptr
    return address + low, address + high


class _AddressOnly:
    """The addresses of a CuPy array for `numpy.shares_memory`, which computes with them only."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "data": (array.data.ptr, False),
        }


# --- what the kernels take as it is, and copies of the rest ---


def readable(
    shape: Ints, strides: Ints, itemsize: int, tma: bool = False, repeats: bool = False
) -> bool:
    """Whether kernels read a 4-D array as it is, if its address is a multiple of `ALIGNMENT`.

    Rows must be contiguous, aligned, and made of whole chunks of `ALIGNMENT` bytes.

    Parameters
    ----------
    shape, strides : tuple of int
        (batch, heads, seq, head_dim), and the steps between them in bytes.
    itemsize : int
    tma : bool
        Whether it is read through tensor maps, which take positive strides only.
    repeats : bool
        Whether the kernel stays in its place where the stride along batch or heads is 0: for K and
        V it does.
    """
    if 0 in shape:
        return True
    if shape[3] * itemsize % ALIGNMENT or strides[3] != itemsize:
        return False
    for axis, (n, step) in enumerate(zip(shape[:3], strides[:3], strict=True)):
        if n > 1 and step % ALIGNMENT:
            return False
        if n > 1 and tma and (step < 0 or (step == 0 and not (repeats and axis < 2))):
            return False
    return True


def as_readable(view: Array, tma: bool = False, repeats: bool = False) -> Array:
    """Return a 4-D CuPy array as kernels read it, or else a copy; arguments as in `readable`."""
    aligned = view.data.ptr % ALIGNMENT == 0
    if aligned and readable(view.shape, view.strides, view.itemsize, tma, repeats):
        return view
    return copied(view)


def copied(view: Array, negate: bool = False) -> Array:
    """Copy a 4-D CuPy array, or its negative, to memory of its own that kernels can read."""
    import cupy

    whole = view.shape[3] * view.itemsize % ALIGNMENT == 0
    copy = padded(view.shape, view.dtype, cupy.empty if whole else cupy.zeros)
    if negate:
        cupy.negative(view, out=copy)
    else:
        copy[...] = view
    return copy


def padded(shape: Ints, dtype: np.dtype, make: Callable[..., Array]) -> Array:
    """Return a 4-D array in new memory whose rows are whole chunks of `ALIGNMENT` bytes.

    Kernels can write it, and can read it if `make` fills the rest of the last chunks with zeros.
    """
    columns = whole_chunks(shape[3], dtype.itemsize)
    return make((*shape[:3], columns), dtype)[..., : shape[3]]


def whole_chunks(columns: int, itemsize: int) -> int:
    """Round the length of a row up to whole chunks of `ALIGNMENT` bytes."""
    step = ALIGNMENT // itemsize
    return -(-columns // step) * step
