"""The objects of a run, made of its configuration before anything is started."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from renderers import TemplateRenderer
from rollouts.engines.protocol import Engine, SamplingParams
from rollouts.episodes.limits import EpisodeLimits
from rollouts.rewards import GroupReward
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.engines import engine_factory
from rollouts.run_config.environments import MakeEnvironment, environment_factory
from rollouts.run_config.import_paths import imported_function
from rollouts.run_config.renderers import make_renderer
from rollouts.run_config.rewards import make_group_rewards
from rollouts.run_config.tasks import TaskSource, make_tasks
from rollouts.runner.events import Listener
from rollouts.runner.journal import Journal
from rollouts.runner.retries import RetryPolicy
from rollouts.runner.runner import Runner

#: Keys of the configuration that may change while a run continues; seed and group size are the runner's to compare.
_CHANGEABLE = {"concurrency", "retry", "output", "seed", "group_size"}


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a configuration describes. `make_engine` loads a local model; nothing here has opened a connection."""

    file: ConfigFile
    tasks: TaskSource
    make_environment: MakeEnvironment
    renderer: TemplateRenderer
    make_engine: Callable[[], Engine]
    group_rewards: list[GroupReward]
    skip_group: Callable[..., Any] | None

    @property
    def sampling(self) -> SamplingParams:
        with self.file.naming("sampling"):
            return SamplingParams(**self.file.config.sampling.model_dump())

    @property
    def limits(self) -> EpisodeLimits:
        return EpisodeLimits(**self.file.config.limits.model_dump())

    def make_runner(
        self,
        engine: Engine,
        *,
        journal: Journal,
        listeners: Sequence[Listener],
    ) -> Runner:
        """The runner of the configuration."""
        config = self.file.config
        return Runner(
            self.make_environment,
            engine,
            self.renderer,
            sampling=self.sampling,
            group_size=config.group_size,
            limits=self.limits,
            concurrency=config.concurrency,
            retry=RetryPolicy(**config.retry.model_dump()),
            seed=config.seed,
            group_rewards=self.group_rewards,
            skip_group=self.skip_group,
            journal=journal,
            listeners=listeners,
        )

    def journal_configuration(self) -> dict[str, Any]:
        """The values of the configuration that must not change while the run continues, as plain data."""
        values = self.file.config.model_dump(exclude=_CHANGEABLE)
        engine: dict[str, Any] = {
            key: value for key, value in values["engine"].items() if key not in ("base_url", "api_key_env", "media")
        }
        plain: dict[str, Any] = json.loads(json.dumps(values | {"engine": engine}, default=str))
        return plain


def make_parts(file: ConfigFile, *, offline: bool) -> RunParts:
    """Check everything that a configuration refers to, and make what needs no connection.

    Raises `RunConfigError` for the first thing that cannot be used, and `MissingExtraError`.
    """
    tasks = make_tasks(file)
    make_environment = environment_factory(file)
    group_rewards = make_group_rewards(file)
    skip_group = file.config.skip_group
    skip = None if skip_group is None else imported_function(file, ("skip_group",), skip_group)
    renderer = make_renderer(file, offline=offline)
    return RunParts(file, tasks, make_environment, renderer, engine_factory(file, renderer), group_rewards, skip)
