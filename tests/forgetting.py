"""Forgetting of calls, so that the next one is a new one."""

from __future__ import annotations

from cufa.launch import calls


def forget_calls() -> None:
    """Forget the calls of `attention`, `attention_varlen` and `decode`."""
    calls._prepared.clear()
    calls._latest_calls.clear()
