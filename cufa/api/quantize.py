"""`quantize`: arrays in 8 bits, for `attention`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from cufa.arrays import AnyArray, Array, as_bhsd, module_of
from cufa.checks import check_devices, check_dtype, check_flag, check_seed
from cufa.cpu import quantize as cpu
from cufa.launch import quantize as launch
from cufa.launch.calls import on_device
from cufa.problem.lengths import OFFSETS, check_integers, check_offsets
from cufa.quantized.axes import check_axes
from cufa.quantized.quantized import Quantized, unchecked
from cufa.quantized.scales import check_granularity, check_sequences
from cufa.quantized.sequences import laid_out
from cufa.quantized.transposed import transposed as in_blocks

Granularity = Literal["block", "head", "tensor"]


def quantize(
    x: AnyArray,
    *,
    granularity: Granularity = "block",
    block: int | None = None,
    hadamard: bool = False,
    seed: int = 0,
    smooth: bool = False,
    transposed: bool = False,
    layout: Literal["bhsd", "bshd", "thd"] = "bhsd",
    cu_seqlens: AnyArray | None = None,
) -> Quantized:
    """Quantize queries, keys or values to 8-bit floating point (e4m3) with float32 scales.

    `cufa.attention` takes the results in place of q, k and v. For `cufa.decode`, use a cache with
    ``dtype="fp8"`` or ``"int8"``.

    Parameters
    ----------
    x : array, shape (b, h, s, d)
        float16, bfloat16 or float32; or (b, s, d) or (s, d), as `cufa.attention` takes them. d is 1
        to 256. Any strides.
    granularity : {"block", "head", "tensor"}
        The rows that share a scale: a block of rows of a head, all rows of a head, or the whole
        array.
    block : int, optional
        Rows of a block: a power of two, 16 to 1024; 128 by default. With `cu_seqlens` 128 at most.
        On a GPU `attention` needs 128 or more for keys and values.
    hadamard : bool
        Whether to multiply columns by random signs and to apply an orthonormal Hadamard transform
        to each row, which spreads outliers over all columns. Queries and keys need the same
        transform: the products of their rows then stay the same. Values take none.
    seed : int
        The seed of the signs, 0 to 2^64 - 1.
    smooth : bool
        Whether to subtract the mean of each column of a head, for keys that have columns with a
        large mean. A mean of 2^102 or more counts as 0. `attention` adds the product of query and
        mean to the scores in float32, so that results and the log-sum-exp are those of the keys
        with their mean. NumPy arrays only.
    transposed : bool
        Whether to store values in the order that 8-bit tensor cores read; `Quantized` describes it.
        `attention` on a GPU then does not transpose them in each call. Must be False for queries
        and keys.
    layout : {"bhsd", "bshd", "thd"}
        Order of the axes of 4-D arrays; "thd" is for the 3-D arrays (tokens, heads, d) of
        `cufa.attention_varlen`.
    cu_seqlens : array, shape (sequences + 1,), of integers, optional
        Where sequences begin in an array of layout "thd", as `cufa.attention_varlen` takes it:
        `cu_seqlens_q` for queries, and `cu_seqlens_k` for keys and values. Each sequence then
        begins a new block, so that no two share the scale of a block. On a GPU `attention_varlen`
        needs it. A NumPy or CuPy array.

    Returns
    -------
    Quantized
        A scale is the largest magnitude of its rows, after the transform, divided by 448: 2^-126 or
        more, and 1 where all are 0. Numbers are rounded to the nearest, ties to even.

    Raises
    ------
    TypeError, ValueError
        Dtypes, shapes and arguments that do not fit; CuPy arrays with `smooth`, or on a GPU below
        compute capability 8.9; in a capture into a CUDA graph, rows that are not aligned to 16
        bytes or have no multiple of 8 columns, scales of more than 128 rows, and offsets that are
        not contiguous int32 on the device.

    Notes
    -----
    Without a transform, CuPy and NumPy arrays give the same bits, except for numbers below 2^-126,
    which are 0 on a GPU. The sums of a transform are rounded in another order there: scales differ
    in the last bits, and a number between two of e4m3 may become either. float32 numbers then lose
    what they hold below 2^-133.

    NaN and infinities become NaN, and do not change scales. With a transform, NaN fills all columns
    that are transformed together with it. A query that sees such a key gets NaN.

    Rows are stored with 64, 96, 128, 192 or 256 columns; zeros fill a shorter row first. All
    columns are transformed together, except that 96 are three parts of 32, and 192 three of 64.
    float32 numbers beyond 2^119 may overflow in the transform, and then count as infinite.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> k = np.random.default_rng(0).standard_normal((1, 2, 300, 64), np.float32)
    >>> k8 = cufa.quantize(k, hadamard=True)
    >>> k8.values.shape, k8.values.dtype.name, k8.scales.shape
    ((1, 2, 300, 64), 'float8_e4m3fn', (1, 2, 3))
    >>> bool(np.abs(k8.dequantize() - k).max() < 0.2)
    True
    """
    how = granularity, block, hadamard, seed, smooth, transposed, layout
    made, launches = prepare("x", x, *how, cu_seqlens)
    launch.run(launches)
    return made


def prepare(
    name: str,
    x: Array,
    granularity: str = "block",
    block: int | None = None,
    hadamard: bool = False,
    seed: int = 0,
    smooth: bool = False,
    transposed: bool = False,
    layout: str = "bhsd",
    cu_seqlens: Array | None = None,
    used: Array | None = None,
) -> tuple[Quantized, list[launch.Launches]]:
    """Do what `quantize` does, but on a GPU return the launches in place of launching them.

    Errors name the array and its `OFFSETS`. `used` says how many rows of each sequence count: the
    others become zeros, whatever they hold. It has been checked, and is int32 on a GPU.
    """
    xp = module_of(name, x)
    check_dtype(name, x)
    check_axes(name, x.shape, layout)
    rows = check_granularity(granularity, block)
    check_flag("smooth", smooth)
    transposed = check_flag("transposed", transposed)
    how = granularity, rows, check_flag("hadamard", hadamard), check_seed(seed)
    launches: list[launch.Launches] = []
    if cu_seqlens is not None:
        check_sequences(OFFSETS[name], layout, rows, smooth)
        cu_seqlens = _offsets(OFFSETS[name], cu_seqlens, x.shape[0], xp)
    if xp is not np:
        check_devices({name: x}, xp)
        if smooth:
            raise ValueError(
                f"smooth must be False for CuPy arrays: cupy.asnumpy({name}) makes a NumPy array"
            )
        four = as_bhsd(x, layout)
        its = launch.prepare(name, four, *how, transposed, cu_seqlens, used)
        values, scales, mean = its.values, its.scales, None
        launches.append(its)
    else:
        four = as_bhsd(np.asarray(x), layout)
        if cu_seqlens is not None:
            four, used = laid_out(four, cu_seqlens, used), None
        values, scales, mean = cpu.quantize(four, *how, smooth, used)
        if transposed:
            values = in_blocks(values.view(np.uint8), np).view(values.dtype)
    made = unchecked(
        values=values,
        scales=scales,
        shape=x.shape,
        dtype=x.dtype,
        **dict(zip(("granularity", "block", "hadamard", "seed"), how, strict=True)),
        layout=layout,
        mean=mean,
        transposed=transposed,
        cu_seqlens=cu_seqlens,
    )
    return made, launches


def _offsets(name: str, cu_seqlens: Any, tokens: int, xp: Any) -> Array:
    """Return where sequences begin as an int32 array of a module."""
    module_of(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.size < 1:
        raise ValueError(f"{name} has shape {cu_seqlens.shape}, but (sequences + 1,) is needed")
    check_integers(name, cu_seqlens, cu_seqlens.shape, xp)
    if isinstance(cu_seqlens, np.ndarray):
        check_offsets(name, cu_seqlens, tokens)
    return np.array(cu_seqlens, np.int32) if xp is np else on_device(name, cu_seqlens)
