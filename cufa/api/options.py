"""Types of the public functions' arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

Causal = bool | Literal["bottom-right", "top-left"]
Layout = Literal["bhsd", "bshd"]
Precision = Literal["fp8"]
Window = tuple[int | None, int | None]
#: A Python function, or C++ for the GPU.
UserFunction = Callable[..., Any] | str
