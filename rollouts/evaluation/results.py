"""Evaluations: the estimates over the groups of tasks, and the file `results.json`."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollouts.errors import ArgumentError, CommandFileError, short_repr
from rollouts.evaluation.statistics import (
    Estimate,
    mean_of_tasks,
    pass_at_k,
    pass_hat_k,
    rate_of_tasks,
    reward_of_tasks,
)
from rollouts.files import replaced_file
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.observability.run_metrics import length_stops_warning
from rollouts.runner import Runner
from rollouts.task import Task
from rollouts.terminal.table import counted, shortened
from rollouts.values import check_choice, check_integer, finite_number

#: The version of the form of `results.json`. A reader refuses any other.
RESULTS_VERSION: Final = 1
RESULTS_FILE: Final = "results.json"
_MOST_BYTES: Final = 16 << 20
_MOST_ERRORS: Final = 10
_MOST_ERROR_CHARACTERS: Final = 1000

_TOTALS: Final = ("failed", "turns", "length_stops", "tokens", "sampled_tokens", "images", "sounds")

#: How failed episodes count: with a reward of 0, which is no success, or not at all.
FailedEpisodes = Literal["zero", "exclude"]


class ErrorCount(BaseModel):
    """The failed episodes with one kind of error, and the first text of it, shortened to 1,000 characters."""

    episodes: int
    example: str


class EvaluationResults(BaseModel):
    """What is known after an evaluation; `results.json` has these fields.

    Every `Estimate` has a `value`, its `standard_error`, and the ends `low` and `high` of its 95 % interval, all
    clustered by task (`rollouts.evaluation.statistics`), and the number of `tasks` that it is of. None where there is
    no task to estimate from.

    - `version`: of this form.
    - `complete`: whether every task was evaluated.
    - `tasks`, `samples`, `episodes`: tasks with results, episodes that each has, and all episodes.
    - `failed`, `failed_episodes`: the episodes that ended with an error, and how they count ("zero" or "exclude").
    - `threshold`: an episode succeeds if its total reward is at least this.
    - `total_reward`, `environment_reward`, `group_reward`: means; the first is the sum of the others.
    - `reward_parts`: the mean of each named reward, without its weight.
    - `pass_at_k`, `pass_hat_k`: by k, the probability that at least one of k samples succeeds, and that all do.
    - `truncated`: the share of episodes that a limit ended.
    - `turns`, `length_stops`: all turns, and those that were cut before the model had ended them.
    - `tokens`, `sampled_tokens`, `images`, `sounds`: totals, as in `metrics.jsonl`.
    - `errors`: the most frequent kinds of errors.
    - `configuration`: what was evaluated and how, as far as it is known.
    - `warnings`: what a reader has to know before using the numbers.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = RESULTS_VERSION
    complete: bool
    tasks: int
    samples: int
    episodes: int
    failed: int
    failed_episodes: FailedEpisodes
    threshold: float
    total_reward: Estimate | None
    environment_reward: Estimate | None
    group_reward: Estimate | None
    reward_parts: dict[str, Estimate]
    pass_at_k: dict[int, Estimate]
    pass_hat_k: dict[int, Estimate]
    truncated: Estimate | None
    turns: int
    length_stops: int
    tokens: int
    sampled_tokens: int
    images: int
    sounds: int = 0
    errors: dict[str, ErrorCount]
    configuration: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)

    def estimates(self) -> Iterator[tuple[str, Estimate]]:
        """The estimates with their names, in the order of a table; those without a task, and of no news, are left out.

        pass^1 is pass@1; without group rewards, the environment reward is the total reward.
        """
        rewards: list[tuple[str, Estimate | None]] = [("total reward", self.total_reward)]
        if self.group_reward is not None and (self.group_reward.value or self.group_reward.standard_error):
            rewards += [("environment reward", self.environment_reward), ("group reward", self.group_reward)]
        parts = self.reward_parts
        if len(parts) > 1 or self.total_reward not in parts.values():  # one part is often the whole reward
            rewards += [(f"reward part {name}", estimate) for name, estimate in parts.items()]
        rewards += [(f"pass@{k}", estimate) for k, estimate in self.pass_at_k.items()]
        rewards += [(f"pass^{k}", estimate) for k, estimate in self.pass_hat_k.items() if k > 1]
        for name, estimate in [*rewards, ("truncated", self.truncated)]:
            if estimate is not None:
                yield name, estimate

    def sentences(self) -> tuple[str, str]:
        """What the estimates are of, and what they leave open: for above and below a table of them."""
        counts = "count as 0" if self.failed_episodes == "zero" else "do not count"
        return (
            f"{counted(self.tasks, 'task')} x {counted(self.samples, 'sample')}, 95 % intervals clustered by task; an "
            f"episode succeeds with a total reward of at least {self.threshold:g}",
            f"{self.failed:,} of {counted(self.episodes, 'episode')} failed ({counts}); {self.length_stops:,} of "
            f"{counted(self.turns, 'turn')} were cut",
        )

    def write(self, path: Path) -> None:
        """Write `results.json`; an earlier file stays until the new one is complete. Raises `OSError`."""
        with replaced_file(path) as file:
            file.write(self.model_dump_json(indent=2).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read `results.json`, or that of an output directory.

        Raises `CommandFileError` for any other file, and for one of another version.
        """
        path = path / RESULTS_FILE if path.is_dir() else path
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        try:
            if len(content) > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
            values = json.loads(content)
            version = values.get("version") if isinstance(values, dict) else None
            if version != RESULTS_VERSION:
                cure = "`rollouts eval ... --resume` on the directory writes it anew from metrics.jsonl"
                reason = f"its version is {short_repr(version)}, and this release reads {RESULTS_VERSION}; {cure}"
                raise CommandFileError(path, reason)
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            problem = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
            raise CommandFileError(path, f"no results of an evaluation ({problem})") from error
        except (ValueError, RecursionError) as error:
            raise CommandFileError(path, f"no results of an evaluation: {error}") from error


class TaskScores(NamedTuple):
    """The episodes of one task that count: rewards float64 (n,) by name, and which succeed, bool (n,).

    `unusable` episodes did not fail, and have a reward that is not finite or too large. `all_failed`: every episode of
    the task failed, so that its rewards have no parts.
    """

    rewards: Mapping[str, np.ndarray]
    parts: Mapping[str, np.ndarray]
    successes: np.ndarray
    unusable: int
    all_failed: bool


def task_scores(row: GroupMetrics, threshold: float, failed: FailedEpisodes) -> TaskScores:
    """The scores of a group.

    A failed episode, or one with a reward that is not finite or 1e150 or more, never succeeds; it has rewards of 0 with
    "zero", and is left out with "exclude".
    """
    rewards = {"total": row.total_rewards, "environment": row.environment_rewards, "group": row.group_rewards}
    columns = np.array([*rewards.values(), *row.reward_parts.values()], np.float64)
    # False for NaN, too, and for rewards whose squares have no float.
    counts = np.logical_and.reduce(np.abs(columns) < 1e150)
    counts[row.failed_episodes] = False
    columns = np.where(counts, columns, 0.0)
    successes = counts & (columns[0] >= threshold)
    unusable = int((~counts).sum()) - row.failed
    if failed == "exclude":
        columns, successes = columns[:, counts], successes[counts]
    return TaskScores(
        dict(zip(rewards, columns, strict=False)),
        dict(zip(row.reward_parts, columns[len(rewards) :], strict=True)),
        successes,
        unusable,
        row.failed == len(counts),
    )


def unusable_warning(episodes: int) -> str:
    """What to say of episodes with rewards that cannot be used."""
    return f"{episodes:,} episodes have a reward that is not finite, or 1e150 or more: they count as failed"


def chosen_k(samples: int, k: Iterable[int] | None) -> tuple[int, ...]:
    """The k of pass@k and pass^k: those given, or the powers of 2 up to `samples`, and `samples` itself.

    Raises `ArgumentError` for a k that `samples` episodes of a task do not allow.
    """
    if k is None:
        return tuple(sorted({1 << power for power in range(samples.bit_length())} | {samples}))
    chosen = sorted({check_integer("k", one) for one in k})
    if chosen and chosen[-1] > samples:
        raise ArgumentError(
            "k", chosen[-1], f"pass at most {samples}, the number of episodes of a task, or sample more"
        )
    return tuple(chosen)


def checked_counting(threshold: float, failed: FailedEpisodes) -> tuple[float, FailedEpisodes]:
    """The arguments that say which episodes succeed. Raises `ArgumentError`."""
    number = finite_number(threshold)
    if number is None or isinstance(threshold, bool):
        raise ArgumentError("threshold", threshold, "pass a finite number")
    check_choice("failed", failed, FailedEpisodes)
    return number, failed


class Tally:
    """Adds up the groups of an evaluation. It keeps a few numbers for each task, and no episode.

        tally = Tally(samples=4, threshold=1.0)
        for group in groups:
            tally.add(GroupMetrics.of(group))
        tally.results(complete=True).pass_at_k[1].value

    - `samples`: the episodes of each task.
    - `threshold`: the total reward from which on an episode succeeds.
    - `failed`: how failed episodes count.
    - `k`: those of pass@k and pass^k (`chosen_k`).

    Raises `ArgumentError` for other values.
    """

    def __init__(
        self,
        *,
        samples: int,
        threshold: float = 1.0,
        failed: FailedEpisodes = "zero",
        k: Iterable[int] | None = None,
    ) -> None:
        self._samples = check_integer("samples", samples)
        self._threshold, self._failed = checked_counting(threshold, failed)
        self._rewards: defaultdict[str, array[float]] = defaultdict(_column)
        self._parts: defaultdict[str, array[float]] = defaultdict(_column)
        self._pass_at: dict[int, array[float]] = {one: _column() for one in chosen_k(self._samples, k)}
        self._pass_hat: dict[int, array[float]] = {one: _column() for one in self._pass_at}
        self._truncated = _column()
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._episodes = self._without_parts = self._unusable = 0
        self._lowest, self._highest = math.inf, -math.inf
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, row: GroupMetrics) -> None:
        """Add the group of a task. Raises `ArgumentError` for another number of episodes than `samples`."""
        count = len(row.total_rewards)
        if count != self._samples:
            rule = f"the group of task {row.task_id!r:.80} has so many episodes; pass groups of {self._samples}"
            raise ArgumentError("row", count, rule)
        self._episodes += count
        for name in self._totals:
            self._totals[name] += getattr(row, name)
        self._truncated.append(row.truncated / count)
        for text in row.errors:
            kind = text.partition(":")[0]
            self._errors[kind] += 1
            self._examples.setdefault(kind, shortened(text, _MOST_ERROR_CHARACTERS))
        scores = task_scores(row, self._threshold, self._failed)
        total = scores.rewards["total"]
        self._unusable += scores.unusable
        if not len(total):
            return
        self._without_parts += scores.all_failed  # what the parts would have been named is not known
        self._lowest, self._highest = min(self._lowest, total.min()), max(self._highest, total.max())
        for columns, values in ((self._rewards, scores.rewards), (self._parts, scores.parts)):
            for name, column in values.items():
                columns[name].append(column.mean())
        successes = int(scores.successes.sum())
        for k in self._pass_at:
            if k <= len(total):
                self._pass_at[k].append(pass_at_k(len(total), successes, k))
                self._pass_hat[k].append(pass_hat_k(len(total), successes, k))

    def results(self, *, complete: bool, configuration: Mapping[str, Any] | None = None) -> EvaluationResults:
        """The estimates over the groups so far. `complete` and `configuration` are as in `EvaluationResults`."""
        return EvaluationResults(
            complete=complete,
            tasks=len(self._truncated),
            samples=self._samples,
            episodes=self._episodes,
            failed_episodes=self._failed,
            threshold=self._threshold,
            total_reward=_estimate(self._rewards["total"], reward_of_tasks),
            environment_reward=_estimate(self._rewards["environment"], reward_of_tasks),
            group_reward=_estimate(self._rewards["group"], mean_of_tasks),
            reward_parts={
                name: reward_of_tasks(np.append(self._parts[name], np.zeros(self._without_parts)))
                for name in sorted(self._parts)
            },
            pass_at_k={k: rate_of_tasks(np.array(column)) for k, column in self._pass_at.items() if column},
            pass_hat_k={k: rate_of_tasks(np.array(column)) for k, column in self._pass_hat.items() if column},
            truncated=_estimate(self._truncated, rate_of_tasks),
            failed=self._totals["failed"],
            turns=self._totals["turns"],
            length_stops=self._totals["length_stops"],
            tokens=self._totals["tokens"],
            sampled_tokens=self._totals["sampled_tokens"],
            images=self._totals["images"],
            sounds=self._totals["sounds"],
            errors={
                kind: ErrorCount(episodes=count, example=self._examples[kind])
                for kind, count in self._errors.most_common(_MOST_ERRORS)
            },
            configuration=dict(configuration or {}),
            warnings=list(self._warnings()),
        )

    def _warnings(self) -> Iterable[str]:
        all_alike = self._lowest == self._highest and self._lowest in (0, 1)  # nothing, or everything, is right
        if self._rewards["total"] and not all_alike and not self._lowest <= self._threshold <= self._highest:
            all_or_none = "no episode succeeds" if self._threshold > self._highest else "every episode succeeds"
            yield (
                f"the threshold {self._threshold:g} is outside of the rewards, which are from {self._lowest:g} to "
                f"{self._highest:g}: {all_or_none}; choose another threshold"
            )
        if self._unusable:
            yield unusable_warning(self._unusable)
        without = len(self._truncated) - len(self._rewards["total"])
        if without:
            yield f"{without:,} of {len(self._truncated):,} tasks have no episode that counts, and are in no estimate"
        if warning := length_stops_warning(self._totals["length_stops"], self._totals["turns"]):
            yield warning


def _column() -> array[float]:
    return array("d")


def _estimate(column: array[float], of_tasks: Callable[[np.ndarray], Estimate]) -> Estimate | None:
    return of_tasks(np.array(column)) if column else None


async def evaluate(
    runner: Runner,
    tasks: Iterable[Task] | AsyncIterable[Task],
    *,
    threshold: float = 1.0,
    failed: FailedEpisodes = "zero",
    k: Iterable[int] | None = None,
) -> EvaluationResults:
    """Run the groups of `tasks`, and return the estimates over them.

        async with Runner(make_environment, engine, renderer, sampling=sampling, group_size=4) as runner:
            results = await evaluate(runner, tasks)
        print(results.pass_at_k[1].value, results.pass_at_k[1].low, results.pass_at_k[1].high)

    The runner's `group_size` is the number of samples of each task; its engine may be a `ChatEndpoint`, with None for
    the renderer. No episode is kept: a listener of the runner, or iterating over `runner.stream` and adding each group
    to a `Tally`, sees them. `rollouts eval` stores them.

    - `threshold`: the total reward from which on an episode succeeds.
    - `failed`: "zero": a failed episode has the reward 0, and is no success; "exclude": it does not count.
    - `k`: those of pass@k and pass^k, at most `group_size`; by default the powers of 2 up to it, and it itself.

    Raises `ArgumentError`, before any episode, and what `runner.stream` raises.
    """
    tally = Tally(samples=runner.group_size, threshold=threshold, failed=failed, k=k)
    async for group in runner.stream(tasks):
        tally.add(GroupMetrics.of(group))
    return tally.results(complete=True)
