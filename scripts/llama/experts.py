"""A mixture of experts (Shazeer et al. 2017): each token passes a few of a layer's perceptrons."""

from typing import NamedTuple

import numpy as np
from models import Array, HostCopy, Linear, experts, flat, module_of

from llama import ops


class Experts(NamedTuple):
    """Perceptrons with a router, which says who takes which, and with which share.

    Attributes
    ----------
    router : Linear
    gate_up, down : Linear
        Matrices of all experts, one below the other.
    chosen : int
        Experts that a token takes.
    gate : str
    """

    router: Linear
    gate_up: Linear
    down: Linear
    chosen: int
    gate: str

    def add_to(self, sums: Array, x: Array) -> None:
        """Add what a token's experts make of it to `sums`, float32; `x` is (tokens, hidden)."""
        logits = ops.product(self.router, x, np.dtype(np.float32))
        if experts.takes(self._first_matrices(), self._count, self.chosen, len(x)):
            taken = experts.route(logits, self.chosen)
            both = (self._stacked(each) for each in (self.gate_up, self.down))
            (gate_up, gate_up_bias), (down, down_bias) = both
            inner = experts.gated_product(gate_up, gate_up_bias, x, taken, self.gate)
            experts.add_shares(experts.product(down, down_bias, inner, taken), taken, sums)
        else:
            self._add_one_by_one(sums, x, logits)

    def _add_one_by_one(self, sums: Array, x: Array, logits: Array) -> None:
        """Add what each expert makes of the tokens that take it: the host knows which they are."""
        chosen, shares = ops.shares(logits, self.chosen)
        expert_of = HostCopy(chosen).wait().reshape(-1)
        pairs = np.argsort(expert_of, kind="stable")
        bounds = np.searchsorted(expert_of[pairs], np.arange(self._count + 1))
        pairs = module_of(x).asarray(pairs)
        shares = shares.reshape(-1, 1)
        for expert in np.flatnonzero(np.diff(bounds)).tolist():
            mine = pairs[bounds[expert] : bounds[expert + 1]]
            tokens = mine // self.chosen
            gate_up, down = (self._expert(each, expert) for each in (self.gate_up, self.down))
            inner = ops.gated_product(gate_up, x[tokens], x.dtype, self.gate)
            given = ops.product(down, inner, np.dtype(np.float32))
            sums[tokens] += given * shares[mine]  # a token takes an expert once

    def is_capturable(self, tokens: int) -> bool:
        """Return whether a number of tokens pass them by kernels that a CUDA graph can hold."""
        routes = flat.takes(self.router.weight, tokens)
        return routes and experts.takes(self._first_matrices(), self._count, self.chosen, tokens)

    @property
    def _count(self) -> int:
        return len(self.router.weight)

    def _expert(self, matrices: Linear, expert: int) -> Linear:
        outputs = len(matrices.weight) // self._count
        return matrices.part(expert * outputs, (expert + 1) * outputs)

    def _first_matrices(self) -> list[Array]:
        return [self._expert(each, 0).weight for each in (self.gate_up, self.down)]

    def _stacked(self, matrices: Linear) -> tuple[Array, Array | None]:
        """Return weights and biases with an axis of the experts."""
        weight, bias = matrices.weight, matrices.bias
        weight = weight.reshape(self._count, -1, weight.shape[1])
        return weight, None if bias is None else bias.reshape(self._count, -1)
