"""Arrays -> `Problem` of a cache: what one call of `decode` asks for, and the errors of its user.

Arrays on the host are checked here for good. Lengths and tables on the device are read there alone,
so there the kernels keep within the cache, whatever they find.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from cufa.arrays import Array, Operands, as_bhsd, module_of, module_of_all
from cufa.checks import (
    check_devices,
    check_dtype,
    check_dtypes,
    check_flag,
    check_layout,
    check_out,
    check_real,
    check_scale,
)
from cufa.features import parse as parse_features
from cufa.features import values_of
from cufa.features.expression.tracing import NOTHING
from cufa.problem.extras import arrays_of, parse_score_arrays
from cufa.problem.lengths import check_integers, check_lengths
from cufa.problem.parse import restore_shape
from cufa.problem.problem import Problem, check_shapes
from cufa.problem.scales import SCALES, check_scale_shapes, check_scaled

MAX_UNIFIED = 1e6
"""The largest preset maximum: float32 subtracts no larger score exactly enough."""


def parse_decode(arguments: Mapping[str, Any]) -> tuple[Problem, Operands, ModuleType]:
    """Check the arguments of a call of `decode`. Nothing is written, or copied to the device.

    Parameters
    ----------
    arguments : mapping
        By name.

    Returns
    -------
    Problem
    Operands
        (batch, heads, capacity, head_dim) views of caches, or (pages, heads, page_size, head_dim).
        Lengths and a table that are on the host are int32; None for lengths of `capacity`.
    module
        `numpy` or `cupy`: the module of q, the caches, their scales and `out`.

    Raises
    ------
    TypeError, ValueError
        As `cufa.decode`.
    """
    layout, out = arguments["layout"], arguments["out"]
    block_table = arguments["block_table"]
    check_layout(layout)
    arrays = {name: arguments[name] for name in ("q", "k_cache", "v_cache")}
    if out is not None:
        arrays["out"] = out
    scales = {name: arguments[name] for name in SCALES if arguments[name] is not None}
    xp = module_of_all({**arrays, **scales})
    if xp is np:  # subclasses (memmap, matrix) become the plain arrays that they are views of
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        scales = {name: np.asarray(scale) for name, scale in scales.items()}
    check_dtype("q", arrays["q"])
    kv_dtype = check_scaled(arrays, scales)
    of_q_type = arrays if kv_dtype is None else {n: arrays[n] for n in arrays if n in ("q", "out")}
    dtype = check_dtypes(of_q_type)
    if kv_dtype is not None and dtype == "float32" and xp is not np:
        raise TypeError(
            "q has dtype float32: on the GPU, caches of 8 bits take float16 and bfloat16; "
            "q.astype(numpy.float16) converts it"
        )
    for name, array in arrays.items():
        if array.ndim != 4 and name != "out":
            raise ValueError(f"{name} has shape {array.shape}: 4 axes are needed")
    if xp is not np:
        check_devices({**arrays, **scales}, xp)
    out = arrays.pop("out", None)
    views = {name: as_bhsd(array, layout) for name, array in arrays.items()}
    if block_table is not None:
        module_of("block_table", block_table)
    kv = "Contiguous" if block_table is None else "Paged"
    shapes = views["q"].shape, views["k_cache"].shape, views["v_cache"].shape
    shown = tuple(array.shape for array in arrays.values())
    capacity = check_shapes(kv, *shapes, shown, () if block_table is None else block_table.shape)
    (batch, heads_q, seq_q, head_dim), (blocks, heads_kv, keys, head_dim_v) = shapes[0], shapes[2]
    if kv_dtype is not None:
        check_scale_shapes(arrays, scales)
    check_flag("causal", arguments["causal"])
    problem = Problem(
        *(dtype, batch, heads_q, heads_kv, seq_q, capacity, head_dim, head_dim_v),
        *(check_scale(arguments["scale"], head_dim), parse_features(values_of(arguments))),
        kv=kv,
        returns_lse=bool(arguments["return_lse"]),
        kv_dtype=kv_dtype,
    )
    if block_table is not None:
        problem = problem._replace(pages=blocks, page_size=keys)
    score_arrays = arrays_of(arguments)
    reads, of_score = parse_score_arrays(score_arrays, NOTHING, 4, problem.sizes, xp)
    problem = problem.reading(*reads)
    problem = problem._replace(unified_max=_checked_max(arguments["unified_max"], dtype, kv_dtype))
    lengths = {"lengths": arguments["lengths"], "block_table": block_table}
    used = lengths["lengths"]
    if used is not None:
        check_integers("lengths", used, (problem.batch,), xp)
        room = ""
        if block_table is not None:
            room = f", the {block_table.shape[1]} pages of {keys} tokens of a sequence's table"
        check_lengths("lengths", used, problem.seq_kv, room)
    if block_table is not None:
        check_integers("block_table", block_table, (problem.batch, block_table.shape[1]), xp)
        if isinstance(block_table, np.ndarray):
            _check_table(block_table, used, problem)
    for name, array in lengths.items():
        if isinstance(array, np.ndarray):
            lengths[name] = np.ascontiguousarray(array, np.int32)
    if out is not None:
        read = {**arrays, **score_arrays, **scales, **lengths}
        there = {name: array for name, array in read.items() if array is not None}
        check_out(out, restore_shape(problem, 4, layout)[0], there)
        out = as_bhsd(out, layout)
    of_scales = tuple(x if layout == "bhsd" else x.swapaxes(1, 2) for x in scales.values())
    q, k, v = views.values()
    operands = Operands(q, k, v, out, of_score, lengths=lengths, scales=of_scales)
    return problem, operands, xp


def _checked_max(unified_max: float | None, dtype: str, kv_dtype: str | None) -> float | None:
    """Return what takes the place of row maxima."""
    if unified_max is None:
        return None
    value = check_real("unified_max", unified_max, "a number or None")
    if dtype == "float32":
        raise ValueError("unified_max is for float16 and bfloat16, q has float32")
    if kv_dtype is not None:
        raise ValueError("unified_max must be None for caches of 8 bits: leave it out")
    if not abs(value) <= MAX_UNIFIED:
        raise ValueError(f"unified_max must be {MAX_UNIFIED} at most in magnitude, not {value!r}")
    return value


def _check_table(table: np.ndarray, lengths: Array | None, problem: Problem) -> None:
    """Refuse pages on the host that do not exist, as far as they are known to be in use."""
    if lengths is not None and not isinstance(lengths, np.ndarray):
        return  # only the device knows
    used = problem.seq_kv if lengths is None else lengths[:, None]
    bad = (table < 0) | (table >= problem.pages)
    first = np.arange(table.shape[1]) * problem.page_size  # keys
    bad &= first < used
    seen, _ = problem.seen(0, np.int64(used) - problem.seq_q)
    if seen is not None:
        bad &= np.minimum(first + problem.page_size, used) > seen
    if bad.any():
        i, j = (int(x) for x in np.argwhere(bad)[0])
        raise ValueError(
            f"block_table[{i}, {j}] is {table[i, j]}, but the cache has {problem.pages} pages"
        )
