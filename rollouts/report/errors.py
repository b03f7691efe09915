"""Errors of reports."""

from __future__ import annotations

from pathlib import Path

from rollouts.errors import RolloutsError


class ReportDirectoryError(RolloutsError):
    """A path is no directory of a run, or a file of it cannot be read. `path` is the path.

    Cure: name the output directory of `rollouts run` or `rollouts demo`; repair a damaged file with
    `rollouts traj repair`.
    """

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")
