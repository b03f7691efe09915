"""The files of a run's directory that a report reads."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import ValidationError

from rollouts.compared_tokens import ComparedTokens
from rollouts.errors import CommandFileError, RolloutsError
from rollouts.evaluation.results import RESULTS_FILE, EvaluationResults
from rollouts.observability.group_metrics import GroupMetrics, line_violation, read_summary
from rollouts.observability.metric_sinks import complete_lines
from rollouts.observability.training_log import MISMATCH_FILE, TRAINING_FILE, read_step_mismatch
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_files import TRAJECTORIES_FILE, Episode, episodes_of_record, open_reader, read_episodes
from transport import RecordReader, TransportError

GROUPS_FILE: Final = "metrics.jsonl"
RUNNER_FILE: Final = "runner_metrics.jsonl"
_FILES: Final = (TRAJECTORIES_FILE, TRAINING_FILE, RUNNER_FILE)


@dataclass(slots=True)
class RunFiles:
    """A run's directory. `problems` gets a line for each thing in it that cannot be read."""

    path: Path
    problems: list[str] = field(default_factory=list)

    def episodes(self) -> Iterator[Episode]:
        """The episodes that are written so far and can be read, in order; none where there is no file."""
        if not (self.path / TRAJECTORIES_FILE).exists():
            return
        found: list[str] = []
        with open_reader(self.path / TRAJECTORIES_FILE) as reader:
            yield from read_episodes(reader, found)
        self.problems += [f"{TRAJECTORIES_FILE}: {problem}" for problem in found]

    def chosen_episodes(self, records: Mapping[int, Mapping[int, int]]) -> Iterator[tuple[int, Trajectory]]:
        """Episodes that `episodes` has yielded, in order, with their numbers: of each record those at the places."""
        with open_reader(self.path / TRAJECTORIES_FILE) as reader:
            for record in sorted(records):
                _, found = episodes_of_record(reader, record, 0, [])
                numbers = records[record]
                yield from ((numbers[one.place], one.trajectory) for one in found if one.place in numbers)

    def mismatches(self, problems: list[str]) -> Iterator[tuple[ComparedTokens, np.ndarray]]:
        """The compared tokens of each training step, and which of them the trainer's weights have sampled.

        None where there is no file, or none that can be read. `problems` gets a line for each thing that cannot
        be read.
        """
        path = self.path / MISMATCH_FILE
        if not path.exists():
            return
        try:
            opened = RecordReader(path)
        except (TransportError, OSError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            problems.append(f"{MISMATCH_FILE}: {reason}")
            return
        with opened as reader:
            for record in range(len(reader)):
                try:
                    yield read_step_mismatch(reader, record, path)
                except TransportError as error:
                    problems.append(f"{MISMATCH_FILE}, record {record}: {error}")
            if reader.truncated_bytes:
                problems.append(f"the last {reader.truncated_bytes} bytes of {MISMATCH_FILE} are incomplete")

    def groups(self) -> Iterator[GroupMetrics]:
        """The lines of `metrics.jsonl` that can be read, none where there is no file."""
        for number, line in complete_lines(self.path / GROUPS_FILE, self.problems):
            try:
                yield GroupMetrics.model_validate_json(line)
            except ValidationError as error:
                self.problems.append(f"{GROUPS_FILE}, line {number}: no line of a group ({line_violation(error)})")

    def evaluation(self) -> EvaluationResults | None:
        """The results of `rollouts eval`; None without them, and where they cannot be read, which `problems` says."""
        path = self.path / RESULTS_FILE
        if not path.exists():
            return None
        try:
            return EvaluationResults.read(path)
        except (CommandFileError, OSError) as error:
            self.problems.append(str(error))
            return None

    def is_complete(self) -> bool | None:
        """What `summary.json` says: whether all tasks were run. None without one, as while the run is going.

        None also for one that cannot be read; `problems` says why.
        """
        try:
            summary = read_summary(self.path / "summary.json")
        except CommandFileError as error:
            self.problems.append(str(error).removeprefix(f"{self.path}{os.sep}"))
            return None
        return None if summary is None else bool(summary["complete"])


def run_directories(path: Path) -> list[Path]:
    """The directory itself, if it has files of a run or there is nothing else; those of models in it, by name.

    A directory of `rollouts tinker` has one for each model, and itself the recorded samples; with keys both
    are in a folder for each of them.
    """
    places = (f"*/{TRAINING_FILE}", f"user-*/*/{TRAINING_FILE}", f"user-*/{TRAJECTORIES_FILE}")
    models = sorted({found.parent for place in places for found in path.glob(place)})
    return [path, *models] if not models or any((path / name).exists() for name in _FILES) else models


def open_run(path: Path) -> RunFiles:
    """The files of the directory of a run, a demonstration or a training log. Raises `RolloutsError`."""
    if not path.is_dir():
        raise RolloutsError(f"{path}: there is no such directory; name the output directory of a run")
    if not any((path / name).exists() for name in _FILES):
        names = ", ".join(_FILES)
        cure = "name the output directory of `rollouts run` or `rollouts demo`, or of `rollouts tinker` after a step"
        raise RolloutsError(f"{path}: it holds none of {names}; {cure}")
    return RunFiles(path)
