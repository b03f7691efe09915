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
from rollouts.run_config.errors import ProblemList
from rollouts.run_config.import_paths import check_call, imported_function
from rollouts.run_config.modes import make_mode
from rollouts.run_config.renderers import make_renderer
from rollouts.run_config.rewards import make_group_rewards
from rollouts.run_config.sampling import check_sampling
from rollouts.run_config.tasks import FileTaskSource, TaskSource, make_tasks
from rollouts.runner.events import Listener
from rollouts.runner.journal import Journal
from rollouts.runner.retries import RetryPolicy
from rollouts.runner.runner import Runner
from rollouts.workers.protocol import Workers

#: Keys of the configuration that may change while a run continues; seed and group size are the runner's to compare.
_CHANGEABLE = {"concurrency", "retry", "mode", "workers", "ray", "output", "seed", "group_size"}

#: Keys of an engine that say where its servers are and how they are started, and none of what they sample.
_PLACE_OF_SERVERS = {"base_url", "urls", "file", "servers", "start", "environment", "log", "start_seconds"}
_PLACE_OF_SERVERS |= {"api_key_env", "media"}


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
        place: Engine | Workers,
        *,
        journal: Journal,
        listeners: Sequence[Listener],
    ) -> Runner:
        """The runner of the configuration; its episodes run here with an engine, or on workers."""
        config = self.file.config
        workers = place if isinstance(place, Workers) else None
        return Runner(
            None if workers else self.make_environment,
            None if isinstance(place, Workers) else place,
            None if workers else self.renderer,
            sampling=self.sampling,
            group_size=config.group_size,
            limits=self.limits,
            concurrency=config.concurrency,
            retry=RetryPolicy(**config.retry.model_dump()),
            mode=make_mode(self.file),
            seed=config.seed,
            group_rewards=self.group_rewards,
            skip_group=self.skip_group,
            journal=journal,
            listeners=listeners,
            workers=workers,
        )

    def check_tasks(self, count: int | None) -> None:
        """Check the first `count` tasks of a file, or all. Raises `TaskFileError`."""
        if isinstance(self.tasks, FileTaskSource):
            self.tasks.check(count)

    def journal_configuration(self) -> dict[str, Any]:
        """The values of the configuration that must not change while the run continues, as plain data.

        The content of a file of tasks is one of them where the ids of its tasks are their row numbers: in a file that
        has changed, a number may be that of another task.
        """
        values = self.file.config.model_dump(exclude=_CHANGEABLE)
        engine: dict[str, Any] = {key: value for key, value in values["engine"].items() if key not in _PLACE_OF_SERVERS}
        if engine["kind"] in ("fleet", "router"):  # a run may go on with one server instead of several, or the reverse
            engine["kind"] = "vllm"
        if isinstance(self.tasks, FileTaskSource) and not self.tasks.has_ids:
            values["tasks"]["content_of_the_file"] = self.tasks.digest()
        plain: dict[str, Any] = json.loads(json.dumps(values | {"engine": engine}, default=str))
        return plain


def make_parts(file: ConfigFile, *, offline: bool) -> RunParts:
    """Check everything that a configuration refers to, and make what needs no connection.

    Raises `RunConfigError` with every problem, and `MissingExtraError`.
    """
    problems = ProblemList(file.path)
    tasks = problems.attempt(lambda: make_tasks(file))
    make_environment = problems.attempt(lambda: environment_factory(file))
    group_rewards = problems.attempt(lambda: make_group_rewards(file))
    skip_group = problems.attempt(lambda: _skip_group(file))
    renderer = problems.attempt(lambda: make_renderer(file, offline=offline))
    make_engine = problems.attempt(lambda: engine_factory(file, renderer))
    problems.attempt(lambda: check_sampling(file))
    problems.check()
    assert tasks is not None
    assert make_environment is not None
    assert group_rewards is not None
    assert renderer is not None
    assert make_engine is not None
    return RunParts(file, tasks, make_environment, renderer, make_engine, group_rewards, skip_group)


def _skip_group(file: ConfigFile) -> Callable[..., Any] | None:
    import_path = file.config.skip_group
    if import_path is None:
        return None
    skip_group = imported_function(file, ("skip_group",), import_path)
    check_call(file, ("skip_group",), skip_group, ["group"])
    return skip_group
