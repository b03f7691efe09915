"""Opens the trajectory file that a command is given."""

from __future__ import annotations

from pathlib import Path

from rollouts.cli.errors import CommandFileError
from transport import RecordReader, TransportError


def open_reader(path: Path, problem: str = "not a trajectory file") -> RecordReader:
    """Open a record file. Raises `OSError`, and `CommandFileError`, which begins with `problem`, for other files."""
    try:
        return RecordReader(path)
    except TransportError as error:
        raise CommandFileError(path, f"{problem}: {error}") from error
