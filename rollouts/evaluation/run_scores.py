"""The scores of a stored run: a few numbers for each of its tasks, in arrays."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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

METRICS_FILE: Final = "metrics.jsonl"


def check_directory(path: Path) -> None:
    """Raise `CommandFileError` unless it is a directory with groups or episodes of a run."""
    cure = "name the output directory of `rollouts run`, `rollouts eval` or `rollouts demo`"
    if not path.is_dir():
        raise CommandFileError(path, f"there is no such directory; {cure}")
    if not (path / METRICS_FILE).exists() and not is_run_directory(path):
        raise CommandFileError(path, f"it has no {METRICS_FILE} and no trajectories.mmr; {cure}")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a directory says of its run. None: not known. `results` are those of `results.json`."""

    complete: bool | None
    configuration: dict[str, Any] | None
    results: EvaluationResults | None


def read_settings(directory: Path) -> RunSettings:
    """Read `results.json` and `summary.json`. Raises `CommandFileError` for a file that cannot be read."""
    path = directory / RESULTS_FILE
    try:
        results = EvaluationResults.read(path)
    except FileNotFoundError:
        results = None
    except OSError as error:
        raise CommandFileError(path, f"it cannot be read: {error.strerror or error}") from error
    summary = read_summary(directory / "summary.json") or {}
    configuration = results.configuration if results is not None else summary.get("configuration")
    known = isinstance(configuration, dict) and bool(configuration)
    complete = summary.get("complete", None if results is None else results.complete)
    return RunSettings(complete, configuration if known else None, results)


@dataclass(frozen=True, slots=True)
class RunScores:
    """What a run's groups say. `versions` are the oldest versions of the weights of its groups, each once.

    `data`: a digest of the data of each task of `scores`, uint64; 0 where they are not known. `problems`: a
    line for each thing that could not be read.
    """

    scores: TaskScores
    data: np.ndarray
    versions: list[str]
    problems: list[str]


def read_scores(directory: Path, *, threshold: float, failed: FailedEpisodes) -> RunScores:
    """Read the groups of `metrics.jsonl`, or where there is none the episodes of `trajectories.mmr`.

    The second file has no group rewards: a task's total rewards are then those of the environment. Raises
    `CommandFileError` for a damaged line, and a run without a group.
    """
    problems: list[str] = []
    scores = TaskScores(threshold, failed)
    data: array[int] = array("Q")
    versions: dict[str, None] = {}
    metrics = directory / METRICS_FILE
    rows = _stored_rows(metrics, problems) if metrics.exists() else _rows_of_episodes(directory, problems)
    for row in rows:
        versions[row.oldest_version] = None
        scores.add(row)
        if len(data) < len(scores.places):
            data.append(_digest(row.task_data))
    if not data:
        found = f" ({problems[0]})" if problems else ""
        raise CommandFileError(directory, f"it has no finished group{found}; compare it when its run has got further")
    scores.complete()
    return RunScores(scores, np.array(data), list(versions), problems)


def _stored_rows(metrics: Path, problems: list[str]) -> Iterator[GroupMetrics]:
    for number, line in complete_lines(metrics, problems):
        try:
            yield GroupMetrics.of_line(line)
        except ValidationError as error:
            cure = "remove the line; `rollouts run` or `rollouts eval` with --resume writes it anew"
            reason = f"no line of a run ({line_violation(error)}); {cure}"
            raise CommandFileError(metrics, reason, line=number) from error


def _rows_of_episodes(directory: Path, problems: list[str]) -> Iterator[GroupMetrics]:
    with open_reader(directory) as reader:
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
