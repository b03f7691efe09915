"""The output directory of a run: the names of its files, and whether it can be used."""

import os
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from rollouts.errors import CommandFileError
from rollouts.evaluation.results import RESULTS_FILE
from rollouts.observability import MetricSink, TensorBoardSink, WandbSink
from rollouts.observability.training_log import MISMATCH_FILE, TRAINING_FILE
from rollouts.run_config.config_file import ConfigFile
from transport.errors import FileLockedError
from transport.records.file_lock import locked


class OutputDirectory:
    """The files of a run: a journal or checkpoints, from which it continues, and what it produces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self.trajectories = path / "trajectories.mmr"
        self.metrics = path / "metrics.jsonl"
        self.runner_metrics = path / "runner_metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.summary = path / "summary.json"
        self.results = path / RESULTS_FILE
        # Of `rollouts train`.
        self.checkpoints = path / "checkpoints"
        self.training_lock = self.checkpoints / "lock"
        self.evaluations = path / "evaluations"
        self.weights = path / "weights"
        self.training = path / TRAINING_FILE
        self.mismatch = path / MISMATCH_FILE

    @property
    def files(self) -> list[Path]:
        """What the directory holds."""
        return [each for each in vars(self).values() if each != self.path]

    @property
    def appended(self) -> list[Path]:
        """What training appends to, step by step."""
        return [self.trajectories, self.metrics, self.training, self.mismatch]

    def lock_training(self, held: ExitStack | AsyncExitStack) -> None:
        """Let no other process train in it until `held` is closed. Raises `CommandFileError` where one does."""
        try:
            held.enter_context(locked(self.training_lock, make=True))
        except FileLockedError as error:
            reason = "another process trains in it; end it, or name another directory"
            raise CommandFileError(self.path, reason) from error


_KEY = ("output", "directory")


def prepare_output(file: ConfigFile, *, resume: bool, trains: bool = False) -> OutputDirectory:
    """Check the output directory as `check_output`, and make it. Raises `RunConfigError`."""
    output = check_output(file, resume=resume, trains=trains)
    with file.naming(*_KEY):
        output.path.mkdir(parents=True, exist_ok=True)
    return output


def check_output(file: ConfigFile, *, resume: bool, trains: bool = False) -> OutputDirectory:
    """The output directory, which is not made here.

    Without `resume` it must be new or empty; with it, new, empty or that of a run, whose files are no
    symbolic links: the run would write to where they point. `trains`: it is that of `rollouts train`, which
    is empty, too, where it has only the lock of a start that was refused. Raises `RunConfigError`.
    """
    output = OutputDirectory(file.resolve(file.config.output.directory))
    existing = next(path for path in (output.path, *output.path.parents) if os.path.lexists(path))
    reason = ""
    with file.naming(*_KEY):
        if not existing.is_dir():
            reason = f"cannot be made: {existing} is no directory; name another directory"
        elif existing != output.path or _is_empty(output, trains):
            return output
        elif not resume:
            reason = "is not empty; pass --resume to continue the run in it, or name another directory"
        elif not (kept := output.checkpoints if trains else output.journal).is_dir():
            reason = (
                f"is not empty and has no {kept.name} to continue from; name the directory of a run, or an empty one"
            )
        elif links := [path for path in (*output.files, *kept.iterdir()) if path.is_symlink()]:
            reason = f"has a symbolic link, {links[0]}, to where the run would write; put the file itself there"
    if reason:
        raise file.error(_KEY, f"{output.path} {reason}")
    return output


def _is_empty(output: OutputDirectory, trains: bool) -> bool:
    own = (output.checkpoints, output.training_lock) if trains else ()
    # `rglob` passes over a directory that cannot be read, and `scandir` raises.
    return not any(os.scandir(output.path)) or all(
        path in own and not path.is_symlink() for path in output.path.rglob("*")
    )


def metric_sinks(file: ConfigFile, output: OutputDirectory) -> list[MetricSink]:
    """Where the metrics also go: TensorBoard, Weights & Biases. Raises `RunConfigError`, `MissingExtraError`."""
    section = file.config.output
    sinks: list[MetricSink] = []
    if section.tensorboard:
        sinks.append(TensorBoardSink(output.tensorboard))
    if section.wandb is not None:
        with file.naming("output", "wandb"):
            sinks.append(WandbSink(**section.wandb.model_dump(), directory=output.path))
    return sinks
