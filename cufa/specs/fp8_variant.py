"""Fp8Variant: one template instantiation of the kernel that computes attention in 8 bits."""

from __future__ import annotations

from cufa.specs import FP8_KERNELS
from cufa.specs.variant import Variant


class Fp8Variant(Variant):
    """One template instantiation of a kernel in `cufa.specs.FP8_KERNELS`."""

    __slots__ = ()
    _KERNELS = FP8_KERNELS

    @property
    def cpp_kv(self) -> str:
        """The C++ name of the way of finding Q, K and V."""
        return f"Quantized<{self.kv}>"
