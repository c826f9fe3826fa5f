"""FlashAttention for CuPy, and for NumPy on a machine without a GPU."""

from cufa.api import attention, explain
from cufa.block_mask import BlockMask
from cufa.caches.full import CacheFullError
from cufa.caches.kv_cache import KVCache
from cufa.caches.paged_kv_cache import PagedKVCache
from cufa.compiler.nvrtc import CompileError
from cufa.decoding import decode
from cufa.dropout import dropout_mask
from cufa.explorer import Exploration, explore
from cufa.merging import merge
from cufa.problem import Problem
from cufa.rotary import Rotary
from cufa.variant import Variant
from cufa.varlen import attention_varlen, explain_varlen

__version__ = "0.2.0.dev0"

__all__ = [
    "BlockMask",
    "CacheFullError",
    "CompileError",
    "Exploration",
    "KVCache",
    "PagedKVCache",
    "Problem",
    "Rotary",
    "Variant",
    "attention",
    "attention_varlen",
    "decode",
    "dropout_mask",
    "explain",
    "explain_varlen",
    "explore",
    "merge",
]
