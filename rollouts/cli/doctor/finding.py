"""The result of a check of a server."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum


class Outcome(StrEnum):
    """`absent`: the server lacks an option that only some uses need. `skipped`: not checked, with the reason."""

    OK = "ok"
    FAILED = "failed"
    ABSENT = "absent"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report: the name of the check, what was seen, and the cure."""

    check: str
    outcome: Outcome
    seen: str
    cure: str = ""

    def without(self, secret: str | None) -> Finding:
        """A copy in which the secret, which a response of the server may quote, is replaced by asterisks."""
        if not secret:
            return self
        return replace(self, seen=self.seen.replace(secret, "***"), cure=self.cure.replace(secret, "***"))

    def as_json(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}


def ok(seen: str, *, check: str = "") -> Finding:
    """As the three below: without `check`, the finding gets the name of the check that returns it."""
    return Finding(check, Outcome.OK, seen)


def failed(seen: str, cure: str, *, check: str = "") -> Finding:
    return Finding(check, Outcome.FAILED, seen, cure)


def absent(seen: str, cure: str, *, check: str = "") -> Finding:
    return Finding(check, Outcome.ABSENT, seen, cure)


def skipped(seen: str, cure: str = "", *, check: str = "") -> Finding:
    return Finding(check, Outcome.SKIPPED, seen, cure)
