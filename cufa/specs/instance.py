"""Instance: one template instantiation of a kernel other than attention's, which needs no plan."""

from __future__ import annotations

from typing import NamedTuple

from cufa.dtypes import DTYPES


class Instance(NamedTuple):
    """One template instantiation; it stands for a `Variant` in the compiler.

    Attributes
    ----------
    kernel : str
        A key of `cufa.specs.AUXILIARY_KERNELS`.
    dtypes : tuple of str
        The template arguments that are element types, which come first.
    arguments : tuple of (bool or int)
        The arguments that are numbers, and come next.
    score : tuple of str
        The arguments that are parts of a score.
    kv : str
        How Q, K and V are found, of a kernel that takes a score and this as its last arguments.
    smem_bytes : int
        Dynamic shared memory of a block.
    is_dependent : bool
        Whether it is launched as `cufa.compiler.dependent` says.
    """

    kernel: str
    dtypes: tuple[str, ...]
    arguments: tuple[int, ...]
    score: tuple[str, ...] = ()
    kv: str = ""
    smem_bytes: int = 0
    is_dependent: bool = True

    @property
    def launch_registers(self) -> None:
        """None: warps hand no registers on to each other."""

    @property
    def name_expression(self) -> str:
        """The C++ name of the instantiation."""
        types = [DTYPES[dtype].cpp for dtype in self.dtypes]
        rest = [str(x).lower() if isinstance(x, bool) else str(x) for x in self.arguments]
        last = (f"Score<{', '.join(self.score)}>", self.kv) if self.kv else self.score
        return f"{self.kernel}<{', '.join((*types, *rest, *last))}>"

    def __str__(self) -> str:
        """Return the C++ name expression."""
        return self.name_expression
