"""Captures into CUDA graphs, whose replays go on using the memory that a call had."""

from __future__ import annotations

from cufa.arrays import Array


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    import cupy

    return cupy.cuda.get_current_stream().is_capturing()


def no_place(what: str, way_out: str) -> ValueError:
    """Return the error of a captured call that needs memory which is free after it.

    Parameters
    ----------
    what, way_out : str
        The beginning of the message, and its end.
    """
    return ValueError(
        f"{what}, for which a call that is captured into a CUDA graph has no place: {way_out}"
    )


def refuse_copy(name: str, array: Array, way_out: str) -> None:
    """Raise the error of `no_place` in a capture, where an array would be copied."""
    if is_capturing():
        what = f"{name} (shape {array.shape}, strides {array.strides}) would be copied"
        raise no_place(what, way_out)
