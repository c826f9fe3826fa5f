"""Text files and standard input, as the scripts read them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class FileError(Exception):
    """A file cannot be read or written, or holds nothing to work on."""


def shown(name: str) -> str:
    """Return a file's name as messages say it: "-" is standard input."""
    return "standard input" if name == "-" else name


def is_text(text: str) -> bool:
    """Return whether all of it is text, and nothing bytes of a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def drop_output() -> None:
    """Let go of a standard output that fails, or Python complains about it on its way out."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def open_text(name: str) -> Iterator[TextIO]:
    """Open a UTF-8 file, or standard input as "-".

    Raises
    ------
    FileError
        It cannot be read, or what is read inside the `with` block is not UTF-8.
    """
    if name == "-" and sys.stdin is None:
        raise FileError("cannot read standard input: it is closed")
    try:
        # utf-8-sig is UTF-8 with or without the mark that some editors put first.
        with open(
            sys.stdin.fileno() if name == "-" else name, encoding="utf-8-sig", closefd=name != "-"
        ) as file:
            yield file
    except OSError as error:
        raise FileError(f"cannot read {shown(name)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{shown(name)} is not UTF-8 text: {error.reason}") from None
