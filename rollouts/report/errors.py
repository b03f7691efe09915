"""Errors of reports."""

from __future__ import annotations

from pathlib import Path

from rollouts.errors import RolloutsError


class ReportDirectoryError(RolloutsError):
    """A path is no directory of a run. `path` is the path."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")
