"""The mean of the first keys of sequences, which a cache of 8 bits takes off all of them."""

from __future__ import annotations

from cufa.specs.append import PARAMS
from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.instance import Instance

SPEC = AuxiliarySpec("means8", PARAMS, threads=256)


def instance(dtype: str, interleaved: bool) -> Instance:
    """Return the instantiation for keys of a dtype."""
    chunks, bytes_each = 2, 8  # of a thread: their sums and counts
    smem = chunks * bytes_each * SPEC.threads
    return Instance(SPEC.name, (dtype,), (interleaved,), smem_bytes=smem)
