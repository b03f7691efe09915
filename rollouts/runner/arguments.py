"""Checks of the arguments of a runner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import iscoroutinefunction
from typing import Any

from rollouts.episodes.episode import check_engine, check_renderer, check_sampling
from rollouts.episodes.limits import EpisodeLimits
from rollouts.numbers import whole_number
from rollouts.rewards import GroupReward, check_names
from rollouts.runner.errors import RunnerArgumentError
from rollouts.runner.journal import Journal
from rollouts.runner.retries import RetryPolicy
from rollouts.task import check_make_environment
from rollouts.workers.protocol import are_workers


def check_counts(**counts: Any) -> None:
    """Raises `RunnerArgumentError` for a value that is not an integer of at least 1."""
    for name, value in counts.items():
        if (whole_number(value) or 0) < 1:
            raise RunnerArgumentError(name, value, "pass an integer of at least 1")


def check_place(make_environment: object, engine: object, renderer: object, workers: object) -> None:
    """Raises `ArgumentError` unless there is all that episodes need here, or `workers` and no more than an engine."""
    if workers is None:
        check_make_environment(make_environment)
        check_engine(engine)
        check_renderer(renderer)
        return
    if not are_workers(workers):
        raise RunnerArgumentError("workers", workers, "pass Workers, such as LinkWorkers(...), or None")
    for name, value in (("make_environment", make_environment), ("renderer", renderer)):
        if value is not None:
            raise RunnerArgumentError(name, value, "pass None: with workers=... it is the workers that have one")
    if engine is not None:
        check_engine(engine)


def check_options(
    *,
    sampling: object,
    limits: object,
    retry: object,
    mode: object,
    seed: object,
    group_rewards: object,
    skip_group: object,
    journal: object,
    listeners: object,
) -> None:
    """Raises `RunnerArgumentError` for a value of another type, `ArgumentError` for two rewards of one name."""
    check_sampling(sampling)
    if whole_number(seed) is None:
        raise RunnerArgumentError("seed", seed, "pass an integer")
    if not isinstance(limits, EpisodeLimits):
        raise RunnerArgumentError("limits", limits, "pass EpisodeLimits(...)")
    if not isinstance(retry, RetryPolicy):
        raise RunnerArgumentError("retry", retry, "pass RetryPolicy(...)")
    if not callable(getattr(mode, "max_undelivered", None)) or isinstance(mode, type):
        raise RunnerArgumentError("mode", mode, "pass Synchronous(), OneStepOffPolicy() or Asynchronous(max_staleness)")
    if skip_group is not None and not callable(skip_group):
        raise RunnerArgumentError("skip_group", skip_group, "pass a function of a Group, or None")
    if iscoroutinefunction(skip_group) or iscoroutinefunction(getattr(skip_group, "__call__", None)):  # noqa: B004
        rule = "pass a function that is not async; compute what it has to wait for in a group reward"
        raise RunnerArgumentError("skip_group", skip_group, rule)
    if journal is not None and not isinstance(journal, Journal):
        raise RunnerArgumentError("journal", journal, "pass Journal.open(directory), or None")
    if not isinstance(group_rewards, Sequence) or not all(isinstance(one, GroupReward) for one in group_rewards):
        raise RunnerArgumentError("group_rewards", group_rewards, "pass a list of GroupReward(name, weight, function)")
    check_names("group_rewards", group_rewards)
    if not isinstance(listeners, Iterable) or not all(callable(one) for one in listeners):
        raise RunnerArgumentError("listeners", listeners, "pass a list of functions of an event")
