"""New tokens into a cache of keys and values, turned by rotary position embedding on the way."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.instance import Instance
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

SPEC = AuxiliarySpec("append", PARAMS, threads=128)

SPEC8 = AuxiliarySpec("append8", PARAMS, threads=128)
"""Into a cache of 8 bits, where each row of keys and values has a scale."""

MEANS8 = AuxiliarySpec("means8", PARAMS, threads=256)
"""The mean of the first keys of sequences, which a cache of 8 bits takes off all of them."""


def means8(dtype: str, interleaved: bool) -> Instance:
    """Return the instantiation of `MEANS8` for keys of a dtype."""
    chunks, bytes_each = 2, 8  # of a thread: their sums and counts
    smem = chunks * bytes_each * MEANS8.threads
    return Instance(MEANS8.name, (dtype,), (interleaved,), smem_bytes=smem)
