"""tensor_map.py: what the driver is asked for, and what it answers where there is one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from reference import DTYPES

from cufa.launch import tensor_map

#: CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion of cuda.h.
TYPES = {6: "float16", 9: "bfloat16"}
SWIZZLE_BYTES = {1: 32, 2: 64, 3: 128}
L2_256B = 3
INVALID_VALUE = 1  # CUresult


class Encoded(NamedTuple):
    """What a tensor map says, the innermost axis first; strides are in bytes."""

    dtype: np.dtype
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int

    def array(self, address: int) -> np.ndarray:
        """Return the elements, the outermost axis first, of such an array at an address."""
        strides = (*self.strides[::-1], self.dtype.itemsize)
        memory = SimpleNamespace(
            __array_interface__={
                "version": 3,
                "shape": self.sizes[::-1],
                "strides": strides,
                "typestr": f"|V{self.dtype.itemsize}",
                "data": (address, False),
            }
        )
        return np.asarray(memory).view(self.dtype)


class Driver:
    """Stands for the CUDA driver, and refuses what it documents to refuse.

    A map holds the address in its first word, and in the second what `described` looks up.
    """

    def __init__(self) -> None:
        self.encoded: list[Encoded] = []
        self.address_moved_by = 0
        self.cuTensorMapEncodeTiled = self.encode

    def encode(
        self,
        map_address: ctypes.c_void_p,
        dtype: int,
        rank: int,
        address: ctypes.c_void_p,
        sizes: Any,
        strides: Any,
        box: Any,
        element_strides: Any,
        interleave: int,
        swizzle: int,
        l2_promotion: int,
        fill: int,
    ) -> int:
        """Stand for `cuTensorMapEncodeTiled`."""
        found = Encoded(
            DTYPES[TYPES[dtype]],
            address.value or 0,
            tuple(sizes),
            tuple(strides),
            tuple(box),
            SWIZZLE_BYTES[swizzle],
        )
        assert len(found.sizes) == len(found.box) == len(found.strides) + 1 == rank
        assert tuple(element_strides) == (1,) * rank
        assert (interleave, l2_promotion, fill) == (0, L2_256B, 0)
        place = map_address.value or 0
        legal = (
            3 <= rank <= 5
            and place % 64 == 0
            and found.address % 16 == 0
            and all(0 < n <= 2**32 for n in found.sizes)
            and all(0 < n < 2**40 and n % 16 == 0 for n in found.strides)
            and all(0 < n <= 256 for n in found.box)
            and found.box[0] * found.dtype.itemsize == found.swizzle_bytes
        )
        if not legal:
            return INVALID_VALUE
        words = (ctypes.c_uint64 * 16).from_address(place)
        words[0] = found.address + self.address_moved_by
        words[1] = len(self.encoded)
        words[2:] = [0] * 14
        self.encoded.append(found)
        return 0

    def described(self, words: np.ndarray) -> Encoded:
        """Return what a map says, with the address that is in it now."""
        return self.encoded[int(words[1])]._replace(address=int(words[0]))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    played = Driver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: played)
    return played


def view_of(host: np.ndarray) -> Any:
    """Stand for a CuPy array."""
    return SimpleNamespace(
        shape=host.shape,
        strides=host.strides,
        dtype=host.dtype,
        data=SimpleNamespace(ptr=host.ctypes.data),
    )


def aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array whose elements all differ as bytes, at an address that is aligned."""
    count = int(np.prod(shape))
    memory = np.zeros(count + 8, np.uint16)
    start = -memory.ctypes.data % 16 // 2
    elements = memory[start : start + count]
    elements[:] = np.arange(count)
    return elements.view(DTYPES[dtype]).reshape(shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "rows apart", "head_dim of 24 in 32"])
@pytest.mark.parametrize("pack", [1, 2, 8])
def test_a_map_finds_every_element(driver: Driver, pack: int, layout: str, dtype: str) -> None:
    """Axes: batch, heads / pack, seq, pack, head_dim."""
    b, h, s, d = 2, 16, 5, 32
    host = aligned((b, h, s, d), dtype)
    if layout == "bshd":
        host = aligned((b, s, h, d), dtype).swapaxes(1, 2)
    elif layout == "rows apart":
        host = aligned((b, h, 3 * s, d), dtype)[:, :, ::3]
    elif layout == "head_dim of 24 in 32":
        host = host[..., :24]
    words = tensor_map.encode(view_of(host), pack, 64, 32)
    said = driver.described(words)
    assert said.dtype == host.dtype
    assert said.address == host.ctypes.data
    rows = np.moveaxis(said.array(said.address), 3, 2)
    assert rows.shape == (b, h // pack, pack, s, host.shape[3])
    found = rows.reshape(host.shape).view(np.uint16)
    np.testing.assert_array_equal(found, np.ascontiguousarray(host).view(np.uint16))


@pytest.mark.parametrize(("columns", "swizzle"), [(16, 32), (32, 64), (64, 128)])
@pytest.mark.parametrize(("pack", "rows"), [(1, 192), (1, 256), (4, 192), (64, 64), (32, 256)])
def test_a_box_is_a_panel_of_a_tile(
    driver: Driver, pack: int, rows: int, columns: int, swizzle: int
) -> None:
    """All of its heads at a query lie together; the panel's rows are swizzled as the kernels do."""
    host = aligned((1, 64, 3, 64), "float16")
    said = driver.described(tensor_map.encode(view_of(host), pack, rows, columns))
    assert said.box == (columns, pack, rows // pack, 1, 1)
    assert said.swizzle_bytes == swizzle


def test_words_are_a_copy(driver: Driver) -> None:
    host = aligned((1, 2, 3, 64), "float16")
    first, second = (tensor_map.encode(view_of(host), 1, 64, 64) for _ in range(2))
    assert first.shape == (tensor_map.WORDS,)
    assert first.dtype == np.uint64
    assert int(first[0]) == host.ctypes.data
    first[:] = 0
    assert int(second[0]) == host.ctypes.data


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides_of_axes_with_one_element_do_not_count(driver: Driver, axis: int) -> None:
    shape = [2, 2, 2, 64]
    shape[axis] = 1
    host = aligned((2, 2, 2, 64), "float16")
    for stride in (0, -2, 6, 1 << 45):
        strides = list(host.strides)
        strides[axis] = stride
        view = SimpleNamespace(**{**vars(view_of(host)), "shape": shape, "strides": strides})
        said = driver.described(tensor_map.encode(view, 1, 64, 64))
        assert said.sizes == (64, 1, *shape[2::-1])


@pytest.mark.parametrize("stride", [0, -128, 120, 1 << 40])
def test_strides_that_tma_does_not_take(driver: Driver, stride: int) -> None:
    host = aligned((1, 1, 4, 64), "bfloat16")
    view = SimpleNamespace(**{**vars(view_of(host)), "strides": (512, 512, stride, 2)})
    with pytest.raises(RuntimeError, match=rf"shape \(1, 1, 4, 64\), strides \(512, 512, {stride}"):
        tensor_map.encode(view, 1, 64, 64)
    assert driver.encoded == []


def test_a_driver_that_hides_the_address(driver: Driver) -> None:
    """Later calls put theirs into the first word, so it must be there as it is."""
    driver.address_moved_by = 16
    with pytest.raises(RuntimeError, match=r"cannot describe .*cuTensorMapEncodeTiled: 0"):
        tensor_map.encode(view_of(aligned((1, 1, 4, 64), "float16")), 1, 64, 64)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pack", [1, 4])
def test_the_address_is_in_the_first_word_alone(cupy: Any, dtype: str, pack: int) -> None:
    large = cupy.zeros((2, 8, 103, 64), DTYPES[dtype])
    arrays = [large[:, :, first : first + 100] for first in range(4)]
    arrays.append(cupy.zeros_like(large)[:, :, :100])
    for columns in (16, 32, 64):
        words = [tensor_map.encode(x, pack, 128, columns) for x in arrays]
        assert [int(w[0]) for w in words] == [x.data.ptr for x in arrays]
        for other in words[1:]:
            np.testing.assert_array_equal(other[1:], words[0][1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stride", [120, -128])
def test_the_driver_refuses(cupy: Any, stride: int) -> None:
    memory = cupy.zeros(4096, np.float16)[512:]
    view = cupy.lib.stride_tricks.as_strided(memory, (1, 1, 4, 64), (512, 512, stride, 2))
    with pytest.raises(RuntimeError, match="cannot describe"):
        tensor_map.encode(view, 1, 64, 64)
