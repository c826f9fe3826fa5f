"""BackwardVariant: one template instantiation of a kernel that computes gradients."""

from __future__ import annotations

from cufa.device import Device
from cufa.specs import BACKWARD_KERNELS
from cufa.specs.instance import Instance
from cufa.specs.template_arguments import NUMBERS
from cufa.specs.variant import Variant

_RESERVED = 1024  # bytes of shared memory that CUDA takes for each block
_MOST_THREADS = 1024  # of a block


class BackwardVariant(Variant):
    """One template instantiation of a kernel in `cufa.specs.BACKWARD_KERNELS`."""

    __slots__ = ()

    @property
    def instance(self) -> Instance:
        """The instantiation that the compiler takes."""
        return BACKWARD_KERNELS[self.kernel].instance(self)

    @property
    def name_expression(self) -> str:
        """The C++ name of the instantiation."""
        return self.instance.name_expression

    @property
    def named_schedule(self) -> str:
        """Empty: these kernels have one schedule."""
        return ""

    @property
    def is_dependent(self) -> bool:
        """Whether it is launched as `cufa.compiler.dependent` says."""
        return self.instance.is_dependent

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return self.instance.smem_bytes

    def illegal(self, device: Device) -> str | None:
        """Say why this variant cannot run on a device, as `Variant.illegal`."""
        if self.kernel not in BACKWARD_KERNELS:
            return f"kernel must be one of {', '.join(BACKWARD_KERNELS)}, not {self.kernel!r}"
        if min(getattr(self, name) for name in NUMBERS) < 1:
            return "template arguments must be positive"
        if self.smem_bytes > device.smem_per_block:
            return (
                f"{self.smem_bytes} bytes of shared memory are needed, {device.name} has "
                f"{device.smem_per_block} for a block"
            )
        blocks = self.blocks_per_sm
        if blocks * (self.smem_bytes + _RESERVED) > device.smem_per_sm:
            return f"{blocks} blocks do not fit in {device.smem_per_sm} bytes of shared memory"
        if blocks * self.threads > device.threads_per_sm:
            return f"{blocks} blocks have more than {device.threads_per_sm} threads"
        if self.threads > _MOST_THREADS or not BACKWARD_KERNELS[self.kernel].takes_tile(self):
            return f"{self.kernel} takes no such tile"
        return None
