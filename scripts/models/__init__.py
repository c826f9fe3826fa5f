"""Shared parts of these scripts' models: devices, matrix products, text, errors."""

from models.backend import DTYPES, Array, HostCopy, choose_array_module, module_of
from models.errors import ModelError, missing_package
from models.linear import Linear
from models.text import FileError, drop_output, is_text, open_text, shown

__all__ = [
    "DTYPES",
    "Array",
    "FileError",
    "HostCopy",
    "Linear",
    "ModelError",
    "choose_array_module",
    "drop_output",
    "is_text",
    "missing_package",
    "module_of",
    "open_text",
    "shown",
]
