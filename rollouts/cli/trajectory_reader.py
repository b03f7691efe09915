"""Opens the trajectory file, or that of the run's directory, that a command is given."""

from __future__ import annotations

from pathlib import Path

from rollouts.cli.errors import CommandFileError
from transport import RecordReader, TransportError

#: The name of the trajectory file in the output directory of a run or demo.
_IN_A_RUN = "trajectories.mmr"
#: The trajectory files of a journal, below the directory of the journal or of what has the journal.
_OF_A_JOURNAL = ("episodes.mmr", "journal/episodes.mmr")


def open_reader(path: Path, problem: str = "not a trajectory file") -> RecordReader:
    """Open a record file, or that of a run's directory.

    Raises `OSError`, and `CommandFileError`, which begins with `problem`, for other files.
    """
    file = trajectory_file(path)
    try:
        return RecordReader(file)
    except TransportError as error:
        raise CommandFileError(file, f"{problem}: {error}") from error


def trajectory_file(path: Path) -> Path:
    """The file itself, or that of a run's directory. Raises `CommandFileError` for another directory."""
    if not path.is_dir():
        return path
    if not is_run_directory(path):
        found = next((each for each in (path / name for name in _OF_A_JOURNAL) if each.is_file()), None)
        such_as = "" if found is None else f", such as {found}, which a journal keeps"
        raise CommandFileError(path, f"the directory has no {_IN_A_RUN}; name a trajectory file{such_as}")
    return path / _IN_A_RUN


def is_run_directory(path: Path) -> bool:
    """Whether it is a directory with a trajectory file, as `rollouts run` and `rollouts demo` write it."""
    return (path / _IN_A_RUN).is_file()
