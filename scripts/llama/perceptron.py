"""The gated perceptron of a layer (Shazeer 2020), which all tokens pass."""

from typing import NamedTuple

from models import Array, Linear, flat

from llama import ops


class Perceptron(NamedTuple):
    """Two matrices with a gate in between.

    Where there is a post norm, what they give is normed before it is added.
    """

    gate_up: Linear
    down: Linear
    gate: str
    post_norm: Array | None
    eps: float

    def add_to(self, sums: Array, x: Array) -> None:
        """Add what it makes of `x` (tokens, hidden) to `sums`, float32."""
        inner = ops.gated_product(self.gate_up, x, x.dtype, self.gate)
        ops.add_product(sums, self.down, inner, self.post_norm, self.eps)

    def is_capturable(self, tokens: int) -> bool:
        """Return whether a number of tokens pass it by kernels that a CUDA graph can hold."""
        return all(flat.takes(each.weight, tokens) for each in (self.gate_up, self.down))
