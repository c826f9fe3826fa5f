"""Checks of a call's device, and of the kernel that it names, by `attention` and `decode`."""

from __future__ import annotations

from cufa.device import Device
from cufa.problem.problem import Problem
from cufa.quantized.sequences import ROWS, blocks_of
from cufa.specs import FP8_KERNELS, KERNELS
from cufa.specs.kv import in_cache
from cufa.specs.spec import Spec
from cufa.specs.variant import Variant

_MAX_ROWS = 2**31 - 2**8
"""Rows that share a K/V head, and heads of all sequences: 32-bit numbers, rounded up to tiles."""

MAX_TILES = 2**31 - 2**16
"""Tiles of keys of all sequences, and those that ends count for: they have 32-bit numbers."""


def check_device(device: Device) -> None:
    """Raise ValueError if no kernel runs on a device."""
    if device.compute_capability < 80:
        raise ValueError(
            f"device: {device.name} has compute capability {device.compute_capability / 10}, "
            "8.0 is needed"
        )


def check_lengths(problem: Problem, whose: str, most: int, blocks: bool = False) -> None:
    """Raise ValueError if queries or keys are more than kernels, or a score's numbers, are for.

    Parameters
    ----------
    problem : Problem
    whose : str
        Words in front of the kernels' limit.
    most : int
        The most rows that kernels can count.
    blocks : bool
        Whether each sequence takes whole blocks of rows.
    """
    longest, argument = problem.longest
    for name, length in (("q", problem.seq_q), ("k", problem.seq_kv)):
        if (ROWS * blocks_of(length, problem.sequences) if blocks else length) > most:
            raise ValueError(f"{name} has seq {length}, more than {whose} {most}")
        if length > longest:
            raise ValueError(f"{argument}: {name} has seq {length}, more than {longest}")


def check_decoding(problem: Problem, device: Device, kernel: str | Variant | None) -> None:
    """Raise TypeError or ValueError if `decode` cannot run a problem, by the kernel that is named.

    Parameters
    ----------
    problem : Problem
    device : Device
    kernel : str or Variant, optional
        The kernel that the call names.
    """
    check_device(device)
    rows, heads = problem.group * problem.seq_q, problem.batch * problem.heads_q
    if max(rows, heads) > _MAX_ROWS:
        raise ValueError(
            f"q: {rows} rows that share a K/V head, or {heads} heads of all sequences, are more "
            f"than {_MAX_ROWS}"
        )
    length, (longest, argument) = max(problem.seq_kv, problem.seq_q), problem.longest
    if length > longest:
        raise ValueError(
            f"{argument}: {length} keys a sequence, or queries, are more than {longest}"
        )
    if isinstance(kernel, Variant):
        check_variant(problem, kernel, device, decodes=True)
    elif kernel is not None:
        _check_name(problem, kernel)


def check_tiles(items: int, tiles: int, ends: int) -> None:
    """Raise ValueError if tiles of keys, with those that ends count for, exceed 32-bit numbers."""
    if items * (tiles + ends) > MAX_TILES:
        raise ValueError(
            f"k_cache: {items} x {tiles} tiles of keys, of all sequences and heads, and {ends} for "
            f"the end of each are more than {MAX_TILES}"
        )


def _check_name(problem: Problem, name: object) -> None:
    kernel = kernel_named(name, problem.dtype, decodes=True)
    complaint = _of_other_bits(problem, kernel)
    if problem.unified_max is not None and "unified" not in kernel.arguments:
        complaint = "has no unified_max"
    if complaint is not None:
        raise ValueError(f"kernel: {kernel.name} {complaint}")


def _of_other_bits(problem: Problem, kernel: Spec) -> str | None:
    """Say what a kernel's K and V are, if those of a problem are others."""
    if kernel.kv_dtype == problem.kv_dtype:
        return None
    takes, has = (x or f"{problem.dtype}, as q" for x in (kernel.kv_dtype, problem.kv_dtype))
    return f"takes K and V of {takes}, k_cache has {has}"


def kernel_named(name: object, dtype: str, decodes: bool) -> Spec:
    """Return the kernel that a call names; TypeError or ValueError if there is no such kernel.

    Parameters
    ----------
    name : object
    dtype : str
    decodes : bool
        Whether the call is one of `decode`.
    """
    if not isinstance(name, str):
        raise TypeError(f"kernel must be a str or a Variant, not {type(name).__name__}")
    kernel = KERNELS.get(name)
    if kernel is None or kernel.decodes != decodes:
        names = ", ".join(each.name for each in KERNELS.values() if each.decodes == decodes)
        hint = ", which is for cufa.decode" if kernel is not None and kernel.decodes else ""
        hint = ", which is for precision='fp8'" if name in FP8_KERNELS else hint
        raise ValueError(f"kernel must be one of {names}, not {name!r}{hint}")
    if dtype not in kernel.dtypes:
        raise ValueError(f"kernel: {name} takes {' or '.join(kernel.dtypes)}, q has {dtype}")
    return kernel


def check_variant(problem: Problem, variant: Variant, device: Device, decodes: bool) -> None:
    """Raise ValueError if a variant cannot run a problem.

    Parameters
    ----------
    problem : Problem
    variant : Variant
    device : Device
    decodes : bool
        Whether the call is one of `decode`.
    """
    complaint = Variant(*variant).illegal(device)  # those of other kernels are illegal here
    if variant.kernel in KERNELS and KERNELS[variant.kernel].decodes != decodes:
        complaint = "it is not for decode" if decodes else f"{variant.kernel} is for cufa.decode"
    if complaint is None and variant.dtype != problem.dtype:
        complaint = f"it is for {variant.dtype}, q has {problem.dtype}"
    if complaint is None:
        complaint = _of_other_bits(problem, KERNELS[variant.kernel])
    tile_dims = (variant.head_dim, variant.head_dim_v)
    dims = (problem.head_dim, problem.head_dim_v)
    if complaint is None and (tile_dims[0] < dims[0] or tile_dims[1] < dims[1]):
        complaint = f"its head dims {tile_dims} are less than the problem's {dims}"
    if complaint is None and KERNELS[variant.kernel].needs_keys and problem.seq_kv == 0:
        complaint = "it needs at least one key"
    # A named variant may cap scores as it does without a log-sum-exp.
    scores = problem.score, problem._replace(returns_lse=False).score
    if complaint is None and variant.score not in scores:
        complaint = f"its score is {variant.score}, the call's {problem.score}"
    if complaint is None and variant.unified != (problem.unified_max is not None):
        complaint = "unified is for calls with unified_max, and these need it"
    if complaint is None:
        kv = in_cache(problem.page_size, variant.bn) if decodes else problem.kv
        if variant.kv != kv:
            complaint = f"it finds K and V by {variant.kv}, the call by {kv}"
    if complaint is not None:
        raise ValueError(f"kernel: {variant!r}: {complaint}")
