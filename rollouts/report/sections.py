"""The sections of a report as HTML. What a directory does not hold is said in a sentence in place of its charts."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from renderers.errors import RendererError
from rollouts.episodes.errors import EpisodeError  # and with it the errors of episodes, which are found by their root
from rollouts.errors import RolloutsError
from rollouts.evaluation.results import EvaluationResults
from rollouts.observability.run_metrics import length_stops_warning
from rollouts.report.charts import Bars, Figures, escaped, number_text, scrolling, table
from rollouts.report.curves import episode_charts, group_charts, runner_charts, throughput_charts, training_charts
from rollouts.report.figures import BINS, MAX_LAG, Collected, Counted, EpisodeFigures
from rollouts.report.viewer_page import ViewerPage
from rollouts.terminal.table import counted
from rollouts.trajectory.token_node import TEACHER_KL
from rollouts.values import mean_and_spread
from transport import TransportError

# What to do about an error of an episode: the cure in the docstring of its class.


_OTHER: Final = "The text of the error and the episode show the cause."
_ROOTS: Final = (EpisodeError, RolloutsError, RendererError, TransportError)


def cure_of(kind: str) -> str:
    """The cure for errors of the class `kind`; a general sentence for a class of another package."""
    for error_class in (found for root in _ROOTS for found in _descendants(root)):
        _, mark, cure = (error_class.__doc__ or "").rpartition("Cure:")
        if error_class.__name__ == kind and mark:
            return " ".join(cure.split())
    return _OTHER


def _descendants(error_class: type[Exception]) -> Iterator[type[Exception]]:
    yield error_class
    for child in error_class.__subclasses__():
        yield from _descendants(child)


_SHOWN: Final = 6
_MAX_PROBLEMS: Final = 20
_EXAMPLE: Final = 600

_STALENESS: Final = {"Staleness": {"staleness_mean": "mean", "staleness_max": "largest"}}
_QUEUES: Final = {
    "Episodes and groups": {
        "episodes_running": "episodes that run",
        "groups_queued": "finished groups that wait for the trainer",
    },
    "Requests of the engine": {"engine_requests_running": "running", "engine_requests_waiting": "waiting"},
    "Workers": {"worker_slots": "slots", "worker_slots_used": "used", "worker_jobs_waiting": "waiting episodes"},
}


def best_and_worst(episodes: Sequence[EpisodeFigures]) -> tuple[list[EpisodeFigures], list[EpisodeFigures]]:
    """The 6 episodes with the largest environment rewards, and 6 others with the smallest.

    They are of different groups where possible.
    """
    ordered = sorted(episodes, key=lambda episode: episode.environment_reward)
    best = _of_different_groups(ordered[::-1][: (len(ordered) + 1) // 2])
    chosen = {episode.number for episode in best}
    return best, _of_different_groups([episode for episode in ordered if episode.number not in chosen])


def _of_different_groups(ordered: Sequence[EpisodeFigures]) -> list[EpisodeFigures]:
    """The first 6. Of equal rewards, those whose groups have no earlier episode precede the others."""
    seen: Counter[str] = Counter()
    ranked: list[tuple[float, int, EpisodeFigures]] = []
    sign = 1 if ordered and ordered[0].environment_reward <= ordered[-1].environment_reward else -1
    for episode in ordered:
        ranked.append((sign * episode.environment_reward, seen[episode.group_id], episode))
        seen[episode.group_id] += 1
    return [episode for _, _, episode in sorted(ranked, key=lambda each: each[:2])[:_SHOWN]]


def summary_section(collected: Collected) -> str:
    """The totals, what the report covers, and what of the directory cannot be read."""
    episodes = collected.episodes
    facts = [("run", _completeness(collected)), ("episodes", f"{len(episodes):,}")]
    notes: list[str] = []
    if episodes:
        endings = Counter(episode.ending for episode in episodes)
        turns, length_stops = (sum(getattr(one, name) for one in episodes) for name in ("turns", "length_stops"))
        if warning := length_stops_warning(length_stops, turns):
            notes.append(warning)
        named = {"error": "failed", "open": "not ended"}
        facts += [
            (
                "how they ended",
                ", ".join(f"{count:,} {named.get(ending, ending)}" for ending, count in sorted(endings.items())),
            ),
            ("groups", f"{len({episode.group_id for episode in episodes}):,}"),
            ("turns", f"{turns:,}"),
            ("cut at max_tokens", f"{length_stops:,} ({length_stops / max(turns, 1):.1%} of the turns)"),
            ("tokens", f"{sum(episode.tokens for episode in episodes):,}"),
            ("sampled tokens", f"{sum(episode.sampled for episode in episodes):,}"),
        ]
        facts += _reward_facts(collected)
        if scored := [episode.metrics[TEACHER_KL] for episode in episodes if TEACHER_KL in episode.metrics]:
            facts.append(("mean teacher_kl", f"{number_text(mean_and_spread(scored).mean)} nats a token"))
    if collected.training:
        facts.append(("training steps", f"{len({row['step'] for row in collected.training}):,}"))
    if collected.mismatch.tokens:
        largest = max(counted.max_abs for counted in collected.mismatch.by_modality.values())
        facts.append(("largest mismatch", f"{largest:.2e} nats"))
        if len(collected.mismatch.by_lag) > 1 and (equal := collected.mismatch.by_lag.get(0)) is not None:
            facts.append(("largest mismatch at lag 0", f"{equal.max_abs:.2e} nats"))
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    facts.append(("report written", written))
    rows = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts)
    return f"<dl>{rows}</dl>{''.join(map(_absent, notes))}{_problems(collected.problems)}"


#: Of the configuration of an evaluation.
_EVALUATED: Final = ("engine", "renderer", "tasks", "environment", "sampling", "seed", "version")


def evaluation_section(results: EvaluationResults) -> str:
    """The estimates of `rollouts eval`, and what a reader has to know before using them."""
    above, below = results.sentences()
    rows = [
        [
            name,
            number_text(estimate.value),
            "-" if estimate.low is None else f"{number_text(estimate.low)} to {number_text(estimate.high or 0.0)}",
            f"{estimate.tasks:,}",
        ]
        for name, estimate in results.estimates()
    ]
    drawn = table(["figure", "value", "95 % interval", "tasks"], rows, "estimates")
    notes = "".join(f'<p class="note">{escaped(text)}</p>' for text in (above, below))
    facts = [[name, json.dumps(value)] for name, value in results.configuration.items() if name in _EVALUATED]
    evaluated = table(["evaluated", "value"], facts, "what was evaluated") if facts else ""
    cut = length_stops_warning(results.length_stops, results.turns)  # the summary has it
    warnings = "".join(_absent(warning) for warning in results.warnings if warning != cut)
    return f"{notes}{drawn}{warnings}{evaluated}"


def curves_section(collected: Collected, figures: Figures) -> str:
    """Rewards, lengths and entropy over the episodes."""
    charts = [*episode_charts(collected.episodes, rewarded=collected.is_rewarded), *group_charts(collected.groups)]
    return _charts(map(figures.chart, charts)) or _absent(
        "No episode is written yet, so there are no curves of rewards and lengths."
    )


def training_section(collected: Collected, figures: Figures) -> str:
    """The trainer's figures over its steps."""
    return _charts(map(figures.chart, training_charts(collected.training))) or _absent(
        "The directory has no training.jsonl: loss and accuracy of a trainer are in it if the trainer writes a "
        "TrainingLog."
    )


def mismatch_section(collected: Collected, figures: Figures) -> str:
    """Histograms of |log p(trainer) - log p(sampler)| by modality and by lag."""
    found = collected.mismatch
    if not found.tokens:
        return _absent(
            "The directory has no log-probabilities of a trainer, so the mismatch is not known. A TrainingLog writes "
            "them (mismatch.mmr); the extra trainer_logprobs of episodes has them, too."
        )
    what = f"|log p(trainer) - log p(sampler)| in nats, of {found.tokens:,} sampled tokens"
    note = f"{what}; from {collected.mismatch_source}."
    parts = [f'<p class="note">{escaped(note)}</p>']
    modalities = [(f"tokens after {name}" if name != "text" else "tokens before any medium", one)
                  for name, one in sorted(found.by_modality.items())]  # fmt: skip
    parts.append("<h3>By modality</h3>")
    parts.append(_histograms(modalities, figures))
    parts.append("<h3>By lag of the weights</h3>")
    if found.by_lag:
        lags = [(_lag_label(lag), counted) for lag, counted in sorted(found.by_lag.items())]
        parts.append(_histograms(lags, figures))
    if found.unordered:
        parts.append(
            _absent(
                f"Of {found.unordered:,} tokens the lag is not known: it needs the version of the trainer's weights, "
                "which a TrainingLog has from mismatch_report(trainer_version=), and versions with an order."
            )
        )
    return "".join(parts)


def throughput_section(collected: Collected, figures: Figures) -> str:
    """Turns and tokens a second."""
    return _charts(map(figures.chart, throughput_charts(collected.episodes))) or _absent(
        "No episode has the time at which it began, so the throughput is not known."
    )


def staleness_section(collected: Collected, figures: Figures) -> str:
    """Staleness of the delivered groups, and queues, from the readings of the runner's metrics."""
    if not collected.runner:
        return _absent(
            "The directory has no runner_metrics.jsonl, so staleness and queues over time are not known; "
            "`rollouts run` writes it."
        )
    staleness = _charts(map(figures.chart, runner_charts(collected.runner, _STALENESS)))
    queues = _charts(map(figures.chart, runner_charts(collected.runner, _QUEUES)))
    return (staleness or _absent("No group was delivered, so there is no staleness.")) + queues


def errors_section(collected: Collected, viewer: ViewerPage) -> str:
    """The kinds of errors with an example, and the limits that ended episodes."""
    parts = []
    rows = []
    for found in collected.error_kinds():
        cells = [
            f"<code>{escaped(found.kind)}</code>",
            f"{found.episodes:,}",
            f"{_link(found.example, viewer)}<br>{escaped(found.example.error, _EXAMPLE)}",
            escaped(cure_of(found.kind)),
        ]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    if rows:
        head = "".join(f'<th scope="col">{name}</th>' for name in ("error", "episodes", "example", "cure"))
        whole = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        parts.append(scrolling(whole, "errors"))
    else:
        parts.append(_absent("No episode failed." if collected.episodes else "There are no episodes."))
    limits = Counter(
        episode.truncation_reason or "reason not known"
        for episode in collected.episodes
        if episode.ending == "truncated"
    )
    if limits:
        parts.append("<h3>Truncated episodes</h3>")
        limit_rows = [[reason, f"{count:,}"] for reason, count in limits.most_common(20)]
        parts.append(table(["limit", "episodes"], limit_rows, "truncated episodes"))
    return "".join(parts)


def examples_section(collected: Collected, viewer: ViewerPage) -> str:
    """The episodes with the largest and the smallest environment rewards, with their first media."""
    succeeded = collected.succeeded
    if not succeeded:
        return _absent("No episode ended without an error.")
    best, worst = best_and_worst(succeeded)
    if len({episode.environment_reward for episode in succeeded}) == 1:
        reward = f"the environment reward {number_text(succeeded[0].environment_reward)}"
        if not collected.is_rewarded:
            reward = "no reward that is recorded"
        return _absent(f"All episodes have {reward}; these are some of them.") + _cards(best, viewer, with_reward=False)
    largest, smallest = (f"<h3>{name} environment rewards</h3>" for name in ("Largest", "Smallest"))
    return f"{largest}{_cards(best, viewer)}{smallest}{_cards(worst, viewer)}"


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


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    shown = "".join(f"<li>{escaped(problem, _EXAMPLE)}</li>" for problem in problems[:_MAX_PROBLEMS])
    more = f"<li>and {len(problems) - _MAX_PROBLEMS:,} more</li>" if len(problems) > _MAX_PROBLEMS else ""
    return f"<h3>Not readable</h3><ul>{shown}{more}</ul>"


def _histograms(kinds: Sequence[tuple[str, Counted]], figures: Figures) -> str:
    bars = (
        Bars(label, "nats, from", BINS, counted.counts.tolist(), f"{counted.tokens:,} tokens")
        for label, counted in kinds
    )
    rows = [
        [label, f"{counted.tokens:,}", f"{counted.mean_abs:.2e}", f"{counted.max_abs:.2e}"] for label, counted in kinds
    ]
    return _charts(map(figures.bars, bars)) + table(["tokens", "number", "mean", "largest"], rows, "mismatch, nats")


def _lag_label(lag: int) -> str:
    return f"lag {lag}" if lag < MAX_LAG else f"lag {MAX_LAG} or more"


def _cards(episodes: Sequence[EpisodeFigures], viewer: ViewerPage, *, with_reward: bool = True) -> str:
    return f'<ul class="cards">{"".join(_card(episode, viewer, with_reward) for episode in episodes)}</ul>'


def _card(episode: EpisodeFigures, viewer: ViewerPage, with_reward: bool) -> str:
    picture = viewer.thumbnails.get(episode.number)
    image = f'<img src="{picture}" alt="first medium of episode {episode.number}">' if picture else ""
    reward = f"environment reward {number_text(episode.environment_reward)} · " if with_reward else ""
    facts = f"{reward}{counted(episode.turns, 'turn')} · {counted(episode.sampled, 'sampled token')} · {episode.ending}"
    return f"<li>{image}<div>{_link(episode, viewer)}<p>{escaped(facts)}</p></div></li>"


def _link(episode: EpisodeFigures, viewer: ViewerPage) -> str:
    name = escaped(episode.episode_id, 80) or f"episode {episode.number}"
    address = viewer.link(episode.number)
    return f'<a href="{escaped(address)}">{name}</a>' if address else f"<span>{name}</span>"


def _charts(drawn: Iterable[str]) -> str:
    found = "".join(drawn)
    return f'<div class="charts">{found}</div>' if found else ""


def _absent(sentence: str) -> str:
    return f'<p class="absent">{escaped(sentence)}</p>'
