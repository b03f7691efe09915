"""The output directory of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rollouts.run_config.config_file import ConfigFile


@dataclass(frozen=True, slots=True)
class OutputDirectory:
    """The files of a run: a journal, from which it continues, and what it produces."""

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories.mmr"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def runner_metrics(self) -> Path:
        return self.path / "runner_metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"


def prepare_output(file: ConfigFile, *, resume: bool) -> OutputDirectory:
    """Make the output directory. Without `resume` it must be new or empty; with it, new, empty or that of a run.

    Raises `RunConfigError`.
    """
    key = ("output", "directory")
    output = OutputDirectory(file.resolve(file.config.output.directory))
    try:
        output.path.mkdir(parents=True, exist_ok=True)
        is_empty = not any(os.scandir(output.path))
    except OSError as error:
        reason = f"{output.path} cannot be made: {error.strerror or error}; name another directory"
        raise file.error(key, reason) from error
    if not is_empty and not resume:
        cure = "pass --resume to continue the run in it, or name another directory"
        raise file.error(key, f"{output.path} is not empty; {cure}")
    if not is_empty and not output.journal.is_dir():
        cure = "name the directory of a run, or an empty one"
        raise file.error(key, f"{output.path} is not empty and has no journal to continue from; {cure}")
    return output
