"""Clock and power of the card, read from nvidia-smi while something else runs."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Card(NamedTuple):
    """State of a card; None for what nvidia-smi does not say."""

    clock_mhz: float | None
    power_w: float | None


def command(bus_id: str) -> list[str]:
    """Return what prints a line of clock and power of the card on a PCI bus every 100 ms."""
    query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    return ["nvidia-smi", *query, "-lms", "100", "-i", bus_id]


def parse(line: str) -> Card:
    """Return the state that a line holds, such as ``1980, 652.07`` or ``1980, [N/A]``."""
    fields = line.split(",")
    return Card(*map(_number, fields)) if len(fields) == 2 else Card(None, None)


def medians(readings: Iterable[tuple[float, Card]], first: float, last: float) -> Card:
    """Return the medians over the readings, each with its time, between two times."""
    inside = [card for at, card in readings if first <= at <= last]
    return Card(*(_median(getattr(card, field) for card in inside) for field in Card._fields))


class Monitor:
    """Runs a command within a ``with`` block and keeps what its lines say, with the time of each.

    `complaint` says why readings may be missing.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._readings: list[tuple[float, Card]] = []
        self._running: tuple[subprocess.Popen[bytes], threading.Thread] | None = None
        self.complaint = f"{self._command[0]} says nothing"

    def __enter__(self) -> Monitor:
        """Start the command, if it is there."""
        # Behind a terminal every line comes when it is written; a pipe's come when a buffer is
        # full.
        ours, theirs = os.openpty()
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
            )
        except OSError as error:
            os.close(ours)
            self.complaint = f"{self._command[0]} does not start: {error.strerror}"
        else:
            reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
            reader.start()
            self._running = process, reader
        finally:
            os.close(theirs)
        return self

    def __exit__(self, *error: object) -> None:
        """End the command."""
        if self._running is None:
            return
        process, reader = self._running
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()

    def medians(self, first: float, last: float) -> Card:
        """Return the medians between two times of `time.perf_counter`."""
        return medians(list(self._readings), first, last)

    def _read(self, terminal: int) -> None:
        # A terminal whose other side is closed ends with an error.
        with open(terminal, encoding="utf-8") as lines, contextlib.suppress(OSError):
            for line in lines:
                card = parse(line)
                self._readings.append((time.perf_counter(), card))
                if None in card and line.strip():
                    self.complaint = f"{self._command[0]} says {line.strip()!r}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 1) if known else None
