"""New tokens into a cache of keys and values, turned by rotary position embedding on the way."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import TENSOR, struct

ROWS = ("k", "v", "q", "turned_q", "k_cache", "v_cache")
"""Tensors of new tokens, and of what is made of them."""

SCALES, MEANS = ("k_scale", "v_scale"), ("k_mean",)
"""Tensors of caches of 8 bits."""

PARAMS = struct(
    (TENSOR, " ".join((*ROWS, *SCALES, *MEANS))),
    ("u8", "starts lengths table"),
    ("i8", "table_stride"),
    ("u8", "cos sin"),
    ("i4", "seq heads_kv heads_q head_dim head_dim_v rotary_dim"),
    ("i4", "positions page_size pages pages_a_sequence"),
)

SPEC = AuxiliarySpec("append", PARAMS)
