"""Fp8Variant: one template instantiation of the kernel that computes attention in 8 bits."""

from __future__ import annotations

from cufa.specs import FP8_KERNELS
from cufa.specs.variant import Variant


class Fp8Variant(Variant):
    """One template instantiation of a kernel in `cufa.specs.FP8_KERNELS`."""

    __slots__ = ()
    _KERNELS = FP8_KERNELS

    @property
    def piece(self) -> int:
        """Columns of a piece of P V, whose sums take the registers of S."""
        return 64 if self.head_dim_v >= 128 else self.head_dim_v

    @property
    def in_flight(self) -> int:
        """How many pieces are computed at once."""
        return min(2, self.head_dim_v // self.piece)

    @property
    def cpp_kv(self) -> str:
        """The C++ name of the way of finding Q, K and V."""
        return f"Quantized<{self.kv}>"
