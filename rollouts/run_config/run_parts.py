"""What a configuration describes: tasks, environment, renderer, engine, rewards, and the runner of them."""

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from renderers import Renderer, RendererPool, TemplateRenderer
from rollouts.engines.protocol import ChatEngine, Engine, SamplingParams
from rollouts.episodes.limits import EpisodeLimits
from rollouts.rewards import GroupReward
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.engines import engine_factory
from rollouts.run_config.errors import ProblemList
from rollouts.run_config.import_paths import imported_files, imported_function
from rollouts.run_config.parts import (
    environment_factory,
    load_verifiers,
    make_group_rewards,
    make_mode,
    make_renderer,
    sampling_problems,
)
from rollouts.run_config.sections import VerifiersSection
from rollouts.run_config.tasks import FileTaskSource, TaskSource, make_tasks
from rollouts.run_config.teacher import Teacher, make_teacher
from rollouts.runner.events import Listener
from rollouts.runner.group_run import ScoreEpisode
from rollouts.runner.journal import Journal
from rollouts.runner.modes import Mode
from rollouts.runner.retries import RetryPolicy
from rollouts.runner.runner import Runner
from rollouts.task import MakeEnvironment
from rollouts.workers.worker_pool import WorkerPool

#: Keys of the configuration that may change while a run continues; seed and group size are the runner's to compare.
_CHANGEABLE = {"concurrency", "retry", "mode", "ray", "output", "seed", "group_size", "evaluation"}
_CHANGEABLE |= {"stop_after_failed_groups"}


#: Keys of an engine that say where its servers are and how they are started, and none of what they sample.
_PLACE_OF_SERVERS = {"base_url", "urls", "file", "servers", "start", "environment", "log", "start_seconds"}
_PLACE_OF_SERVERS |= {"api_key_env", "media"}


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a configuration describes. `make_engine` loads a local model; nothing here has opened a connection."""

    file: ConfigFile
    tasks: TaskSource
    make_environment: MakeEnvironment | None
    renderer: TemplateRenderer | None
    make_engine: Callable[[], Engine | ChatEngine]
    group_rewards: list[GroupReward]
    skip_group: Callable[..., Any] | None
    verifiers: Any = None
    """The environment of verifiers that is in place of `make_environment`."""
    teacher: Teacher | None = None

    @asynccontextmanager
    async def place(
        self, engine: Engine | ChatEngine, renderer: Renderer | RendererPool | None
    ) -> AsyncIterator[Engine | ChatEngine | WorkerPool]:
        """Where episodes run with an engine of this process: with it, or at the workers that verifiers needs."""
        if self.verifiers is None:
            yield engine
            return
        from rollouts.environments.verifiers import VerifiersWorkers

        async with VerifiersWorkers(self.verifiers, engine, renderer, slots=self.file.config.concurrency) as workers:
            yield workers

    def with_all_groups(self) -> "RunParts":
        """The parts without what leaves groups out: an evaluation needs all, a run that trains does not."""
        config = self.file.config.model_copy(update={"skip_group": None, "mode": None})
        return replace(self, file=replace(self.file, config=config), skip_group=None)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**self.file.config.sampling.model_dump())

    @property
    def limits(self) -> EpisodeLimits:
        return EpisodeLimits(**self.file.config.limits.model_dump())

    def make_runner(
        self,
        place: Engine | ChatEngine | WorkerPool,
        *,
        listeners: Sequence[Listener],
        journal: Journal | None = None,
        score_episode: ScoreEpisode | None = None,
        mode: Mode | None = None,
        group_size: int | None = None,
        tasks: TaskSource | None = None,
        engine: Engine | None = None,
    ) -> Runner:
        """The runner of the configuration; its episodes run here with an engine, or on workers.

        `mode` and `group_size` take the place of those of the file, `tasks` are those of `collect`; `engine`
        gets the updates of the weights where the episodes run on workers.
        """
        config = self.file.config
        workers = place if isinstance(place, WorkerPool) else None
        return Runner(
            None if workers else self.make_environment,
            engine if isinstance(place, WorkerPool) else place,
            None if workers else self.renderer,
            sampling=self.sampling,
            group_size=group_size or config.group_size,
            limits=self.limits,
            concurrency=config.concurrency,
            retry=RetryPolicy(**config.retry.model_dump()),
            mode=mode or make_mode(self.file),
            seed=config.seed,
            group_rewards=self.group_rewards,
            skip_group=self.skip_group,
            score_episode=score_episode,
            stop_after_failed_groups=config.stop_after_failed_groups,
            journal=journal,
            listeners=listeners,
            tasks=tasks,
            workers=workers,
        )

    def description(self) -> dict[str, Any]:
        """What is run and how, for comparing its results with others.

        The configuration, with the places of the servers; the digests of the chat template, of the file of
        tasks and of the modules that are imported from files; the version of this package.
        """
        values = self.configuration_and_files()
        engine = self.file.config.engine.model_dump(mode="json", include=_PLACE_OF_SERVERS, exclude_none=True)
        return {
            **values,
            "engine": values["engine"] | {key: value for key, value in engine.items() if key in ("base_url", "urls")},
            "version": metadata.version("mmrollouts"),
        }

    def configuration_and_files(self) -> dict[str, Any]:
        """`journal_configuration` with seed, group size, and the digests that `description` names."""
        config, values = self.file.config, self.journal_configuration()
        if isinstance(self.tasks, FileTaskSource):
            values["tasks"]["content_of_the_file"] = self.tasks.digest()
        source = "" if self.renderer is None else self.renderer.template.source
        return {
            **values,
            "group_size": config.group_size,
            "seed": config.seed,
            "template": hashlib.sha256(source.encode()).hexdigest() if source else None,
            "modules": imported_files(self.file),  # a moment after they were imported
        }

    def journal_configuration(self) -> dict[str, Any]:
        """The values of the configuration that must not change while the run continues, as plain data.

        The content of a file of tasks is one of them where the ids of its tasks are their row numbers: in a
        file that has changed, a number may be that of another task.
        """
        values = self.file.config.model_dump(exclude=_CHANGEABLE)
        engine = _without_places(values["engine"])
        if engine["kind"] == "fleet":  # a run may go on with one server instead of several, or the reverse
            engine["kind"] = engine.pop("server_kind", "vllm")
        if engine["kind"] == "sglang":
            engine = {key: value for key, value in engine.items() if key not in ("model", "media")}  # vLLM's
        if isinstance(self.tasks, FileTaskSource) and self.tasks.section.id_key is None:
            values["tasks"]["content_of_the_file"] = self.tasks.digest()
        if values["teacher"] is not None:
            values["teacher"]["engine"] = _without_places(values["teacher"]["engine"])
        plain: dict[str, Any] = json.loads(json.dumps(values | {"engine": engine}, default=str))
        return plain


def _without_places(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in engine.items() if key not in _PLACE_OF_SERVERS}


def make_parts(file: ConfigFile, *, offline: bool) -> RunParts:
    """Everything that needs no connection. Raises `RunConfigError` (every problem), `MissingExtraError`."""
    problems = ProblemList()
    verifiers = None
    if isinstance(file.config.environment, VerifiersSection):
        verifiers, tasks = problems.attempt(lambda: load_verifiers(file)) or (None, ())
        make_environment = None
    else:
        tasks = problems.attempt(lambda: make_tasks(file))
        make_environment = problems.attempt(lambda: environment_factory(file))
    group_rewards = problems.attempt(lambda: make_group_rewards(file))
    skip_group = None
    if (path := file.config.skip_group) is not None:
        skip_group = problems.attempt(lambda: imported_function(file, ("skip_group",), path, ["group"]))
    renderer = problems.attempt(lambda: make_renderer(file, offline=offline))
    make_engine = problems.attempt(lambda: engine_factory(file, renderer))
    for key, reason in sampling_problems(file):
        problems.add(file.error(key, reason))
    problems.check()
    teacher = make_teacher(file, renderer, offline=offline)  # compared with the renderer, which is there now
    return RunParts(file, tasks, make_environment, renderer, make_engine, group_rewards, skip_group, verifiers, teacher)
