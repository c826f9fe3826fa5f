"""The CUDA context of a thread: the driver needs one, and CuPy's functions make it themselves."""

from __future__ import annotations

INVALID = 201
"""The driver returns this in a thread that has no context yet (CUDA_ERROR_INVALID_CONTEXT)."""


def make_current() -> None:
    """Do what the runtime does at a thread's first call of it."""
    from cupy.cuda import runtime

    runtime.setDevice(runtime.getDevice())
