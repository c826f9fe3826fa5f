"""Which arrays a model runs on: NumPy on the CPU, or CuPy on a GPU."""

from typing import Any

import ml_dtypes
import numpy as np

from cufa import optional
from models.errors import ModelError

Array = Any  # numpy.ndarray or cupy.ndarray

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Lowest compute capability that cufa's kernels are written for.
MIN_COMPUTE_CAPABILITY = 80


def choose_array_module(device: str) -> Any:
    """Return the module whose arrays run on `device`.

    Parameters
    ----------
    device : {"auto", "cpu", "gpu"}
        "auto" is the GPU if CuPy is installed and finds one that cufa supports, else the CPU.

    Returns
    -------
    module
        `numpy` or `cupy`.

    Raises
    ------
    ModelError
        The GPU was asked for and cannot be used.
    ValueError
        `device` is none of the three.
    """
    if device not in ("auto", "cpu", "gpu"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'gpu', not {device!r}")
    if device == "cpu":
        return np
    try:
        return _cupy_with_gpu()
    except ModelError:
        if device == "gpu":
            raise
        return np


def _cupy_with_gpu() -> Any:
    try:
        import cupy
    except ImportError:
        raise ModelError(f"no CuPy for the GPU: {optional.INSTALL_CUPY}") from None
    try:
        capability = int(cupy.cuda.Device().compute_capability)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ModelError(f"no usable GPU: {error}") from None
    if capability < MIN_COMPUTE_CAPABILITY:
        raise ModelError(
            f"the GPU has compute capability {capability / 10}; "
            f"cufa needs {MIN_COMPUTE_CAPABILITY / 10} or later"
        )
    return cupy


def module_of(array: Array) -> Any:
    """Return `numpy` or `cupy`, whichever the array is of."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


class HostCopy:
    """A copy of an array to the host, which runs while the GPU is given more work.

    Parameters
    ----------
    array : array
        Of NumPy, which is its own copy, or of CuPy. It must not change before `wait`.
    """

    def __init__(self, array: Array) -> None:
        self._array = array  # kept until its bytes have been read
        self._event = None
        if isinstance(array, np.ndarray):
            self._host = array
            return
        import cupy
        import cupyx

        self._host = cupyx.empty_pinned(array.shape, array.dtype)
        array.get(out=self._host, blocking=False)
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record()

    def wait(self) -> np.ndarray:
        """Return the copy; on a GPU, wait for what was submitted before it, and no more."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
