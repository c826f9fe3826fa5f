"""FlashAttention for CuPy, and for NumPy on a machine without a GPU.

Start here:

- `attention`: exact attention of arrays (batch, heads, tokens, head_dim)
- `attention_varlen`: sequences of unequal lengths, packed one after another
- `attention_backward`, `attention_varlen_backward`: their gradients
- `KVCache`, `PagedKVCache`, `decode`: keys and values of earlier tokens
- `quantize`, `quantize_qkv`: arrays in 8 bits, for `attention`
- `BlockMask`: tiles that a mask hides
- `explain`, `explain_backward`: the kernel, tile and grid of a call, and of its gradients

``python -m cufa --help`` lists the commands.
"""

from cufa.api.attention import attention, explain
from cufa.api.backward import attention_backward, attention_varlen_backward, explain_backward
from cufa.api.block_mask import BlockMask
from cufa.api.decode import decode
from cufa.api.merge import merge
from cufa.api.quantize import quantize
from cufa.api.quantize_qkv import quantize_qkv
from cufa.api.rotary import Rotary
from cufa.api.varlen import attention_varlen, explain_varlen
from cufa.caches.full import CacheFullError
from cufa.caches.kv_cache import KVCache
from cufa.caches.paged_kv_cache import PagedKVCache
from cufa.compiler.nvrtc import CompileError
from cufa.explorer import Exploration, explore
from cufa.features.dropout import dropout_mask
from cufa.problem.problem import Problem
from cufa.quantized.quantized import Quantized
from cufa.specs.variant import Variant

__version__ = "0.2.0.dev0"

__all__ = [
    "BlockMask",
    "CacheFullError",
    "CompileError",
    "Exploration",
    "KVCache",
    "PagedKVCache",
    "Problem",
    "Quantized",
    "Rotary",
    "Variant",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "decode",
    "dropout_mask",
    "explain",
    "explain_backward",
    "explain_varlen",
    "explore",
    "merge",
    "quantize",
    "quantize_qkv",
]
