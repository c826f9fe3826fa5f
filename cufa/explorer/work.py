"""What a problem asks of a GPU: operations and bytes, the axes of a roofline."""

from __future__ import annotations

from cufa.kernel import ELEMENT_BYTES
from cufa.problem import Problem


def flops(problem: Problem) -> float:
    """Return the operations of both products; those of a causal problem count half."""
    pairs = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv
    total = 2.0 * pairs * (problem.head_dim + problem.head_dim_v)
    return total / 2 if problem.causal else total


def nbytes(problem: Problem) -> int:
    """Return the bytes of Q, K, V and O, each moved once."""
    a_row = problem.head_dim + problem.head_dim_v  # of Q and O together, and of K and V
    queries = problem.heads_q * problem.seq_q
    keys = problem.heads_kv * problem.seq_kv
    return problem.batch * (queries + keys) * a_row * ELEMENT_BYTES[problem.dtype]
