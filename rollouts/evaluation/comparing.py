"""Comparing stored runs: differences with intervals and tests, what else differs between them, tasks that changed."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from rollouts.errors import ArgumentError, RolloutsError
from rollouts.evaluation.comparison import ByFigure, ChangedTask, ComparedRun, Comparison, RunDifference, T
from rollouts.evaluation.results import FailedEpisodes
from rollouts.evaluation.run_scores import RunScores, RunSettings, StoredRun, read_scores, read_settings
from rollouts.evaluation.statistics import (
    Difference,
    Estimate,
    changes,
    mean_of_tasks,
    paired_difference,
    rate_of_tasks,
    reward_of_tasks,
    unpaired_difference,
)
from rollouts.evaluation.task_scores import TaskScores, checked_counting, chosen_k, known
from rollouts.terminal.text import counted, shortened

_MOST_NAMED: Final = 5
_MOST_LINES: Final = 40
_MOST_CHARACTERS: Final = 200


def compare_runs(
    runs: Sequence[str | os.PathLike[str]],
    *,
    threshold: float | None = None,
    failed: FailedEpisodes | None = None,
    k: Iterable[int] | None = None,
    unpaired: bool = False,
) -> Comparison:
    """Compare the runs of directories; the first is the baseline.

        comparison = compare_runs(["evaluations/before", "evaluations/after"])
        reward = comparison.against_baseline[0].differences.total_reward
        print(reward.difference.value, reward.difference.low, reward.difference.high, reward.p_value)

    - `runs`: output directories of `rollouts eval`, `rollouts run` or `rollouts demo`. "DIRECTORY@VERSION"
      stands for the groups whose oldest weights have that version: two of them compare two steps of one
      training run.
    - `threshold`, `failed`: as for `evaluate`; by default those of the first run that has a results.json,
      else 1.0 and "zero". All runs are counted in the same way.
    - `k`: those of pass@k; by default the powers of 2 up to the number of samples, and it itself, of the run
      with the fewest.
    - `unpaired`: compare the means over all tasks of each run, although they share tasks. Two versions of one
      run that share no task are always compared so.

    The number of samples of a task may differ from run to run. Raises `CommandFileError` for a directory that
    is no run, or has a damaged file; `ArgumentError` for other values and a run that is given twice;
    `RolloutsError` for runs without a common task.
    """
    stored = [StoredRun.of(run) for run in runs]
    _check_runs(stored)
    settings = [read_settings(run) for run in stored]
    evaluated = [one.results for one in settings if one.results is not None]
    if threshold is None:
        threshold = evaluated[0].threshold if evaluated else 1.0
    if failed is None:
        failed = evaluated[0].failed_episodes if evaluated else "zero"
    threshold, failed = checked_counting(threshold, failed)
    read = [read_scores(run, threshold=threshold, failed=failed) for run in stored]
    scores = [run.scores for run in read]
    ks = chosen_k(min(max(run.episodes) for run in scores), k)
    has_group_rewards = any(np.nan_to_num(run.rewards["group"]).any() for run in scores if run.rewards)
    columns = [_columns(run, ks, has_group_rewards) for run in scores]
    compared = [_Run(*values) for values in zip(_names(stored), stored, settings, read, columns, strict=True)]
    return Comparison(
        threshold=threshold,
        failed_episodes=failed,
        runs=[_compared_run(run) for run in compared],
        against_baseline=[_Pair(compared[0], other, unpaired).difference() for other in compared[1:]],
    )


def _check_runs(stored: Sequence[StoredRun]) -> None:
    if len(stored) < 2:
        raise ArgumentError("runs", [str(run) for run in stored], "pass at least two directories, the baseline first")
    for run in stored:
        run.check()
    seen: dict[tuple[str, str | None], StoredRun] = {}
    for run in stored:
        if (same := seen.setdefault((os.path.realpath(run.path), run.version), run)) is not run:
            rule = f"it is the same run as {str(same)!r}; name each run once, or two versions of it as RUN@VERSION"
            raise ArgumentError("runs", str(run), rule)


def _names(stored: Sequence[StoredRun]) -> list[str]:
    """The last part of each path, or the whole path where that of another run has the same."""
    known = Counter(run.name for run in stored)
    return [run.name if known[run.name] == 1 else str(run) for run in stored]


#: Of a figure: the field of `ByFigure`, and the name of a reward part or the k of pass@k; None for the other fields.
_Key: TypeAlias = tuple[str, str | int | None]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that was read. `columns` has the value of each task by figure, float64 (tasks,); NaN: it has none."""

    name: str
    stored: StoredRun
    settings: RunSettings
    read: RunScores
    columns: dict[_Key, np.ndarray]


def _columns(scores: TaskScores, ks: Sequence[int], has_group_rewards: bool) -> dict[_Key, np.ndarray]:
    shown = scores.rewards if has_group_rewards else ("total",)
    return {
        **{(f"{name}_reward", None): np.array(scores.rewards[name]) for name in shown if name in scores.rewards},
        **{("reward_parts", name): np.array(scores.parts[name]) for name in sorted(scores.parts)},
        **{("pass_at_k", k): scores.pass_at(k) for k in ks},
    }


def _figures(values: Mapping[_Key, T | None]) -> dict[str, Any]:
    """The fields of `ByFigure`."""
    fields: dict[str, Any] = {}
    for (name, part), value in values.items():
        if value is not None and part is None:
            fields[name] = value
        elif value is not None:
            fields.setdefault(name, {})[part] = value
    return fields


def _compared_run(run: _Run) -> ComparedRun:
    scores = run.read.scores

    def estimate(key: _Key, column: np.ndarray) -> Estimate | None:
        values = known(column)
        if not len(values):
            return None
        if key[0] == "pass_at_k":
            return rate_of_tasks(values)
        return mean_of_tasks(values) if key[0] == "group_reward" else reward_of_tasks(values)

    return ComparedRun(
        name=run.name,
        directory=str(run.stored.path),
        weight_version=run.stored.version,
        complete=run.settings.complete,
        tasks=len(scores.places),
        samples=(min(scores.episodes), max(scores.episodes)),
        episodes=sum(scores.episodes),
        failed=scores.totals["failed"],
        estimates=ByFigure[Estimate](**_figures({key: estimate(key, one) for key, one in run.columns.items()})),
        notes=list(_notes_on_run(run.settings, run.read)),
    )


def _notes_on_run(settings: RunSettings, read: RunScores) -> Iterator[str]:
    threshold, failed = read.scores.threshold, read.scores.failed_episodes
    if settings.complete is False:
        yield "it is not complete: not all of its tasks were run"
    elif settings.complete is None:
        yield "it is not known whether all of its tasks were run: no summary.json says so"
    if settings.configuration is None:
        yield "its model, sampling, template and environment are not known, and not compared"
    if settings.results is not None and settings.results.threshold != threshold:
        yield f"its results.json has the threshold {settings.results.threshold:g}; here it is {threshold:g}"
    if settings.results is not None and settings.results.failed_episodes != failed:
        yield f"in its results.json failed episodes count as {settings.results.failed_episodes!r}; here as {failed!r}"
    if without := read.scores.counts.count(0):
        yield f"{counted(without, 'task')} have no episode that counts, and are in no estimate"
    if len(read.versions) > 1:
        first, *_, last = read.versions
        yield f"its groups are of {len(read.versions):,} versions of weights, from {first!r:.80} to {last!r:.80}"
    yield from read.scores.warnings()
    yield from read.problems[:_MOST_NAMED]
    if more := len(read.problems[_MOST_NAMED:]):
        yield f"{more:,} more things in it cannot be read"


class _Pair:
    """The baseline and another run, over their shared tasks. Raises `RolloutsError` if they cannot be compared."""

    def __init__(self, baseline: _Run, run: _Run, unpaired: bool) -> None:
        self._runs = baseline, run
        self._names = baseline.name, run.name
        self._scores = baseline.read.scores, run.read.scores
        first, second = (scores.places for scores in self._scores)
        self._task_ids = [task_id for task_id in first if task_id in second]
        self._rows = [
            np.fromiter((places[task_id] for task_id in self._task_ids), np.int64) for places in (first, second)
        ]
        of_one_run = os.path.realpath(baseline.stored.path) == os.path.realpath(run.stored.path)
        if not self._task_ids and not unpaired and not of_one_run:
            raise RolloutsError(
                f"{baseline.stored} and {run.stored} have no task in common, by the ids of their tasks (as "
                f"{next(iter(first))!r:.80} and {next(iter(second))!r:.80}); compare runs of the same tasks, or their "
                "means over different tasks: --unpaired, or unpaired=True"
            )
        self._paired = bool(self._task_ids) and not unpaired

    def difference(self) -> RunDifference:
        first, second = (run.columns for run in self._runs)
        found = {key: self._difference(first[key], second[key]) for key in first if key in second}
        shared = len(self._task_ids)
        return RunDifference(
            name=self._names[1],
            paired=self._paired,
            shared_tasks=shared,
            only_in_baseline=len(self._scores[0].places) - shared,
            only_in_run=len(self._scores[1].places) - shared,
            notes=list(self._notes()),
            differences=ByFigure[Difference](**_figures(found)),
            **self._changes(),
        )

    def _difference(self, first: np.ndarray, second: np.ndarray) -> Difference | None:
        if not self._paired:
            values = known(first), known(second)
            return unpaired_difference(*values) if len(values[0]) and len(values[1]) else None
        first, second = self._shared(first, second)
        both = np.isfinite(first) & np.isfinite(second)
        return paired_difference(first[both], second[both]) if both.any() else None

    def _shared(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return first[self._rows[0]], second[self._rows[1]]

    def _changes(self) -> dict[str, Any]:
        """The fields of `RunDifference` about single tasks."""
        total = "total_reward", None
        if not all(total in run.columns for run in self._runs):
            return {}
        first, second = self._shared(self._runs[0].columns[total], self._runs[1].columns[total])
        both = np.isfinite(first) & np.isfinite(second)
        change = np.where(both, changes(first, second), 0.0)
        # By the change, then the reward, then the place in the file of the baseline.
        order = np.lexsort((-np.where(both, second, 0.0), -np.abs(change)))

        def most(chosen: np.ndarray) -> list[ChangedTask]:
            return [
                ChangedTask(task_id=self._task_ids[row], baseline=float(first[row]), run=float(second[row]))
                for row in order[chosen[order]][:10].tolist()
            ]

        return {
            "increased": int((change > 0).sum()),
            "decreased": int((change < 0).sum()),
            "equal": int((both & (change == 0)).sum()),
            "most_increased": most(change > 0),
            "most_decreased": most(change < 0),
        }

    def _notes(self) -> Iterator[str]:
        if not self._paired:
            reason = "their tasks are different" if not self._task_ids else "as asked for"
            yield f"unpaired ({reason}): the means over all tasks of each run are compared"
        yield from self._notes_on_tasks()
        names, scores = self._names, self._scores
        samples = [
            str(low) if (low := min(one.episodes)) == (high := max(one.episodes)) else f"{low} to {high}"
            for one in scores
        ]
        if samples[0] != samples[1]:
            yield f"samples of a task: {_beside(names, samples)}"
        versions = [sorted(run.read.versions) for run in self._runs]
        if versions[0] != versions[1] and all(len(one) == 1 for one in versions):
            yield f"version of the weights: {_beside(names, [one[0] or 'not known' for one in versions])}"
        parts = [set(one.parts) for one in scores]
        for own, other, name in ((parts[0], parts[1], names[0]), (parts[1], parts[0], names[1])):
            if only := sorted(own - other):
                yield f"named rewards only in {name}: {_named(only)}"
        yield from self._notes_on_configurations()

    def _notes_on_tasks(self) -> Iterator[str]:
        for number in (0, 1):
            own, other = self._scores[number].places, self._scores[1 - number].places
            if only := len(own) - len(self._task_ids):
                examples = (task_id for task_id in own if task_id not in other)
                named = _named([task_id for task_id, _ in zip(examples, range(_MOST_NAMED), strict=False)], only)
                yield f"{counted(only, 'task')} only in {self._names[number]}: {named}"
        data = [run.read.data[rows] for run, rows in zip(self._runs, self._rows, strict=True)]
        unknown = (data[0] == 0) != (data[1] == 0)
        changed = np.flatnonzero(~unknown & (data[0] != data[1]))
        if len(changed):
            named = _named([self._task_ids[row] for row in changed[:_MOST_NAMED]], len(changed))
            yield f"the data of {counted(len(changed), 'shared task')} differ: {named}"
        if unknown.any():
            yield f"the data of {counted(int(unknown.sum()), 'shared task')} are not in both files, and not compared"

    def _notes_on_configurations(self) -> Iterator[str]:
        first, second = (dict(_leaves(run.settings.configuration or {})) for run in self._runs)
        if not first or not second:
            return
        lines = [
            f"{name}: {_beside(self._names, [one.get(name, 'absent') for one in (first, second)])}"
            for name in dict.fromkeys([*first, *second])
            if first.get(name) != second.get(name)
        ]
        yield from lines[:_MOST_LINES]
        if more := len(lines[_MOST_LINES:]):
            yield f"{more:,} more values of the configurations differ"


def _leaves(configuration: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The values of a configuration as texts, by their keys: "sampling.temperature"."""
    for key, value in configuration.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        elif path or key not in ("group_size", "evaluation"):  # compared by what was run, not what was configured
            name = "digest of the chat template" if f"{path}{key}" == "template" else f"{path}{key}"
            yield name, shortened(json.dumps(value), _MOST_CHARACTERS)


def _beside(names: tuple[str, str], values: Sequence[str]) -> str:
    return ", ".join(f"{value} in {name}" for name, value in zip(names, values, strict=True))


def _named(values: Sequence[str], count: int | None = None) -> str:
    """Some of the values, in quotes, and how many more there are."""
    shown = [repr(shortened(value, _MOST_CHARACTERS)) for value in values[:_MOST_NAMED]]
    more = (len(values) if count is None else count) - len(shown)
    return f"{', '.join(shown)}{f' and {more:,} more' if more else ''}"
