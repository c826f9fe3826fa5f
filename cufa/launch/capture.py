"""Captures into CUDA graphs, whose replays go on using the memory that a call had."""

from __future__ import annotations

from cufa.arrays import Array


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    import cupy

    return cupy.cuda.get_current_stream().is_capturing()


def refuse_memory(what: str, way_out: str) -> None:
    """Raise an error in a capture, where a call needs memory that is free after it.

    Parameters
    ----------
    what, way_out : str
        The beginning of the message, and its end.
    """
    if is_capturing():
        raise ValueError(
            f"{what}, for which a call that is captured into a CUDA graph has no place: {way_out}"
        )


def refuse_copy(name: str, array: Array, way_out: str) -> None:
    """Raise an error in a capture, where an array would be copied."""
    what = f"{name} (shape {array.shape}, strides {array.strides}) would be copied"
    refuse_memory(what, way_out)
