"""The layout of a GGUF file: metadata by key, and where each tensor lies.

The reader of the package gguf makes arrays of each string, which takes seconds for a vocabulary.
"""

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from models import ModelError, missing_package

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"

#: The format of a value of each type, as `struct` has it, by the type's number.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS[12] = "d"
_STRING, _ARRAY = 8, 9

MOST_AXES = 4


class Tensor(NamedTuple):
    """A tensor in the file.

    Attributes
    ----------
    shape : tuple of int
        The last axis is the one whose elements follow each other.
    kind : str
        Its type, such as F32 or Q4_1.
    place : slice
        The place of its bytes.
    row_bytes : int
        Bytes of the last axis.
    """

    shape: tuple[int, ...]
    kind: str
    place: slice
    row_bytes: int


class GgufFile:
    """A GGUF file; no tensor is read before it is asked for.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    path : Path
    metadata : dict of str to object
    tensors : dict of str to Tensor

    Raises
    ------
    ModelError
        It is damaged or no GGUF file, or the package gguf is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise ModelError(f"{path} is no GGUF file, nor a folder")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        try:
            self.metadata, self.tensors = _parsed(_Cursor(self._bytes))
        except (struct.error, ValueError, OverflowError, MemoryError, ZeroDivisionError) as error:
            raise ModelError(f"{path} is damaged: {error}") from None

    def read(self, name: str) -> np.ndarray:
        """Return a tensor: float32, or bfloat16 or float16 where the file has these."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8)[tensor.place]
        if tensor.kind in PLAIN:
            return raw.view(PLAIN[tensor.kind]).reshape(tensor.shape)
        return dequantized(raw.reshape(-1, tensor.row_bytes), tensor.kind).reshape(tensor.shape)


#: Types that NumPy has; it knows bfloat16 by that name since cufa imported ml_dtypes.
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def dequantized(raw: np.ndarray, kind: str) -> np.ndarray:
    """Return the float32 numbers of rows of blocks, uint8.

    Raises
    ------
    NotImplementedError
        The package gguf does not know how.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(raw, GGMLQuantizationType[kind])


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.place = data, len(MAGIC)

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self.place)
        self.place += struct.calcsize(f"<{kind}")
        return value

    def take(self, count: int) -> bytes:
        end = self.place + count
        if end > len(self._data):
            raise ValueError("it ends too early")
        taken = self._data[self.place : end]
        self.place = end
        return taken

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            of, count = self.number("I"), self.number("Q")
            if of == _STRING:
                return [self.text() for _ in range(count)]
            form = _number(of)
            return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(form))))
        return self.number(_number(kind))

    @property
    def size(self) -> int:
        return len(self._data)


def _number(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"there is no type {kind}")
    return _NUMBERS[kind]


def _parsed(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise missing_package("gguf", "generate") from None
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version:#x} of GGUF is not supported (2 and 3 are)")
    tensors, count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    rows = []
    for _ in range(tensors):
        name, axes = cursor.text(), cursor.number("I")
        if not 0 < axes <= MOST_AXES:
            raise ValueError(f"{name} has {axes} axes")
        shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
        rows.append((name, shape, GGMLQuantizationType(cursor.number("I")), cursor.number("Q")))
    alignment = metadata.get(ALIGNMENT, 32)
    start = -(-cursor.place // alignment) * alignment
    found = {}
    for name, shape, kind, offset in rows:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"{name} has rows of {shape[-1]}, but blocks of {block}")
        row_bytes = shape[-1] // block * block_bytes
        first = start + offset
        end = first + prod(shape[:-1]) * row_bytes
        if end > cursor.size:
            raise ValueError(f"{name} lies beyond its end")
        found[name] = Tensor(shape, kind.name, slice(first, end), row_bytes)
    return metadata, found
