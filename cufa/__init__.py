"""FlashAttention for CuPy, and for NumPy on a machine without a GPU."""

from cufa.api import attention, explain
from cufa.jit import CompileError
from cufa.variant import Variant

__all__ = ["CompileError", "Variant", "attention", "explain"]
