"""`merge`: attention over a set of keys from attention over its parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cufa.api.options import Layout
from cufa.arrays import AnyArray, Array, ArrayT, as_bhsd, module_of, module_of_all
from cufa.checks import (
    check_devices,
    check_dtype,
    check_dtypes,
    check_layout,
    check_out,
    shown_dtype,
)
from cufa.cpu import merge as cpu
from cufa.launch import merge as launch
from cufa.specs.spec import MAX_HEAD_DIM

_MAX_ROWS = 2**31 - 1  # 32-bit numbers in the kernel


def merge(
    outs: Sequence[ArrayT] | ArrayT,
    lses: Sequence[AnyArray] | AnyArray,
    *,
    layout: Layout = "bhsd",
    out: AnyArray | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Merge results of attention over disjoint sets of keys into attention over all keys.

    Parameters
    ----------
    outs : sequence of arrays (b, h, s, dv), or array with the parts along its first axis
        The results of `attention` or `decode`, all of one shape and dtype: any number from 1 on,
        in float16, bfloat16 (`ml_dtypes.bfloat16`) or float32. 3-D (b, s, dv) and 2-D (s, dv)
        results stand for missing axes, as there. dv is 1 to 256. Any strides.
    lses : sequence of arrays (b, h, s), or array with the parts along its first axis
        Their log-sum-exps, natural logarithms, float32, one for each of `outs`, without the
        axes that these miss.
    layout : {"bhsd", "bshd"}
        Order of the axes of 4-D results; log-sum-exps are (b, h, s) in either.
    out : array, optional
        Where the result goes: of its shape, sharing no memory with the inputs, in float16, bfloat16
        or float32 whatever dtype the parts have.

    Returns
    -------
    out : array
        In the shape and dtype of the parts, or `out`; sums are float32.
    lse : array, float32
        The log-sum-exp over all keys, in the shape of those of the parts.

    Raises
    ------
    TypeError
        Dtypes that are not supported or not the same, objects that are no arrays, NumPy mixed with
        CuPy.
    ValueError
        No parts, or not as many `outs` as `lses`; shapes, layout, devices or `out` that do not fit.
    CompileError
        NVRTC refused a kernel.

    Notes
    -----
    The queries of all parts are the same. A part whose log-sum-exp is -inf has seen no key, and its
    result is not read. If all are -inf, the result is 0 and -inf. Parts whose log-sum-exp is +inf
    outweigh all others, and share the weight evenly. NaN makes NaN. Give `sinks` to one part only.

    If a bias of -1e9 hides a row in a part, its log-sum-exp is near -1e9, where float32 rounds to
    multiples of 64. The result is right if another part has usual scores, but not if all parts hide
    the row: hide keys by `mask` instead, whose log-sum-exp is -inf.

    The formula is that of FlashAttention-2 (Dao 2023, section 2.3.1).

    Examples
    --------
    A prefix that three sequences share, and the other keys of each sequence:

    >>> import numpy as np, cufa
    >>> q = np.ones((3, 8, 1, 64), np.float32)
    >>> prefix, rest = np.ones((1, 8, 500, 64), np.float32), np.ones((3, 8, 20, 64), np.float32)
    >>> together = q.reshape(1, 3, 8, 64).swapaxes(1, 2)
    >>> a, a_lse = cufa.attention(together, prefix, prefix, return_lse=True)
    >>> b, b_lse = cufa.decode(q, rest, rest, return_lse=True)
    >>> a, a_lse = a.swapaxes(1, 2).reshape(q.shape), a_lse.swapaxes(1, 2).reshape(3, 8, 1)
    >>> cufa.merge([a, b], [a_lse, b_lse])[0].shape
    (3, 8, 1, 64)
    """
    check_layout(layout)
    arrays: dict[str, Array] = _parts("outs", outs)
    of_lses: dict[str, Array] = _parts("lses", lses)
    if len(arrays) != len(of_lses):
        raise ValueError(
            f"lses has {len(of_lses)} parts, but outs has {len(arrays)}: as many are needed"
        )
    named = {**arrays, **of_lses, **({} if out is None else {"out": out})}
    xp = module_of_all(named)
    if xp is np:
        named = {name: np.asarray(array) for name, array in named.items()}
        arrays, of_lses = ({n: named[n] for n in names} for names in (arrays, of_lses))
    _check(arrays, of_lses, layout)
    check_devices(named, xp)
    first, first_lse = arrays["outs[0]"], of_lses["lses[0]"]
    if xp is not np and first_lse.size > _MAX_ROWS:
        raise ValueError(f"outs[0] has shape {first.shape}: more rows than {_MAX_ROWS}")
    result: Array = named.get("out")
    if result is None:
        result = xp.empty(first.shape, first.dtype)
    else:
        check_dtype("out", result)
        check_out(result, first.shape, {**arrays, **of_lses})
    lse = xp.empty(first_lse.shape, np.float32)
    views = [as_bhsd(array, layout) for array in arrays.values()]
    lse_views = [as_bhsd(x[..., None], "bhsd")[..., 0] for x in (*of_lses.values(), lse)]
    run = cpu.merge if xp is np else launch.merge
    run(views, lse_views[:-1], as_bhsd(result, layout), lse_views[-1])
    return result, lse


def _parts(name: str, parts: Sequence[Array] | Array) -> dict[str, Array]:
    """Return the parts with names for messages."""
    if not isinstance(parts, (list, tuple)):
        module_of(name, parts)
        if len(np.shape(parts)) == 0:
            raise ValueError(f"{name} has shape (): its first axis must be the parts")
    if len(parts) == 0:
        raise ValueError(f"{name} has no parts")
    return {f"{name}[{i}]": each for i, each in enumerate(parts)}


def _check(outs: dict[str, Array], lses: dict[str, Array], layout: str) -> None:
    """Check dtypes and shapes."""
    check_dtypes(outs)
    shape = outs["outs[0]"].shape
    if len(shape) not in (2, 3, 4):
        raise ValueError(f"outs[0] has shape {shape}: 2 to 4 axes are needed")
    if not 1 <= shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(
            f"outs[0] has shape {shape}: head_dim must be 1 to {MAX_HEAD_DIM}, not {shape[-1]}"
        )
    lse_shape = shape[:-1]
    if len(shape) == 4 and layout == "bshd":
        lse_shape = (shape[0], shape[2], shape[1])
    for arrays, needed in ((outs, shape), (lses, lse_shape)):
        for name, array in arrays.items():
            if array.shape != needed:
                raise ValueError(
                    f"{name} has shape {array.shape}, but {needed} is needed (outs[0] {shape})"
                )
    for name, array in lses.items():
        if array.dtype != np.float32:
            raise TypeError(f"{name} has dtype {shown_dtype(array.dtype)}: float32 is needed")
