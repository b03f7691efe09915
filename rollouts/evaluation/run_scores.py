"""The scores of a stored run: a few numbers for each of its tasks, in arrays."""

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from pydantic import ValidationError

from rollouts.errors import CommandFileError
from rollouts.evaluation.results import RESULTS_FILE, EvaluationResults, FailedEpisodes
from rollouts.evaluation.task_scores import TaskScores
from rollouts.observability.group_metrics import GroupMetrics, line_violation, read_summary
from rollouts.observability.metric_sinks import complete_lines
from rollouts.rewards import reward_parts
from rollouts.runner.group import Group
from rollouts.task import Task
from rollouts.trajectory.tree import Trajectory
from rollouts.trajectory_files import is_run_directory, open_reader, read_episodes
from rollouts.version_order import VersionOrder

_NAMED_VERSIONS: Final = 8


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The directory of a run, and of a training run the version of the weights whose groups are meant; None: all."""

    path: Path
    version: str | None = None

    @classmethod
    def of(cls, text: str | os.PathLike[str]) -> Self:
        """`DIRECTORY` or `DIRECTORY@VERSION`; a path that exists is a directory, whatever its name.

        Where a training run has evaluated the version on held-out tasks, this is the directory of these.
        """
        text = os.fspath(text)
        directory, mark, version = text.rpartition("@")
        if not mark or os.path.lexists(text):
            return cls(Path(text))
        if (held_out := Path(directory, "evaluations", version)).is_dir():  # of `rollouts train`
            return cls(held_out)
        return cls(Path(directory), version)

    def __str__(self) -> str:
        return str(self.path) if self.version is None else f"{self.path}@{self.version}"

    @property
    def name(self) -> str:
        """The last part of the directory's path, with the version: "out@10", also of a step's evaluation."""
        path = self.path.resolve()
        run = path.parent.parent
        if path.parent.name == "evaluations" and (run / "checkpoints").is_dir():  # of a training run
            return f"{run.name}@{path.name}"
        return str(StoredRun(Path(path.name), self.version))

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def check(self) -> None:
        """Raise `CommandFileError` unless it is a directory with groups or episodes of a run."""
        cure = "name the output directory of `rollouts run`, `rollouts eval` or `rollouts demo`"
        if not self.path.is_dir():
            of_version = ", or of RUN@VERSION the part before @" if self.version is not None else ""
            raise CommandFileError(self.path, f"there is no such directory; {cure}{of_version}")
        if not self.metrics.exists() and not is_run_directory(self.path):
            raise CommandFileError(self.path, f"it has no metrics.jsonl and no trajectories.mmr; {cure}")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a directory says of its run. None: not known. `results` are those of `results.json`."""

    complete: bool | None
    configuration: dict[str, Any] | None
    results: EvaluationResults | None


def read_settings(stored: StoredRun) -> RunSettings:
    """Read `results.json` and `summary.json`. Raises `CommandFileError` for a file that cannot be read."""
    path = stored.path / RESULTS_FILE
    try:
        results = EvaluationResults.read(path)
    except FileNotFoundError:
        results = None
    except OSError as error:
        raise CommandFileError(path, f"it cannot be read: {error.strerror or error}") from error
    summary = read_summary(stored.path / "summary.json") or {}
    configuration = results.configuration if results is not None else summary.get("configuration")
    known = isinstance(configuration, dict) and bool(configuration)
    complete = summary.get("complete", None if results is None else results.complete)
    return RunSettings(complete, configuration if known else None, results)


@dataclass(frozen=True, slots=True)
class RunScores:
    """What a run's groups say. `versions` has the number of groups of each oldest version of the weights.

    `data`: a digest of the data of each task of `scores`, uint64; 0 where they are not known. `problems`: a
    line for each thing that could not be read.
    """

    scores: TaskScores
    data: np.ndarray
    versions: Counter[str]
    problems: list[str]


def read_scores(stored: StoredRun, *, threshold: float, failed: FailedEpisodes) -> RunScores:
    """Read the groups of `metrics.jsonl`, or where there is none the episodes of `trajectories.mmr`.

    The second file has no group rewards: a task's total rewards are then those of the environment. Raises
    `CommandFileError` for a damaged line, and a run without a group, or without one of the version.
    """
    problems: list[str] = []
    scores = TaskScores(threshold, failed)
    data: array[int] = array("Q")
    versions: Counter[str] = Counter()
    rows = _stored_rows(stored, problems) if stored.metrics.exists() else _rows_of_episodes(stored, problems)
    for row in rows:
        versions[row.oldest_version] += 1
        # Of an adapter, the version "policy@3" is named by its number, too.
        if stored.version in (None, row.oldest_version, row.oldest_version.rpartition("@")[2]):
            scores.add(row)
            if len(data) < len(scores.places):
                data.append(_digest(row.task_data))
    if not data:
        raise CommandFileError(stored.path, _reason_for_nothing(stored, versions, problems))
    scores.complete()
    chosen = versions if stored.version is None else Counter({stored.version: versions[stored.version]})
    return RunScores(scores, np.array(data), chosen, problems)


def _reason_for_nothing(stored: StoredRun, versions: Counter[str], problems: list[str]) -> str:
    if versions:
        named = [f"{version!r:.80}" for version in versions if version]
        known = ", ".join(named if len(named) <= _NAMED_VERSIONS else [*named[: _NAMED_VERSIONS - 1], "...", named[-1]])
        found = f"it has groups of the versions {known}" if named else "its groups have no versions of weights"
        return f"no group was sampled by the weights of version {stored.version!r:.80}; {found}"
    found = f" ({problems[0]})" if problems else ""
    return f"it has no finished group{found}; compare it when its run has got further"


def _stored_rows(stored: StoredRun, problems: list[str]) -> Iterator[GroupMetrics]:
    for number, line in complete_lines(stored.metrics, problems):
        try:
            yield GroupMetrics.model_validate_json(line)
        except ValidationError as error:
            cure = "remove the line; `rollouts run` or `rollouts eval` with --resume writes it anew"
            reason = f"no line of a run ({line_violation(error)}); {cure}"
            raise CommandFileError(stored.metrics, reason, line=number) from error


def _rows_of_episodes(stored: StoredRun, problems: list[str]) -> Iterator[GroupMetrics]:
    with open_reader(stored.path) as reader:
        for episode in read_episodes(reader, problems):
            yield GroupMetrics.of(_group_of(episode.trajectory))
    problems.append("it has no metrics.jsonl: rewards are those of the environment, without group rewards")


def _group_of(trajectory: Trajectory) -> Group:
    versions = dict.fromkeys(span.version for node in trajectory.nodes for span in node.weight_spans)
    order = VersionOrder()
    oldest = min(versions, key=lambda version: order.place(version) or 0, default="")  # of names, the first
    return Group(
        task=Task(trajectory.group_id or trajectory.episode_id or "episode"),  # without a group, a task by itself
        episodes=(trajectory,),
        attempts=(1,),
        rewards=np.array([trajectory.reward], np.float64),
        group_rewards=np.zeros(1),
        reward_parts=reward_parts([trajectory]),
        oldest_version=oldest,
    )


def _digest(data: Any) -> int:
    if data is None:
        return 0
    text = json.dumps(data, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
