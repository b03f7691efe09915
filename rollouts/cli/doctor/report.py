"""Findings as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from rollouts.cli.doctor.finding import Finding, Outcome
from rollouts.cli.terminal import one_line

_STYLES = {Outcome.OK: "green", Outcome.FAILED: "bold red", Outcome.ABSENT: "yellow", Outcome.SKIPPED: "dim"}


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row a finding, what to do about it below what was seen."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("seen")
    for finding in findings:
        seen = Text(one_line(finding.seen))
        if finding.cure:
            seen.append(f"\n-> {one_line(finding.cure)}", style="bold" if finding.outcome is Outcome.FAILED else "")
        table.add_row(Text(finding.check), Text(finding.outcome.value, style=_STYLES[finding.outcome]), seen)
    return table


def summary(findings: Sequence[Finding]) -> str:
    counts = {outcome: sum(finding.outcome is outcome for finding in findings) for outcome in Outcome}
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
