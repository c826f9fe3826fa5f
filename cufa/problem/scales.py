"""Caches of 8 bits: their dtypes, and the scales that make numbers of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cufa.arrays import Array, ArrayInfo, Ints, has_odd_stride
from cufa.checks import shown_dtype
from cufa.quantized.e4m3 import E4M3

_OF_8_BITS = {
    E4M3: "float8_e4m3fn",
    np.dtype(np.uint8): "float8_e4m3fn",  # its bytes: CuPy has no such type
    np.dtype(np.int8): "int8",
}

SCALES = ("k_scale", "v_scale")
"""The arguments of `decode` that are scales."""

_CACHES = ("k_cache", "v_cache")


def check_scaled(caches: Mapping[str, Array], scales: Mapping[str, Array]) -> str | None:
    """Return the dtype of caches of 8 bits, and None for caches of q's dtype.

    Parameters
    ----------
    caches : mapping
        ``k_cache`` and ``v_cache``, of four axes.
    scales : mapping
        Those that the caller gives, by argument.

    Raises
    ------
    TypeError
        Caches of 8 bits differ in dtype, or scales are no float32.
    ValueError
        Caches of 8 bits lack a scale, or others have one; scales have other axes than their cache
        has in front of its last.
    """
    k, v = (caches[name].dtype for name in _CACHES)
    dtype = _OF_8_BITS.get(k)
    if dtype is None and v not in _OF_8_BITS:
        for name in scales:
            raise ValueError(
                f"{name} must be None where k_cache has dtype {shown_dtype(k)}: scales are for "
                f"caches of 8 bits, {_dtypes()}"
            )
        return None
    if k != v:
        raise TypeError(
            f"v_cache has dtype {shown_dtype(v)}, but k_cache has dtype {shown_dtype(k)}: "
            f"caches of 8 bits must both have the same, one of {_dtypes()}"
        )
    for name, cache in zip(SCALES, _CACHES, strict=True):
        if name not in scales:
            raise ValueError(
                f"{name} is needed where {cache} has dtype {shown_dtype(k)}: float32, one scale "
                f"for each key and K/V head, {cache}.shape[:3]; scales() of a KVCache returns them"
            )
        scale, shape = scales[name], caches[cache].shape
        if scale.dtype != np.float32:
            raise TypeError(
                f"{name} has dtype {shown_dtype(scale.dtype)}, but float32 is needed: "
                f"{name}.astype(numpy.float32) converts it"
            )
        if scale.shape != shape[:3]:
            raise ValueError(
                f"{name} has shape {scale.shape}, but {cache} has shape {shape}: one scale for "
                f"each key and K/V head, {shape[:3]}, is needed"
            )
    return dtype


def scale_infos(
    scales: tuple[ArrayInfo | None, ...], shapes: tuple[Ints, ...], layout: str
) -> tuple[ArrayInfo, ...]:
    """Return shape and strides of scales with the axes (batch, heads, seq).

    Parameters
    ----------
    scales : tuple of ArrayInfo
        Those of K and of V as the caller has them.
    shapes : tuple of tuple of int
        Those of K and V, (batch, heads, seq, head_dim).
    layout : str

    Raises
    ------
    ValueError
        They do not fit, as `check_scaled` says in words.
    """
    found = []
    order = (0, 1, 2) if layout == "bhsd" else (0, 2, 1)
    for info, shape in zip(scales, shapes, strict=True):
        if info is None or len(info.shape) != len(order):
            raise ValueError("scales need three axes")
        of, steps = (tuple(each[axis] for axis in order) for each in info[:2])
        if of != shape[:3] or has_odd_stride(info):
            raise ValueError(f"scales of shape {of} and strides {steps} are not of {shape}")
        found.append(ArrayInfo(of, steps, info.dtype))
    return tuple(found)


def _dtypes() -> str:
    return ", ".join(dtype.name for dtype in _OF_8_BITS)
