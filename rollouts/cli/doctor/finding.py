"""What a check of a server found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum


class Outcome(StrEnum):
    """`absent`: the server was started without something that only some uses need. `skipped`: not checked, with why."""

    OK = "ok"
    FAILED = "failed"
    ABSENT = "absent"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, what was seen, and what to do about it."""

    check: str
    outcome: Outcome
    seen: str
    cure: str = ""

    def without(self, secret: str | None) -> Finding:
        """The same, with a secret that an answer of the server may quote replaced by asterisks."""
        if not secret:
            return self
        return replace(self, seen=self.seen.replace(secret, "***"), cure=self.cure.replace(secret, "***"))

    def as_json(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}


def ok(check: str, seen: str) -> Finding:
    return Finding(check, Outcome.OK, seen)


def failed(check: str, seen: str, cure: str) -> Finding:
    return Finding(check, Outcome.FAILED, seen, cure)


def absent(check: str, seen: str, cure: str) -> Finding:
    return Finding(check, Outcome.ABSENT, seen, cure)


def skipped(check: str, seen: str, cure: str = "") -> Finding:
    return Finding(check, Outcome.SKIPPED, seen, cure)
