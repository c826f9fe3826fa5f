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
        Those that are numbers, and come next.
    score : tuple of str
        Those that are parts of a score.
    """

    kernel: str
    dtypes: tuple[str, ...]
    arguments: tuple[int, ...]
    score: tuple[str, ...] = ()

    @property
    def name_expression(self) -> str:
        """The C++ name of the instantiation."""
        types = [DTYPES[dtype].cpp for dtype in self.dtypes]
        rest = [str(x).lower() if isinstance(x, bool) else str(x) for x in self.arguments]
        return f"{self.kernel}<{', '.join((*types, *rest, *self.score))}>"

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block: none."""
        return 0

    @property
    def is_dependent(self) -> bool:
        """Whether it is launched as `cufa.compiler.dependent` says."""
        return True

    def __str__(self) -> str:
        """Return the C++ name expression."""
        return self.name_expression
