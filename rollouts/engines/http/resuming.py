"""Completions that a pause of a server cuts off are continued from their tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How completions that a pause aborts are continued.

    They wait until the server runs again, at most `wait_seconds`, and are continued, each at most `rounds` times.
    """

    rounds: int = 64
    wait_seconds: float = 3600.0
