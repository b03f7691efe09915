"""Findings as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from rollouts.cli.doctor.finding import Finding, Outcome
from rollouts.terminal.table import Column, Row, print_table
from rollouts.terminal.text import printable_line

_STYLES = {Outcome.OK: "green", Outcome.FAILED: "bold red", Outcome.ABSENT: "yellow", Outcome.SKIPPED: "dim"}


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print a row for each finding, with the cure below what was seen."""
    columns = [Column("check"), Column("outcome"), Column("seen", min_width=32)]
    print_table(columns, [_row(finding) for finding in findings], console)


def _row(finding: Finding) -> Row:
    seen = Text(printable_line(finding.seen))
    if finding.cure:
        seen.append(f"\n-> {printable_line(finding.cure)}", "bold" if finding.outcome is Outcome.FAILED else "")
    return [finding.check, Text(finding.outcome.value, _STYLES[finding.outcome]), seen]


def summary(findings: Sequence[Finding]) -> str:
    counts = {outcome: sum(finding.outcome is outcome for finding in findings) for outcome in Outcome}
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
