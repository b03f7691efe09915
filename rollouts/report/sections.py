"""The sections of a report. One for which the directory holds nothing is left out."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from renderers.errors import RendererError
from rollouts.episodes.errors import EpisodeError  # and with it the errors of episodes, which are found by their root
from rollouts.errors import RolloutsError
from rollouts.evaluation.results import EvaluationResults
from rollouts.observability.run_metrics import length_stops_warning
from rollouts.report.charts import Chart, Line, number_text, value_text
from rollouts.report.curves import episode_charts, group_charts, runner_charts, training_charts
from rollouts.report.figures import BINS, OLDER, Collected, EpisodeFigures
from rollouts.report.page import Block, Cell, Facts, Heading, Items, Section, Table, Text, charts_of
from rollouts.report.viewer_page import ViewerPage
from rollouts.trajectory.token_node import TEACHER_KL
from rollouts.values import mean_and_spread
from transport import TransportError

_OTHER: Final = "The text of the error and the episode show the cause."
_ROOTS: Final = (EpisodeError, RolloutsError, RendererError, TransportError)
_MAX_PROBLEMS: Final = 20
_EXAMPLE: Final = 600

#: Charts of the runner's metrics: for each title, the label of each metric.
_RUNNER: Final = {
    "Staleness": {"staleness_mean": "mean", "staleness_max": "largest"},
    "Episodes and groups": {
        "episodes_running": "episodes that run",
        "groups_queued": "finished groups that wait for the trainer",
    },
    "Requests of the engine": {"engine_requests_running": "running", "engine_requests_waiting": "waiting"},
    "Workers": {"worker_slots": "slots", "worker_slots_used": "used", "worker_jobs_waiting": "waiting episodes"},
}


def sections_of(collected: Collected, viewer: ViewerPage) -> list[Section]:
    """The sections of the report of a run or an evaluation."""
    charts = [*episode_charts(collected.episodes, rewarded=collected.is_rewarded), *group_charts(collected.groups)]
    sections: list[Section] = [
        ("Summary", _summary(collected)),
        ("Evaluation", [] if collected.evaluation is None else _evaluation(collected.evaluation)),
        ("Curves", charts_of(charts)),
        ("Training", charts_of(training_charts(collected.training))),
        ("Mismatch", _mismatch(collected)),
        ("Staleness and queues", charts_of(runner_charts(collected.runner, _RUNNER))),
        ("Errors", _errors(collected, viewer)),
        ("Episodes", _examples(collected, viewer)),
    ]
    return [(name, blocks) for name, blocks in sections if blocks]


def cure_of(kind: str) -> str:
    """The cure for errors of the class `kind`, of its docstring; a general sentence for a class of another package."""
    for error_class in (found for root in _ROOTS for found in _descendants(root)):
        _, mark, cure = (error_class.__doc__ or "").rpartition("Cure:")
        if error_class.__name__ == kind and mark:
            return " ".join(cure.split())
    return _OTHER


def _descendants(error_class: type[Exception]) -> Iterator[type[Exception]]:
    yield error_class
    for child in error_class.__subclasses__():
        yield from _descendants(child)


def best_and_worst(episodes: Sequence[EpisodeFigures]) -> tuple[list[EpisodeFigures], list[EpisodeFigures]]:
    """At most 6 episodes with the largest environment rewards, and 6 others with the smallest, of each group one."""
    ordered = sorted(episodes, key=lambda episode: episode.environment_reward)
    best = _one_of_each_group(ordered[::-1][: (len(ordered) + 1) // 2])
    chosen = {episode.number for episode in best}
    return best, _one_of_each_group([episode for episode in ordered if episode.number not in chosen])


def _one_of_each_group(ordered: Sequence[EpisodeFigures]) -> list[EpisodeFigures]:
    first: dict[str, EpisodeFigures] = {}
    for episode in ordered:
        first.setdefault(episode.group_id or episode.episode_id, episode)
    return list(first.values())[:6]


def _summary(collected: Collected) -> list[Block]:
    """The totals, what the report covers, and what of the directory cannot be read."""
    episodes = collected.episodes
    facts = [("run", _completeness(collected)), ("episodes", f"{len(episodes):,}")]
    notes: list[Block] = []
    if episodes:
        endings = Counter(episode.ending for episode in episodes)
        turns, length_stops = (sum(getattr(one, name) for one in episodes) for name in ("turns", "length_stops"))
        if warning := length_stops_warning(length_stops, turns):
            notes.append(Text(warning, "absent"))
        named = {"error": "failed", "open": "not ended"}
        ended = ", ".join(f"{count:,} {named.get(ending, ending)}" for ending, count in sorted(endings.items()))
        facts += [
            ("how they ended", ended),
            ("groups", f"{len({episode.group_id for episode in episodes}):,}"),
            ("turns", f"{turns:,}"),
            ("cut at max_tokens", f"{length_stops:,} ({length_stops / max(turns, 1):.1%} of the turns)"),
            ("tokens", f"{sum(episode.tokens for episode in episodes):,}"),
            ("sampled tokens", f"{sum(episode.sampled for episode in episodes):,}"),
            *_reward_facts(collected),
        ]
        if scored := [episode.metrics[TEACHER_KL] for episode in episodes if TEACHER_KL in episode.metrics]:
            facts.append(("mean teacher_kl", f"{number_text(mean_and_spread(scored).mean)} nats a token"))
    if collected.training:
        facts.append(("training steps", f"{collected.training_steps:,}"))
    if current := [counted.max_abs for name, counted in collected.mismatch.items() if name != OLDER]:
        facts.append(("largest mismatch", f"{max(current):.2e} nats"))
    facts.append(("report written", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())))
    if collected.problems:
        shown = [problem[:_EXAMPLE] for problem in collected.problems[:_MAX_PROBLEMS]]
        if len(collected.problems) > _MAX_PROBLEMS:
            shown.append(f"and {len(collected.problems) - _MAX_PROBLEMS:,} more")
        notes += [Heading("Not readable"), Items(shown)]
    return [Facts(facts), *notes]


def _reward_facts(collected: Collected) -> list[tuple[str, str]]:
    """The means of the rewards over all episodes, as in `summary.json`, and over those that did not fail."""
    if not collected.is_rewarded:
        return [("environment reward", "none is recorded")]
    reward = mean_and_spread(episode.environment_reward for episode in collected.episodes)
    means = {"mean environment reward": reward.mean}
    if len(collected.succeeded) < len(collected.episodes):
        succeeded = mean_and_spread(episode.environment_reward for episode in collected.succeeded)
        means["mean environment reward without failed episodes"] = succeeded.mean
    means["standard deviation of the environment reward"] = reward.spread
    for name in ("group", "total"):
        rewards = chain.from_iterable(getattr(group, f"{name}_rewards") for group in collected.groups)
        means[f"mean {name} reward"] = mean_and_spread(rewards).mean
    facts = [(name, number_text(mean)) for name, mean in means.items() if not math.isnan(mean)]
    if reward.not_finite:
        name = "episodes whose environment reward is not finite, left out of the mean"
        facts.append((name, f"{reward.not_finite:,}"))
    return facts


def _completeness(collected: Collected) -> str:
    state = {True: "complete", False: "not complete", None: "going on, or ended without a summary"}[collected.complete]
    if collected.training and collected.complete is None:
        state = "a directory of a trainer, which does not say whether it is complete"
    if collected.is_partial:
        state += "; the report covers the first episodes only, because its time was over: `rollouts report` reads all"
    return state


#: Of the configuration of an evaluation.
_EVALUATED: Final = ("engine", "renderer", "tasks", "environment", "sampling", "seed", "version")


def _evaluation(results: EvaluationResults) -> list[Block]:
    """The estimates of `rollouts eval`, and what a reader has to know before using them."""
    rows = [
        [
            name,
            number_text(estimate.value),
            "-" if estimate.low is None else f"{number_text(estimate.low)} to {number_text(estimate.high or 0.0)}",
            f"{estimate.tasks:,}",
        ]
        for name, estimate in results.estimates()
    ]
    facts = [[name, json.dumps(value)] for name, value in results.configuration.items() if name in _EVALUATED]
    cut = length_stops_warning(results.length_stops, results.turns)  # the summary has it
    return [
        *(Text(text, "note") for text in results.sentences()),
        Table("estimates", ["figure", "value", "95 % interval", "tasks"], rows),
        *(Text(warning, "absent") for warning in results.warnings if warning != cut),
        *([Table("what was evaluated", ["evaluated", "value"], facts)] if facts else []),
    ]


def _mismatch(collected: Collected) -> list[Block]:
    """Histograms of |log p(trainer) - log p(sampler)| by modality."""
    if not collected.mismatch:
        return []
    tokens = sum(one.tokens for one in collected.mismatch.values())
    what = f"|log p(trainer) - log p(sampler)| in nats, of {tokens:,} sampled tokens, from mismatch.mmr"
    if OLDER in collected.mismatch:
        what += "; tokens of older weights differ by what was learned since, and count in no other figure"
    labels = {"text": "tokens before any medium", OLDER: "tokens of older weights"}
    kinds = {labels.get(name, f"tokens after {name}"): one for name, one in sorted(collected.mismatch.items())}
    bins = list(range(len(BINS)))
    charts = [
        Chart(label, "nats, from", bins, [Line("tokens", one.counts.tolist())], BINS, f"{one.tokens:,} tokens", True)
        for label, one in kinds.items()
    ]
    rows = [[label, f"{one.tokens:,}", f"{one.mean_abs:.2e}", f"{one.max_abs:.2e}"] for label, one in kinds.items()]
    table = Table("mismatch, nats", ["tokens", "number", "mean", "largest"], rows)
    return [Text(what, "note"), *charts_of(charts), table]


def _errors(collected: Collected, viewer: ViewerPage) -> list[Block]:
    """The kinds of errors with an example, and the limits that ended episodes."""
    rows: list[list[str | Cell]] = [
        [
            Cell(kind, is_code=True),
            f"{count:,}",
            _link(example, viewer, below=example.error[:_EXAMPLE]),
            cure_of(kind),
        ]
        for kind, count, example in collected.error_kinds()
    ]
    parts: list[Block] = [Table("errors", ["error", "episodes", "example", "cure"], rows)] if rows else []
    truncated = [episode for episode in collected.episodes if episode.ending == "truncated"]
    limits = Counter(episode.truncation_reason or "reason not known" for episode in truncated)
    if limits:
        counts = [[reason, f"{count:,}"] for reason, count in limits.most_common(20)]
        parts += [Heading("Truncated episodes"), Table("truncated episodes", ["limit", "episodes"], counts)]
    return parts


def _examples(collected: Collected, viewer: ViewerPage) -> list[Block]:
    """The episodes with the largest and the smallest environment rewards."""
    succeeded = collected.succeeded
    if not succeeded:
        return []
    best, worst = best_and_worst(succeeded)
    if len({episode.environment_reward for episode in succeeded}) == 1:
        reward = f"the environment reward {number_text(succeeded[0].environment_reward)}"
        if not collected.is_rewarded:
            reward = "no reward that is recorded"
        sentence = f"All episodes have {reward}; these are some of them."
        return [Text(sentence, "absent"), _table("some episodes", best, viewer)]
    return [
        Heading("Largest environment rewards"),
        _table("largest environment rewards", best, viewer),
        Heading("Smallest environment rewards"),
        _table("smallest environment rewards", worst, viewer),
    ]


def _table(label: str, episodes: Sequence[EpisodeFigures], viewer: ViewerPage) -> Table:
    rows: list[list[str | Cell]] = [
        [
            _link(episode, viewer),
            value_text(episode.environment_reward),
            f"{episode.turns:,}",
            f"{episode.sampled:,}",
            episode.ending,
        ]
        for episode in episodes
    ]
    return Table(label, ["episode", "environment reward", "turns", "sampled tokens", "how it ended"], rows)


def _link(episode: EpisodeFigures, viewer: ViewerPage, *, below: str = "") -> Cell:
    name = episode.episode_id[:80] or f"episode {episode.number}"
    return Cell(name, viewer.link(episode.number), below)
