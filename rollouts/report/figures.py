"""The figures that a report shows: of episodes, of mismatches, collected from a run's files."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rollouts.compared_tokens import ComparedTokens
from rollouts.evaluation.results import EvaluationResults
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.observability.metric_sinks import read_json_lines
from rollouts.observability.training_log import TRAINING_FILE
from rollouts.report.run_files import RUNNER_FILE, RunFiles
from rollouts.trajectory.tree import Trajectory
from rollouts.values import finite_number, mean_and_spread
from rollouts.view.token_columns import ENTROPY, is_column


@dataclass(frozen=True, slots=True)
class EpisodeFigures:
    """One episode. `number` is its place in the file, `record` that of its record, `place` its own in the record.

    `sampled` counts sampled tokens; `surprisal` is the mean of their negative log-probabilities, in nats,
    `entropy` that of their entropies, as far as they are known. NaN: none is.
    """

    number: int
    record: int
    place: int
    episode_id: str
    group_id: str
    environment_reward: float
    turns: int
    length_stops: int
    tokens: int
    sampled: int
    surprisal: float
    entropy: float
    ending: str
    error: str
    truncation_reason: str
    metrics: Mapping[str, float]

    @property
    def failed(self) -> bool:
        return bool(self.error)


def episode_figures(trajectory: Trajectory, number: int, record: int, place: int) -> EpisodeFigures:
    """The figures of an episode. Its environment reward may be infinite: that is the sum of rewards of turns."""
    entropies = [
        node.extras[ENTROPY][node.sampled]
        for node in trajectory.nodes
        if ENTROPY in node.extras and is_column(node.extras[ENTROPY])
    ]
    metrics = {name: value for name, one in trajectory.metrics.items() if (value := finite_number(one)) is not None}
    return EpisodeFigures(
        number=number,
        record=record,
        place=place,
        episode_id=trajectory.episode_id,
        group_id=trajectory.group_id,
        environment_reward=trajectory.reward,
        turns=len(trajectory.turns),
        length_stops=trajectory.length_stops,
        tokens=sum(map(len, trajectory.nodes)),
        sampled=sum(len(node.logprobs) for node in trajectory.nodes),
        surprisal=-mean_and_spread(np.concatenate([np.empty(0), *(node.logprobs for node in trajectory.nodes)])).mean,
        entropy=mean_and_spread(np.concatenate([np.empty(0), *entropies])).mean,
        ending=trajectory.status,
        error=trajectory.error,
        truncation_reason=trajectory.truncation_reason,
        metrics=metrics,
    )


_DECADES: Final = range(-8, 2)
_EDGES: Final = np.array([0.0, *(10.0**power for power in _DECADES)])
#: The names of the bins of |difference|, in nats; the last one holds what is no number.
BINS: Final = ("< 1e-8", *(f"1e{power}" for power in _DECADES[:-1]), ">= 10", "not finite")


@dataclass(slots=True)
class Counted:
    """The compared tokens of one kind. `counts` int64, one for each of `BINS`.

    `sum_abs` is that of the finite |differences|; `max_abs` is infinite if one of them is. Both are in nats.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(len(BINS), np.int64))
    sum_abs: float = 0.0
    max_abs: float = 0.0

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def mean_abs(self) -> float:
        """Of the finite differences."""
        return self.sum_abs / max(self.tokens - int(self.counts[-1]), 1)

    def add(self, difference: np.ndarray) -> None:
        """Add differences of log-probabilities, float64 (n,), of either sign, of at least one token."""
        absolute = np.abs(difference)
        finite = absolute[np.isfinite(absolute)]
        bins = np.searchsorted(_EDGES, finite, side="right") - 1
        self.counts[: len(_EDGES)] += np.bincount(bins, minlength=len(_EDGES))
        self.counts[-1] += len(absolute) - len(finite)
        self.max_abs = max(self.max_abs, float(absolute.max()))
        self.sum_abs += float(finite.sum())


#: In place of the modality of tokens that other weights than the trainer's have sampled.
OLDER: Final = "older weights"


def by_modality(steps: Iterable[tuple[ComparedTokens, np.ndarray]]) -> dict[str, Counted]:
    """The figures of `mismatch.mmr`, those of `OLDER` apart."""
    figures: dict[str, Counted] = {}
    for step, current in steps:
        modalities = np.where(current, step.modality(), OLDER)
        for modality in np.unique(modalities):
            figures.setdefault(str(modality), Counted()).add(step.difference[modalities == modality])
    return figures


@dataclass(slots=True)
class Collected:
    """The contents of a run's directory.

    `mismatch`: the compared tokens by modality, and those of `OLDER`. `complete`: whether all tasks were run,
    None where nothing says so. `evaluation`: the results of `rollouts eval`, if there are any. `is_partial`:
    the time was not enough to read all episodes.
    """

    title: str
    episodes: list[EpisodeFigures] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)  # the lines of training.jsonl: step, time, metrics
    runner: list[dict[str, Any]] = field(default_factory=list)
    groups: list[GroupMetrics] = field(default_factory=list)
    evaluation: EvaluationResults | None = None
    mismatch: dict[str, Counted] = field(default_factory=dict)
    complete: bool | None = None
    is_partial: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def succeeded(self) -> list[EpisodeFigures]:
        return [episode for episode in self.episodes if not episode.failed]

    @property
    def is_rewarded(self) -> bool:
        """Whether there are rewards: `rollouts tinker` records samples whose rewards its clients alone know."""
        return bool(self.groups) or any(episode.environment_reward for episode in self.episodes)

    @property
    def training_steps(self) -> int:
        """How many steps have figures of more than an evaluation and the warm start of `rollouts train`."""
        others = ("forward_", "held_out_", "supervised_loss")
        trained = (row for row in self.training if any(not key.startswith(others) for key in row["metrics"]))
        return len({row["step"] for row in trained})

    def error_kinds(self) -> list[tuple[str, int, EpisodeFigures]]:
        """The classes of errors with the number of episodes that have one, and the first of these; at most 20."""
        counts: Counter[str] = Counter()
        examples: dict[str, EpisodeFigures] = {}
        for episode in self.episodes:
            if episode.failed:
                kind = episode.error.partition(":")[0][:80]
                counts[kind] += 1
                examples.setdefault(kind, episode)
        return [(kind, count, examples[kind]) for kind, count in counts.most_common(20)]


def collect(files: RunFiles, deadline: float | None = None) -> Collected:
    """Read a directory. Reading episodes ends at `deadline` (`time.monotonic`), if there is one.

    Raises `RolloutsError` for a file that is none of a run.
    """
    collected = Collected(files.path.resolve().name, problems=files.problems, complete=files.is_complete())
    collected.training = list(read_json_lines(files.path / TRAINING_FILE, files.problems))
    collected.runner = list(read_json_lines(files.path / RUNNER_FILE, files.problems))
    collected.groups = list(files.groups())
    collected.evaluation = files.evaluation()
    collected.mismatch = by_modality(files.mismatches(files.problems))
    for episode in files.episodes():
        collected.episodes.append(episode_figures(episode.trajectory, episode.number, episode.record, episode.place))
        if deadline is not None and time.monotonic() > deadline:
            collected.is_partial = True
            break
    return collected
