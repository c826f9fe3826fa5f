"""tensor_map.py: what the driver is asked for, and what it answers where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from played_gpu import Driver
from reference import DTYPES

from cufa.launch import tensor_map
from cufa.specs.params import MAP_WORDS


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    played = Driver()
    monkeypatch.setattr(tensor_map, "_encode_tiled", lambda: played.function)
    return played


def encoded(array: Any, pack: int, rows: int, columns: int, **changes: Any) -> np.ndarray:
    """Return the map of an array, of which shape and strides may be said to be others."""
    memory = np.zeros(MAP_WORDS + 8, np.uint64)
    start = -memory.ctypes.data % 64 // 8
    words = memory[start : start + MAP_WORDS]
    said = {"shape": array.shape, "strides": array.strides, **changes}
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    found = tensor_map.Encoder(words.data, words.ctypes.data).encoded(
        array.dtype.name, address, said["shape"], said["strides"], (pack, rows, columns)
    )
    assert found == words.tobytes()
    return words


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
    words = encoded(host, pack, 64, 32)
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
    said = driver.described(encoded(host, pack, rows, columns))
    assert said.box == (columns, pack, rows // pack, 1, 1)
    assert said.swizzle_bytes == swizzle


def test_maps_are_made_in_one_place(driver: Driver) -> None:
    """One after the other, with nothing of the one before, and nothing around it is written."""
    memory = np.full(4 * MAP_WORDS, 7, np.uint64)
    start = -memory.ctypes.data % 64 // 8 + MAP_WORDS
    words = memory[start:]
    encoder = tensor_map.Encoder(words.data, words.ctypes.data)
    for shape in ((1, 2, 3, 64), (2, 1, 5, 64)):
        array = aligned(shape, "float16")
        found = encoder.encoded("float16", array.ctypes.data, shape, array.strides, (1, 64, 64))
        assert found == words[:MAP_WORDS].tobytes() == encoded(array, 1, 64, 64).tobytes()
        assert driver.described(words[:MAP_WORDS]).address == array.ctypes.data
    assert np.all(memory[:start] == 7)
    assert np.all(memory[start + MAP_WORDS :] == 7)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides_of_axes_with_one_element_do_not_count(driver: Driver, axis: int) -> None:
    shape = (*(1 if n == axis else 2 for n in range(3)), 64)
    host = aligned((2, 2, 2, 64), "float16")
    for stride in (0, -2, 6, 1 << 45):
        strides = tuple(stride if n == axis else t for n, t in enumerate(host.strides))
        said = driver.described(encoded(host, 1, 64, 64, shape=shape, strides=strides))
        assert said.sizes == (64, 1, *shape[2::-1])


@pytest.mark.parametrize("stride", [0, -128, 120, 1 << 40])
def test_strides_that_tma_does_not_take(driver: Driver, stride: int) -> None:
    host = aligned((1, 1, 4, 64), "bfloat16")
    with pytest.raises(RuntimeError, match=rf"shape \(1, 1, 4, 64\), strides \(512, 512, {stride}"):
        encoded(host, 1, 64, 64, strides=(512, 512, stride, 2))
    assert driver.encoded == []


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_axes_of_stride_0_have_one_element(driver: Driver, axes: tuple[int, ...]) -> None:
    """Along batch and heads: the kernels stay there."""
    host = aligned((2, 3, 4, 64), "float16")
    strides = tuple(0 if n in axes else t for n, t in enumerate(host.strides))
    said = driver.described(encoded(host, 1, 64, 64, strides=strides))
    batch, heads = (1 if n in axes else host.shape[n] for n in range(2))
    assert said.sizes == (64, 1, 4, heads, batch)


def test_a_driver_that_hides_the_address(driver: Driver) -> None:
    """Later calls put theirs into the first word, so it must be there as it is."""
    driver.address_moved_by = 16
    with pytest.raises(RuntimeError, match=r"cannot describe .*cuTensorMapEncodeTiled: 0"):
        encoded(aligned((1, 1, 4, 64), "float16"), 1, 64, 64)


def test_a_thread_that_has_no_context_yet(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.has_context = False
    monkeypatch.setattr("cufa.compiler.driver.make_context_current", lambda: None)
    with pytest.raises(RuntimeError, match="Tiled: 201"):
        encoded(aligned((1, 1, 4, 64), "float16"), 1, 64, 64)

    def make_current() -> None:
        driver.has_context = True

    monkeypatch.setattr("cufa.compiler.driver.make_context_current", make_current)
    encoded(aligned((1, 1, 4, 64), "float16"), 1, 64, 64)
    assert len(driver.encoded) == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pack", [1, 4])
def test_the_address_is_in_the_first_word_alone(cupy: Any, dtype: str, pack: int) -> None:
    large = cupy.zeros((2, 8, 103, 64), DTYPES[dtype])
    arrays = [large[:, :, first : first + 100] for first in range(4)]
    arrays.append(cupy.zeros_like(large)[:, :, :100])
    for columns in (16, 32, 64):
        words = [encoded(x, pack, 128, columns) for x in arrays]
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
        encoded(view, 1, 64, 64)
