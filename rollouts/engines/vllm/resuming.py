"""How long and how often an engine for vLLM continues completions that a pause of the server has cut off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How completions that a pause aborts are continued.

    They wait until the server runs again, at most `wait_seconds`, and are continued, each at most `rounds` times. The
    server is polled first after `first_poll_seconds`, later at most every `longest_poll_seconds`.
    """

    rounds: int = 64
    wait_seconds: float = 3600.0
    first_poll_seconds: float = 0.05
    longest_poll_seconds: float = 1.0
