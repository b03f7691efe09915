"""The output directory of a run: the names of its files, and whether it can be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollouts.evaluation.results import RESULTS_FILE
from rollouts.run_config.config_file import ConfigFile


class OutputDirectory:
    """The files of a run: a journal, from which it continues, and what it produces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self.trajectories = path / "trajectories.mmr"
        self.metrics = path / "metrics.jsonl"
        self.runner_metrics = path / "runner_metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.summary = path / "summary.json"
        self.results = path / RESULTS_FILE

    @property
    def files(self) -> list[Path]:
        """What the directory holds."""
        return [each for each in vars(self).values() if each != self.path]


_KEY = ("output", "directory")


def prepare_output(file: ConfigFile, *, resume: bool) -> OutputDirectory:
    """Check the output directory as `check_output`, and make it. Raises `RunConfigError`."""
    output = check_output(file, resume=resume)
    with _refusing(file, output, "cannot be made"):
        output.path.mkdir(parents=True, exist_ok=True)
    return output


def check_output(file: ConfigFile, *, resume: bool) -> OutputDirectory:
    """The output directory, which is not made here.

    Without `resume` it must be new or empty; with it, new, empty or that of a run, whose files are no symbolic links:
    the run would write to where they point. Raises `RunConfigError`.
    """
    output = OutputDirectory(file.resolve(file.config.output.directory))
    existing = next(path for path in (output.path, *output.path.parents) if os.path.lexists(path))
    if not existing.is_dir():
        reason = f"{output.path} cannot be made: {existing} is no directory; name another directory"
        raise file.error(_KEY, reason)
    with _refusing(file, output, "cannot be read"):
        is_empty = existing != output.path or not any(os.scandir(output.path))
    if not is_empty and not resume:
        cure = "pass --resume to continue the run in it, or name another directory"
        raise file.error(_KEY, f"{output.path} is not empty; {cure}")
    if not is_empty and not output.journal.is_dir():
        cure = "name the directory of a run, or an empty one"
        raise file.error(_KEY, f"{output.path} is not empty and has no journal to continue from; {cure}")
    if not is_empty:
        with _refusing(file, output, "cannot be read"):
            links = [path for path in (*output.files, *output.journal.iterdir()) if path.is_symlink()]
        if links:
            reason = f"{links[0]} is a symbolic link, and the run would write to where it points"
            raise file.error(_KEY, f"{reason}; put the file itself there, or name another directory")
    return output


@contextmanager
def _refusing(file: ConfigFile, output: OutputDirectory, refusal: str) -> Iterator[None]:
    """Raise `RunConfigError` in place of an error of the system."""
    try:
        yield
    except OSError as error:
        reason = f"{output.path} {refusal}: {error.strerror or error}; name another directory"
        raise file.error(_KEY, reason) from error
