"""BackwardVariant: one template instantiation of a kernel that computes gradients."""

from __future__ import annotations

from cufa.specs import BACKWARD_KERNELS
from cufa.specs.variant import Variant


class BackwardVariant(Variant):
    """One template instantiation of a kernel in `cufa.specs.BACKWARD_KERNELS`."""

    __slots__ = ()
    _KERNELS = BACKWARD_KERNELS
