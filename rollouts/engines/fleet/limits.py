"""Bounds of a fleet: how often it checks its members, and when it ejects, moves and waits."""

from __future__ import annotations

from dataclasses import dataclass

from rollouts.errors import ArgumentError
from rollouts.values import check_integer, check_positive, finite_number


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Seconds and counts.

    While requests run, every member is checked each `check_seconds`, and a check may take `check_timeout` seconds. A
    member is ejected after `eject_after` failed checks in a row, and at once if it fails a check after it failed a
    request; it serves again after a check without failure.

    A request moves to at most `failovers` further members. The bound is small on purpose: a request that kills servers
    must not reach all of them. A request for which no member is available waits `wait_seconds`.

    A new session goes to another member than its hash chooses if that one has more requests in flight than
    `spill_ratio` times the mean of all members, and more than `spill_requests`. The last `sessions` sessions keep their
    member; an older one gets a member as a new session does.
    """

    check_seconds: float = 5.0
    check_timeout: float = 10.0
    eject_after: int = 2
    failovers: int = 2
    wait_seconds: float = 60.0
    spill_ratio: float = 1.25
    spill_requests: int = 8
    sessions: int = 2**18

    def __post_init__(self) -> None:
        least_counts = {"eject_after": 1, "failovers": 0, "sessions": 1, "spill_requests": 0}
        for name, least in least_counts.items():
            check_integer(name, getattr(self, name), least=least)
        for name in ("check_seconds", "check_timeout"):
            check_positive(name, getattr(self, name), "pass a finite number of seconds above 0")
        if (seconds := finite_number(self.wait_seconds)) is None or seconds < 0:
            raise ArgumentError("wait_seconds", self.wait_seconds, "pass a finite number of seconds, 0 or more")
        if (ratio := finite_number(self.spill_ratio)) is None or ratio < 1:
            raise ArgumentError("spill_ratio", self.spill_ratio, "pass a finite number of at least 1")
