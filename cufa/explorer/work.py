"""The work of a problem on a GPU: operations and bytes, and its bound under a roofline."""

from __future__ import annotations

from cufa.dtypes import DTYPES
from cufa.features.causal import Causal
from cufa.features.parts import edges
from cufa.problem.problem import Problem


def flops(problem: Problem) -> float:
    """Return the operations of both products; those of a causal problem count half.

    With other masks by place, those of the pairs that are seen.
    """
    heads = problem.batch * problem.heads_q
    pairs = problem.seq_q * problem.seq_kv / (2 if problem.causal else 1)
    if edges(problem.without(Causal).score) or (edges(problem.score) and not problem.causal):
        first, end = problem.sees(slice(0, problem.seq_q))
        pairs = int((end - first).sum())
    return 2.0 * heads * pairs * (problem.head_dim + problem.head_dim_v)


def nbytes(problem: Problem) -> int:
    """Return the bytes of Q, K, V and O, each moved once."""
    a_row = problem.head_dim + problem.head_dim_v  # of Q and O together, and of K and V
    queries = problem.heads_q * problem.seq_q
    keys = problem.heads_kv * problem.seq_kv
    return problem.batch * (queries + keys) * a_row * DTYPES[problem.dtype].bytes


def memory_bound(problem: Problem, ceilings: dict[str, float]) -> bool:
    """Whether a problem has fewer operations a byte than the card; True where that is unknown."""
    if "gemm_tflops" not in ceilings:
        return True
    ridge = 1e3 * ceilings["gemm_tflops"] / ceilings["read_gbs"]
    return flops(problem) / nbytes(problem) < ridge


def shortest_s(operations: float, moved: int, ceilings: dict[str, float]) -> float | None:
    """Return the seconds that operations and bytes take at a card's ceilings; None if unknown."""
    if "gemm_tflops" not in ceilings:
        return None
    by_products = operations / (1e12 * ceilings["gemm_tflops"])
    return max(by_products, moved / (1e9 * ceilings["read_gbs"]))
