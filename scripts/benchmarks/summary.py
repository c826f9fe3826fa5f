"""Ratios of cufa to its peers, and names, for pages and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Summary(NamedTuple):
    """cufa against one peer: the cells both ran, and the ratios there."""

    cells: int
    geomean: float
    minimum: float
    worst: dict[str, Any]


def ratio(row: dict[str, Any], peer: str) -> float:
    """Return how many times as fast as `peer` cufa is in a row; more than 1 is faster."""
    ours, theirs = float(row["cufa"]), float(row["peers"][peer])
    return theirs / ours if row["unit"] == "us" else ours / theirs


def regret(row: dict[str, Any]) -> float:
    """Return how many times as long as the fastest variant the planner's choice takes in a row."""
    return float(row["planned_us"] / row["best_us"])


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def peer_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the peers of all rows, in the order in which they first appear."""
    return list(dict.fromkeys(peer for row in rows for peer in row["peers"]))


def figure_of(row: dict[str, Any], name: str, kind: str = "") -> float | None:
    """Return a contestant's figure of a row: its speed or time, or a kind such as "_maxerr"."""
    value = row.get(f"cufa{kind}") if name == "cufa" else row.get(f"peers{kind}", {}).get(name)
    return None if value is None else float(value)


def dim_words(row: dict[str, Any]) -> str:
    """Return the head dim of a row, and that of V behind it where it differs."""
    return str(row["d"]) if row["d"] == row["dv"] else f"{row['d']}/{row['dv']}"


def with_best(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return rows with one more peer, `name`: the fastest of each row that has any."""
    found = []
    for row in rows:
        more: dict[str, Any] = {}
        peers = row["peers"]
        if peers:
            best = min(peers, key=lambda peer: ratio(row, peer))
            more["peers"] = {**peers, name: peers[best]}
            if best in row.get("replayed", ()):
                more["replayed"] = [*row["replayed"], name]
        found.append({**row, **more})
    return found


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Summary]:
    """Return the summary of every peer, over the rows that hold it."""
    summaries = {}
    for peer in peer_names(rows):
        shared = [row for row in rows if peer in row["peers"]]
        worst = min(shared, key=lambda row: ratio(row, peer))
        ratios = [ratio(row, peer) for row in shared]
        summaries[peer] = Summary(len(shared), geomean(ratios), min(ratios), worst)
    return summaries


class ErrorSummary(NamedTuple):
    """Errors of one peer: its largest, and the largest quotient of cufa's to its own in a cell."""

    largest: float
    cufa_largest: float
    quotient: float


def summarise_errors(rows: Sequence[dict[str, Any]]) -> dict[str, ErrorSummary]:
    """Return the error summary of every peer, over the rows that hold its error and cufa's."""
    summaries = {}
    for peer in peer_names(rows):
        pairs = [
            (row["cufa_maxerr"], row["peers_maxerr"][peer])
            for row in rows
            if peer in row.get("peers_maxerr", {})
        ]
        if pairs:
            ours, theirs = (max(errors) for errors in zip(*pairs, strict=True))
            quotient = max(a / b if b else math.inf for a, b in pairs)
            summaries[peer] = ErrorSummary(theirs, ours, quotient)
    return summaries
