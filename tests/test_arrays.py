"""arrays.py: kinds of array, their memory, and what the kernels take as it is."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from reference import DTYPES

from cufa.arrays import extent, module_of_all, overlap, overlaps_itself, readable

Call = dict[str, Any]


# --- kinds ---


def test_cupy_is_not_imported() -> None:
    code = (
        "import sys, numpy as np; from cufa.arrays import module_of_all\n"
        "x = np.zeros((2, 4), np.float32); module_of_all({'q': x, 'k': x})\n"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class _Tensor:
    """Array of another library."""

    shape = (2, 4)

    def __dlpack__(self) -> None: ...

    def dequantize(self) -> None:
        """As PyTorch's tensors have, which are no less arrays for it."""


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("thing", [[[1.0]], 3.0, "q", np.float32(1), _Tensor(), object])
def test_objects_that_are_no_arrays(name: str, thing: Any) -> None:
    x = np.zeros((2, 4), np.float32)
    call = {"q": x, "k": x, "v": x, "out": x.copy(), name: thing}
    with pytest.raises(TypeError, match=rf"^{name} must be a NumPy or a CuPy array, not \w+"):
        module_of_all(call)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_none_is_no_array(name: str) -> None:
    x = np.zeros((2, 4), np.float32)
    call: Call = {"q": x, "k": x, "v": x, name: None}
    with pytest.raises(TypeError, match=rf"^{name} must be .* not NoneType"):
        module_of_all(call)


@pytest.mark.parametrize(
    ("attributes", "way_out"),
    [
        ({}, r"numpy.from_dlpack\(x\) or cupy.from_dlpack\(x\) shares its memory"),
        ({"requires_grad": True}, r"numpy.from_dlpack\(x.detach\(\)\) or cupy"),
        (
            {"dtype": "torch.bfloat16"},
            r"numpy.from_dlpack\(x.view\(torch.uint16\)\).view\(ml_dtypes.bfloat16\) or",
        ),
    ],
    ids=str,
)
def test_dlpack_is_suggested(attributes: dict[str, Any], way_out: str) -> None:
    tensor = _Tensor()
    for name, value in attributes.items():
        setattr(tensor, name, value)
    with pytest.raises(TypeError, match=way_out):
        module_of_all({"q": tensor})


def test_masked_arrays_are_refused() -> None:
    x = np.zeros((2, 4), np.float32)
    with pytest.raises(TypeError, match=r"^v is a masked array"):
        module_of_all({"q": x, "v": np.ma.masked_array(x)})


def device_array(
    cupy: Any, shape: tuple[int, ...], *, at: int = 0, device: int = 0, dtype: str = "float16"
) -> Any:
    """CuPy array at an address that is never touched."""
    memory = cupy.cuda.UnownedMemory(1 << 30, 1 << 30, None, device_id=device)
    return cupy.ndarray(shape, DTYPES[dtype], memptr=cupy.cuda.MemoryPointer(memory, at))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_mixing_numpy_and_cupy(cupy: Any, name: str) -> None:
    host, device = np.zeros((2, 4), np.float16), device_array(cupy, (2, 4))
    for most, one in ((host, device), (device, host)):
        call = {"q": most, "k": most, "v": most, "out": most, name: one}
        with pytest.raises(TypeError, match=rf"^{'k' if name == 'q' else name} is a \w+ array"):
            module_of_all(call)


# --- memory ---


def views() -> dict[str, np.ndarray]:
    """Return views of one buffer."""
    x = np.zeros((4, 6, 10, 32), np.float16)
    return {
        "contiguous": x[2:],
        "inside": x[1:3, 2:4, 3:5, 8:24],
        "backwards": x[::-1, :, ::-2],
        "transposed": x.transpose(3, 1, 0, 2),
        "broadcast": np.broadcast_to(x[:1, :1], x.shape),
        "windows": np.lib.stride_tricks.sliding_window_view(x[0, 0, 0], 8),
        "empty": x[:, 3:3],
    }


@pytest.mark.parametrize("name", sorted(views()))
def test_extent_is_where_the_elements_are(name: str) -> None:
    view = views()[name]
    low, high = extent(view.shape, view.strides, view.itemsize)
    first, end = np.lib.array_utils.byte_bounds(view)
    address = view.ctypes.data
    assert (low, high) == ((0, 0) if view.size == 0 else (first - address, end - address))


@pytest.mark.parametrize("name", sorted(views()))
def test_elements_that_share_memory(name: str) -> None:
    view = views()[name]
    shared = name in ("broadcast", "windows")
    assert overlaps_itself(view.shape, view.strides, view.itemsize) == shared


def test_overlap_is_of_elements() -> None:
    packed = np.zeros((5, 3, 8), np.float16)
    assert not overlap(packed[:, 0], packed[:, 1])
    assert overlap(packed[:, 0], packed[2])


# --- what kernels read as it is: float16, head_dim 64 unless something else is said ---

ROW, HEAD, BATCH = 128, 128 * 7, 128 * 7 * 3

#: Strides of batch, head and seq, and whether cp.async takes them, TMA, and TMA for K and V.
STRIDES: dict[str, tuple[tuple[int, int, int], bool, bool, bool]] = {
    "contiguous": ((BATCH, HEAD, ROW), True, True, True),
    "heads inside": ((BATCH, ROW, 3 * ROW), True, True, True),
    "rows apart": ((BATCH + 16, HEAD + 32, ROW + 16), True, True, True),
    "backwards": ((BATCH, HEAD, -ROW), True, False, False),
    "one batch": ((0, HEAD, ROW), True, False, True),
    "one head": ((BATCH, 0, ROW), True, False, True),
    "one row": ((BATCH, HEAD, 0), True, False, False),
    "odd rows": ((BATCH, HEAD, ROW + 2), False, False, False),
    "odd heads": ((BATCH, HEAD + 8, ROW), False, False, False),
}


@pytest.mark.parametrize("case", sorted(STRIDES))
def test_readable_strides(case: str) -> None:
    strides, direct, tma, repeated = STRIDES[case]
    array = (2, 3, 7, 64), (*strides, 2), 2
    assert readable(*array) == direct
    assert readable(*array, tma=True) == tma
    assert readable(*array, tma=True, repeats=True) == repeated
    single = (1, 1, 1, 64), (*strides, 2), 2  # strides of single elements do not count
    assert readable(*single, tma=True)


@pytest.mark.parametrize("tma", [False, True])
def test_readable_rows(tma: bool) -> None:
    """They are contiguous, and made of whole chunks of 16 bytes."""
    for head_dim, itemsize in ((8, 2), (72, 2), (4, 4), (36, 4)):
        row = head_dim * itemsize
        shape, strides = (1, 2, 3, head_dim), (6 * row, 3 * row, row)
        assert readable(shape, (*strides, itemsize), itemsize, tma)
        assert not readable(shape, (*strides, 2 * itemsize), itemsize, tma)
        assert not readable(shape, (*strides, -itemsize), itemsize, tma)
    for head_dim, itemsize in ((1, 2), (59, 2), (4, 2), (1, 4), (66, 4)):
        assert not readable((1, 1, 1, head_dim), (512, 512, 512, itemsize), itemsize, tma)


def test_no_keys_need_no_copy() -> None:
    assert readable((2, 3, 0, 59), (2, 2, 2, 2), 2)
    assert readable((2, 3, 0, 64), (6, 6, 6, 6), 2)
