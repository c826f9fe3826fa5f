"""Reading the JSON files of a model's folder; every error names the file and the key."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import ModelError

_REQUIRED = object()
_MOST = 2**31 - 1


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises
    ------
    ModelError
        The file is missing, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


class Values:
    """The values of a JSON object, checked as they are asked for.

    To all but `has` and `number_or_null`, a key that is null is as one that is missing.

    Parameters
    ----------
    values : mapping
    where : str
        The object's name in errors, such as its file's name.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def has(self, key: str) -> bool:
        """Return whether there is such a key."""
        return key in self._values

    def get(self, key: str) -> Any:
        """Return the value as it is, or None."""
        return self._values.get(key)

    def integer(
        self, key: str, default: Any = _REQUIRED, *, least: int = 1, most: int = _MOST
    ) -> int:
        """Return an integer of `least` to `most`."""
        value = self._value(key, default)
        if type(value) is not int or value < least:
            raise self._error(key, f"an integer of {least} or more", value)
        if value > most:
            raise self._error(key, f"an integer of {most} or less", value)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """Return a positive number."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self._error(key, "a positive number", value)
        return float(value)

    def number_or_null(self, key: str, default: float) -> float | None:
        """Return a positive number, or None where the key says null."""
        is_null = self.has(key) and self.get(key) is None
        return None if is_null else self.number(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._error(key, "true or false", value)
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Return a string."""
        value = self._value(key, default)
        if type(value) is not str:
            raise self._error(key, "a string", value)
        return value

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return token ids, written as one or a list or not at all."""
        value = self._value(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(token) is not int for token in ids):
            raise self._error(key, "a token id or a list of them", value)
        return tuple(ids)

    def items(self, key: str) -> list[Any]:
        """Return a list; empty where there is none."""
        value = self._value(key, [])
        if not isinstance(value, list):
            raise self._error(key, "a list", value)
        return value

    def part(self, key: str) -> "Values | None":
        """Return the object under a key, or None where there is none."""
        value = self._value(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._error(key, "an object", value)
        return Values(value, f"{self._where}: {key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError(f"{self._where}: {key} is missing")
        return default

    def _error(self, key: str, expected: str, value: Any) -> ModelError:
        return ModelError(f"{self._where}: {key} must be {expected}, not {value!r}")
