"""Run the commands of a page's console blocks again, and put what they print below them.

``python scripts/console_blocks.py docs/exploring.md`` does so for commands that name a GPU or an
architecture: others need the GPU that their page speaks of.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

_BLOCK = re.compile(
    r"```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*?)```", re.DOTALL
)


def needs_no_gpu(command: str) -> bool:
    """Whether a command names what it compiles or plans for."""
    return "--arch" in command or "--gpu" in command


def run(command: str) -> str:
    """Return what a command prints on the standard output."""
    words = shlex.split(command.replace("\\\n", " "))
    words[:1] = [sys.executable] if words[0] == "python" else words[:1]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def rewritten(page: str) -> str:
    """Return a page with the output of its commands as it is now."""

    def block(match: re.Match[str]) -> str:
        command = match["command"]
        if not needs_no_gpu(command):
            return match[0]
        return f"```console\n$ {command}\n{run(command)}```"

    return _BLOCK.sub(block, page)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
