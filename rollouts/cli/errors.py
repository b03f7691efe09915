"""Errors of the commands."""

from __future__ import annotations

from pathlib import Path

from rollouts.errors import RolloutsError


class CommandFileError(RolloutsError):
    """A path given to a command cannot be read or written, or does not hold what the command needs.

    `path` names it, `line` (from 1) the place in it if there is one.

    Cure: pass a path that exists and can be read, or, for an output, one that does not exist yet and can be written.
    """

    def __init__(self, path: Path, reason: str, *, line: int | None = None) -> None:
        self.path = path
        self.reason = reason
        self.line = line
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {reason}")


class ExportError(RolloutsError):
    """A medium was not exported. `digest` names it.

    Cure: choose another `--out`, or restore the damaged medium.
    """

    def __init__(self, digest: str, reason: str) -> None:
        self.digest = digest
        self.reason = reason
        super().__init__(f"{digest}: {reason}")
