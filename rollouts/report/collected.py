"""Everything that a report shows of a run, read in one pass."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from rollouts.report import mismatch_figures
from rollouts.report.episode_figures import EpisodeFigures, episode_figures
from rollouts.report.mismatch_figures import MismatchFigures
from rollouts.report.run_files import RunFiles

_MAX_KINDS: Final = 20


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Failed episodes whose errors are of one class. `example` is the first of them."""

    kind: str
    episodes: int
    example: EpisodeFigures


@dataclass(slots=True)
class Collected:
    """The contents of a run's directory.

    `complete`: whether all tasks were run, None where nothing says so. `is_partial`: the time was not enough to read
    all episodes. `mismatch_source` names where the trainer's log-probabilities are from; empty where there are none.
    """

    title: str
    episodes: list[EpisodeFigures] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    runner: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, list[float]]] = field(default_factory=list)
    mismatch: MismatchFigures = field(default_factory=MismatchFigures)
    mismatch_source: str = ""
    complete: bool | None = None
    is_partial: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def succeeded(self) -> list[EpisodeFigures]:
        return [episode for episode in self.episodes if not episode.failed]

    def error_kinds(self) -> list[ErrorKind]:
        """The most frequent kinds first, at most 20."""
        counts: Counter[str] = Counter()
        examples: dict[str, EpisodeFigures] = {}
        for episode in self.episodes:
            if episode.failed:
                kind = episode.error.partition(":")[0][:80]
                counts[kind] += 1
                examples.setdefault(kind, episode)
        return [ErrorKind(kind, count, examples[kind]) for kind, count in counts.most_common(_MAX_KINDS)]


def collect(files: RunFiles, deadline: float | None = None) -> Collected:
    """Read a directory. Reading episodes ends at `deadline` (`time.monotonic`), if there is one.

    Raises `ReportDirectoryError` for a file that is none of a run.
    """
    collected = Collected(files.path.resolve().name, problems=files.problems, complete=files.is_complete())
    collected.training, collected.runner = files.training(), files.runner()
    collected.groups = files.groups()
    collected.mismatch = mismatch_figures.of_training(files.mismatches())
    if collected.mismatch.tokens:
        collected.mismatch_source = "mismatch.mmr, which the trainer wrote"
    from_extras = MismatchFigures()
    for episode in files.episodes() if files.has_episodes else ():
        collected.episodes.append(episode_figures(episode.trajectory, episode.number, episode.record))
        if not collected.mismatch.tokens:
            mismatch_figures.add_extras(from_extras, episode.trajectory)
        if deadline is not None and time.monotonic() > deadline:
            collected.is_partial = True
            break
    if from_extras.tokens:
        collected.mismatch, collected.mismatch_source = from_extras, "the extra trainer_logprobs of the episodes"
    return collected
