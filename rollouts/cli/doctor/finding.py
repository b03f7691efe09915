"""The results of checks of a server, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rich.console import Console
from rich.text import Text

from rollouts.terminal.table import Column, Row, print_table
from rollouts.terminal.text import printable_line


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


def ok(seen: str, *, check: str = "") -> Finding:
    """As the three below: without `check`, the finding gets the name of the check that returns it."""
    return Finding(check, Outcome.OK, seen)


def failed(seen: str, cure: str, *, check: str = "") -> Finding:
    return Finding(check, Outcome.FAILED, seen, cure)


def absent(seen: str, cure: str, *, check: str = "") -> Finding:
    return Finding(check, Outcome.ABSENT, seen, cure)


def skipped(seen: str, cure: str = "", *, check: str = "") -> Finding:
    return Finding(check, Outcome.SKIPPED, seen, cure)


_STYLES = {Outcome.OK: "green", Outcome.FAILED: "bold red", Outcome.ABSENT: "yellow", Outcome.SKIPPED: "dim"}


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print a row for each finding, with the cure below what was seen."""
    rows: list[Row] = []
    for finding in findings:
        seen = Text(printable_line(finding.seen))
        if finding.cure:
            seen.append(f"\n-> {printable_line(finding.cure)}", "bold" if finding.outcome is Outcome.FAILED else "")
        rows.append([finding.check, Text(finding.outcome.value, _STYLES[finding.outcome]), seen])
    print_table([Column("check"), Column("outcome"), Column("seen", min_width=32)], rows, console)


def summary(findings: Sequence[Finding]) -> str:
    counts = {outcome: sum(finding.outcome is outcome for finding in findings) for outcome in Outcome}
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
