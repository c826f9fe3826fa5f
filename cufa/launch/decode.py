"""Arrays -> launch of the kernels that decode."""

from __future__ import annotations

from cufa.arrays import Array
from cufa.decode_problem import DecodeOperands, DecodeProblem
from cufa.variant import Variant


def decode(
    problem: DecodeProblem,
    operands: DecodeOperands,
    return_lse: bool,
    num_splits: int | None,
    mode: str,
    kernel: str | Variant | None,
) -> Array | None:
    """Decode on the current device and stream.

    Parameters
    ----------
    problem : DecodeProblem
        Possibly empty.
    operands : DecodeOperands
        Checked; `out` is there. Lengths and table may be NumPy arrays, whose values are legal.
    return_lse : bool
    num_splits, mode, kernel
        As of `cufa.decode`.

    Returns
    -------
    array or None
        The log-sum-exp, (batch, heads_q, seq_q) float32, if asked for.
    """
    raise NotImplementedError("decode does not run on CuPy arrays yet")
