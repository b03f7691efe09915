"""Checkpoints of a training run, from which it continues as if it had never stopped."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic.dataclasses import dataclass

from rollouts.errors import CommandFileError
from rollouts.files import replaced_path
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.group_files import write_errors_name
from rollouts.run_config.output import OutputDirectory
from rollouts.train.policy import NAME
from rollouts.training.trainer import Trainer

_STATE: Final = "state.json"
#: Keys of [train] that may change while a run continues.
_CHANGEABLE: Final = ("steps", "max_mismatch", "checkpoint_every", "keep", "threads", "tokens_per_pass")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A run after `step` steps.

    `tasks`: those that are done (`TaskOrder.state`). `best_step` is the step with the largest held-out
    reward, `best_reward`, of those that were evaluated. `files`: the bytes of each file that the run appends
    to. Everything random is derived from the seed, the step and the task, so that nothing of it is kept.
    """

    step: int = 0
    tasks: Mapping[str, Any] = field(default_factory=dict)
    best_step: int | None = None
    best_reward: float | None = None
    files: Mapping[str, int] = field(default_factory=dict)


class Checkpoints:
    """The directory `checkpoints` of a run: `step-N` with the trainer's file and a `TrainingState` each.

    A checkpoint appears whole. What the run has appended to its files after the newest one is cut off when
    it continues, because the steps behind it are taken again. `configuration` must not change meanwhile.
    """

    def __init__(self, output: OutputDirectory, file: ConfigFile, configuration: Mapping[str, Any], keep: int) -> None:
        self._output = output
        self._file = file
        trained = {name: value for name, value in configuration["train"].items() if name not in _CHANGEABLE}
        self._configuration = {**configuration, "train": trained}
        self._keep = keep

    def save(self, trainer: Trainer, state: TrainingState) -> TrainingState:
        """Write a checkpoint, and remove those that are neither among the last nor the best one."""
        sizes = {path.name: _synced_size(path) for path in self._output.appended if path.exists()}
        state = replace(state, files=sizes)
        content = json.dumps({**asdict(state), "configuration": self._configuration})
        with replaced_path(self._output.checkpoints / f"step-{state.step}") as directory:
            with write_errors_name(directory):
                trainer.save(NAME, directory)
            (directory / _STATE).write_text(content, "utf-8")
            for path in directory.iterdir():
                _synced_size(path)
        for step in self._steps()[: -self._keep]:
            if step != state.best_step:
                old = self._output.checkpoints / f"step-{step}"
                # It disappears whole, too; what a killed process leaves of the second name `restore` removes.
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.partial")))
        return state

    def restore(self, trainer: Trainer) -> TrainingState | None:
        """Continue from the newest checkpoint: its weights, and the files as they were. None: there is none yet.

        Raises `RunConfigError` where the configuration is another one, and `CommandFileError`, before anything
        is changed, for a checkpoint that cannot be read, a file that is shorter than it was, and groups
        without any checkpoint.
        """
        steps = self._steps()
        state = TrainingState()
        if steps:
            directory = self._output.checkpoints / f"step-{steps[-1]}"
            with _refused(directory):
                held = json.loads((directory / _STATE).read_bytes())
                configuration = dict(held.pop("configuration"))
                state = TrainingState(**held)
            self._check(configuration)
            self._check_sizes(state, directory)
            with _refused(directory):
                trainer.load(NAME, directory)
        elif self._output.metrics.exists() and self._output.metrics.stat().st_size:  # groups follow the first one
            reason = "there is no checkpoint, and the groups of the run would be removed; put a checkpoint back"
            raise CommandFileError(self._output.checkpoints, f"{reason}, or name another output directory")
        for path in self._output.appended:
            if path.exists():
                os.truncate(path, state.files.get(path.name, 0))
        for path in self._output.path.rglob(".*.partial"):  # of a killed process
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return state if steps else None

    def _steps(self) -> list[int]:
        """The steps of the checkpoints, ascending."""
        numbers = [path.name.removeprefix("step-") for path in self._output.checkpoints.glob("step-*")]
        return sorted(int(number) for number in numbers if number.isdecimal())  # not the copies of a user

    def _check(self, held: Mapping[str, Any]) -> None:
        for name in self._configuration.keys() | held.keys():
            if (now := self._configuration.get(name)) != (before := held.get(name)):
                key: Sequence[str] = (name,)
                if isinstance(now, dict) and isinstance(before, dict):
                    key = (name, next(one for one in now.keys() | before.keys() if now.get(one) != before.get(one)))
                    now, before = now.get(key[1]), before.get(key[1])
                reason = f"it was {before!r:.80} when the run began, and is {now!r:.80}; write the earlier value"
                raise self._file.error(tuple(key), f"{reason}, or another output directory")

    def _check_sizes(self, state: TrainingState, directory: Path) -> None:
        for path in self._output.appended:
            size, before = path.stat().st_size if path.exists() else 0, state.files.get(path.name, 0)
            if size < before:
                reason = f"it has {size:,} bytes, and {before:,} when {directory} was written"
                raise CommandFileError(path, f"{reason}; restore it, or name another output directory")


@contextmanager
def _refused(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        cure = "delete it, and --resume continues from the one before, where there is one"
        raise CommandFileError(directory, f"the checkpoint cannot be read ({error}); {cure}") from error


def _synced_size(path: Path) -> int:
    """The bytes of a file, which are on the disk when this returns."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size
