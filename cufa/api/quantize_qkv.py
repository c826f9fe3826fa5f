"""`quantize_qkv`: queries, keys and values in 8 bits, together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cufa.api.quantize import Granularity, prepare
from cufa.arrays import AnyArray, Array, module_of_all
from cufa.checks import check_flag
from cufa.launch import quantize as launch
from cufa.quantized.quantized import Quantized


def quantize_qkv(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    granularity: Granularity = "block",
    block: int | None = None,
    hadamard: bool = True,
    seed: int = 0,
    layout: Literal["bhsd", "bshd", "thd"] = "bhsd",
    cu_seqlens_q: AnyArray | None = None,
    cu_seqlens_k: AnyArray | None = None,
) -> tuple[Quantized, Quantized, Quantized]:
    """Quantize queries, keys and values for `attention`, as ``precision="fp8"`` does.

    The results are those of `quantize`: q and k with `hadamard`, v with ``transposed=True``. With
    blocks of 128 rows or fewer the launches overlap on Hopper and later, in the legacy default
    stream and in captures, so that the call takes less time than three calls of `quantize`. It can
    be captured into a CUDA graph where `quantize` can.

    Parameters
    ----------
    q : array, shape (b, h, s, d)
        float16, bfloat16 or float32; see `quantize` for other numbers of axes.
    k, v : array, shape (b, h_kv, s_kv, d)
        v may have its own head dim.
    granularity, block, seed, layout
        As in `quantize`, for all three. On a GPU `attention` needs blocks of 128 rows or more.
    hadamard : bool
        Whether q and k are transformed, as in `quantize`.
    cu_seqlens_q, cu_seqlens_k : array, shape (sequences + 1,), of integers, optional
        Where sequences begin in q, and in k and v, of layout "thd". Both, or none.

    Returns
    -------
    q, k, v : Quantized

    Raises
    ------
    TypeError, ValueError
        As in `quantize`; arrays of different modules; offsets of q without those of k.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 300, 64), np.float32)
    >>> arrays = cufa.quantize_qkv(q, k, v)
    >>> cufa.attention(*arrays, causal=True, out_dtype=np.float32).shape
    (1, 2, 300, 64)
    """
    arrays = {"q": q, "k": k, "v": v}
    module_of_all(arrays)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        given, needed = ("q", "k") if cu_seqlens_k is None else ("k", "q")
        raise ValueError(f"cu_seqlens_{needed} is needed with cu_seqlens_{given}")
    offsets = {"q": cu_seqlens_q, "k": cu_seqlens_k, "v": cu_seqlens_k}
    made, launches = prepare_qkv(
        arrays,
        offsets,
        hadamard=check_flag("hadamard", hadamard),
        transposed=True,
        granularity=granularity,
        block=block,
        seed=seed,
        layout=layout,
    )
    launch.run(launches)
    return made["q"], made["k"], made["v"]


def prepare_qkv(
    arrays: Mapping[str, Array],
    offsets: Mapping[str, Array | None],
    used: Mapping[str, Array | None] | None = None,
    *,
    hadamard: bool,
    transposed: bool,
    **how: Any,
) -> tuple[dict[str, Quantized], list[launch.Launches]]:
    """Return q, k and v in 8 bits, and on a GPU the launches that write them.

    `hadamard` applies to q and k, `transposed` to v. `offsets` and `used` are by array: they are
    `cu_seqlens` and `used` of `prepare`, and `how` are others of its arguments.
    """
    made, launches = {}, []
    for name, x in arrays.items():
        made[name], its = prepare(
            name,
            x,
            hadamard=hadamard and name != "v",
            transposed=transposed and name == "v",
            cu_seqlens=offsets[name],
            used=used[name] if used else None,
            **how,
        )
        launches += its
    return made, launches
