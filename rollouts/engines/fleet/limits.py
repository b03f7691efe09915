"""Bounds of a fleet: how often it checks its members, and when it ejects, moves and waits."""

from dataclasses import dataclass

from rollouts.values import Bounded, number_field, whole_field


@dataclass(frozen=True, slots=True)
class FleetLimits(Bounded):
    """Seconds and counts.

    While requests run, every member is checked each `check_seconds`, and a check may take `check_timeout`
    seconds. A member is ejected after `eject_after` failed checks in a row, and at once if it fails a check
    after it failed a request; it serves again after a check without failure.

    A request moves to at most `failovers` further members. The bound is small on purpose: a request that
    kills servers must not reach all of them. A request for which no member is available waits `wait_seconds`.

    A new session goes to another member than its hash chooses if that one has more requests in flight than
    `spill_ratio` times the mean of all members, and more than `spill_requests`. The last `sessions` sessions
    keep their member; an older one gets a member as a new session does.
    """

    check_seconds: float = number_field(5.0, above=0)
    check_timeout: float = number_field(10.0, above=0)
    eject_after: int = whole_field(2)
    failovers: int = whole_field(2, least=0)
    wait_seconds: float = number_field(60.0, least=0)
    spill_ratio: float = number_field(1.25, least=1)
    spill_requests: int = whole_field(8, least=0)
    sessions: int = whole_field(2**18)
