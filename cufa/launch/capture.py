"""Captures into CUDA graphs, whose replays go on using the memory that a call had."""

from __future__ import annotations


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    import cupy

    return cupy.cuda.get_current_stream().is_capturing()


def refuse_in_capture(what: str, way_out: str) -> None:
    """Raise an error, in a capture, of a call that needs memory which is free after it.

    Parameters
    ----------
    what, way_out : str
        The beginning of the message, and its end.

    Raises
    ------
    ValueError
    """
    if is_capturing():
        raise ValueError(
            f"{what}, for which a call that is captured into a CUDA graph has no place: {way_out}"
        )
