"""Runs the groups of a configuration and writes them to its output directory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from renderers import Renderer, RendererPool, TemplateRenderer
from rollouts.cli.run.output import GroupFiles, OutputDirectory, StoredGroups, remove_failed_groups
from rollouts.engines.protocol import ChatEngine, Engine, SamplingParams
from rollouts.episodes.limits import EpisodeLimits
from rollouts.errors import ArgumentError
from rollouts.observability import (
    EngineMonitor,
    JsonLinesSink,
    MetricHistory,
    MetricSink,
    ProgressDisplay,
    RendererStats,
    RunMetrics,
    TensorBoardSink,
    WandbSink,
)
from rollouts.observability.metric_sinks import last_step
from rollouts.observability.run_metrics import Source
from rollouts.rewards import GroupReward
from rollouts.run_config.config_file import ConfigFile, ProblemList, read_config
from rollouts.run_config.engines import connect, engine_factory
from rollouts.run_config.import_paths import check_call, imported_files, imported_function
from rollouts.run_config.parts import (
    WorkerParts,
    check_processes,
    check_sampling,
    environment_factory,
    load_verifiers,
    make_group_rewards,
    make_mode,
    make_renderer,
    make_worker_parts,
    worker_configuration,
)
from rollouts.run_config.sections import VerifiersSection
from rollouts.run_config.tasks import FileTaskSource, TaskSource, first_tasks, make_tasks
from rollouts.run_config.teacher import Teacher, make_teacher
from rollouts.runner.events import Listener
from rollouts.runner.group_run import ScoreEpisode
from rollouts.runner.journal import Journal
from rollouts.runner.retries import RetryPolicy
from rollouts.runner.runner import Runner
from rollouts.task import MakeEnvironment, Task
from rollouts.terminal.interrupts import run_with_deadline
from rollouts.terminal.table import counted, print_note
from rollouts.workers.protocol import Workers

#: Keys of the configuration that may change while a run continues; seed and group size are the runner's to compare.
_CHANGEABLE = {"concurrency", "retry", "mode", "ray", "output", "seed", "group_size", "evaluation"}
_CHANGEABLE |= {"stop_after_failed_groups"}

#: Those of them that a description of a run has.
_ADDRESSES = {"base_url", "urls"}

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
    ) -> AsyncIterator[Engine | ChatEngine | Workers]:
        """Where episodes run with an engine of this process: with it, or at the workers that verifiers needs."""
        if self.verifiers is None:
            yield engine
            return
        from rollouts.environments.verifiers import VerifiersWorkers

        async with VerifiersWorkers(self.verifiers, engine, renderer, slots=self.file.config.concurrency) as workers:
            yield workers

    @property
    def sampling(self) -> SamplingParams:
        with self.file.naming("sampling"):
            return SamplingParams(**self.file.config.sampling.model_dump())

    @property
    def limits(self) -> EpisodeLimits:
        return EpisodeLimits(**self.file.config.limits.model_dump())

    def make_runner(
        self,
        place: Engine | ChatEngine | Workers,
        *,
        journal: Journal,
        listeners: Sequence[Listener],
        score_episode: ScoreEpisode | None = None,
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
            score_episode=score_episode,
            stop_after_failed_groups=config.stop_after_failed_groups,
            journal=journal,
            listeners=listeners,
            workers=workers,
        )

    def check_tasks(self, count: int | None) -> None:
        """Check the first `count` tasks of a file, or all. Raises `TaskFileError`."""
        if isinstance(self.tasks, FileTaskSource):
            self.tasks.check(count)

    def description(self) -> dict[str, Any]:
        """What is run and how, for comparing its results with others.

        The configuration, with the places of the servers; the digests of the chat template, of the file of tasks and of
        the modules that are imported from files; the version of this package.
        """
        source = "" if self.renderer is None else self.renderer.template.source
        values = self.journal_configuration()
        engine = self.file.config.engine.model_dump(mode="json", include=_PLACE_OF_SERVERS, exclude_none=True)
        if isinstance(self.tasks, FileTaskSource):
            values["tasks"]["content_of_the_file"] = self.tasks.digest()
        return {
            **values,
            "engine": values["engine"] | {key: value for key, value in engine.items() if key in _ADDRESSES},
            "group_size": self.file.config.group_size,
            "seed": self.file.config.seed,
            "template": hashlib.sha256(source.encode()).hexdigest() if source else None,
            "modules": imported_files(self.file),
            "version": metadata.version("mmrollouts"),
        }

    def journal_configuration(self) -> dict[str, Any]:
        """The values of the configuration that must not change while the run continues, as plain data.

        The content of a file of tasks is one of them where the ids of its tasks are their row numbers: in a file that
        has changed, a number may be that of another task.
        """
        values = self.file.config.model_dump(exclude=_CHANGEABLE)
        engine = _without_places(values["engine"])
        if engine["kind"] == "fleet":  # a run may go on with one server instead of several, or the reverse
            engine["kind"] = engine.pop("server_kind", "vllm")
        if engine["kind"] == "sglang":
            engine = {key: value for key, value in engine.items() if key not in ("model", "media")}  # vLLM's
        if isinstance(self.tasks, FileTaskSource) and not self.tasks.has_ids:
            values["tasks"]["content_of_the_file"] = self.tasks.digest()
        if values["teacher"] is not None:
            values["teacher"]["engine"] = _without_places(values["teacher"]["engine"])
        plain: dict[str, Any] = json.loads(json.dumps(values | {"engine": engine}, default=str))
        return plain


def _without_places(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an engine without the places of its servers."""
    return {key: value for key, value in engine.items() if key not in _PLACE_OF_SERVERS}


def make_parts(file: ConfigFile, *, offline: bool) -> RunParts:
    """Check everything that a configuration refers to, and make what needs no connection.

    Raises `RunConfigError` with every problem, and `MissingExtraError`.
    """
    problems = ProblemList(file.path)
    verifiers = None
    if isinstance(file.config.environment, VerifiersSection):
        verifiers, tasks = problems.attempt(lambda: load_verifiers(file)) or (None, ())
        make_environment = None
    else:
        tasks = problems.attempt(lambda: make_tasks(file))
        make_environment = problems.attempt(lambda: environment_factory(file))
    group_rewards = problems.attempt(lambda: make_group_rewards(file))
    skip_group = problems.attempt(lambda: _skip_group(file))
    renderer = problems.attempt(lambda: make_renderer(file, offline=offline))
    make_engine = problems.attempt(lambda: engine_factory(file, renderer))
    problems.attempt(lambda: check_sampling(file))
    problems.check()
    teacher = make_teacher(file, renderer, offline=offline)  # compared with the renderer, which is there now
    return RunParts(file, tasks, make_environment, renderer, make_engine, group_rewards, skip_group, verifiers, teacher)


def _skip_group(file: ConfigFile) -> Callable[..., Any] | None:
    import_path = file.config.skip_group
    if import_path is None:
        return None
    skip_group = imported_function(file, ("skip_group",), import_path)
    check_call(file, ("skip_group",), skip_group, ["group"])
    return skip_group


#: Returns the context in which workers run the episodes of a run.
MakeWorkers: TypeAlias = Callable[[], AbstractAsyncContextManager[Workers]]

#: A run that is interrupted has ended after this time, also if a method of an environment does not return.
_INTERRUPT_SECONDS = 4.0


class Execution:
    """The run of this process: all tasks, or the first `limit`. `metrics` are those of the runner so far.

    `make_workers` returns the context of the workers that run its episodes; None: they run in this process. With
    `rerun_failed`, groups of earlier processes that have failed episodes are run again.
    """

    def __init__(
        self,
        parts: RunParts,
        output: OutputDirectory,
        *,
        limit: int | None,
        console: Console,
        resume_command: str,
        make_workers: MakeWorkers | None = None,
        rerun_failed: bool = False,
    ) -> None:
        self._parts = parts
        self._output = output
        self._limit = limit
        self._console = console
        self._resume_command = resume_command
        self._make_workers = make_workers
        self._rerun_failed = rerun_failed
        self._metrics: RunMetrics | None = None
        self._journal: Journal | None = None
        self._score_episode: ScoreEpisode | None = None

    def run(self) -> None:
        """Run, and write every group as it finishes. Called once, in the main thread.

        Raises `RunConfigError` if the engine cannot be used, `JournalError`, and `KeyboardInterrupt` after Ctrl-C.
        """
        engine = self._parts.make_engine() if self._make_workers is None else None
        message = f"interrupted, and stopped at once; to continue: {self._resume_command}"
        run_with_deadline(self._run(engine), _INTERRUPT_SECONDS, message)

    @property
    def has_begun(self) -> bool:
        """Whether the journal is open, so that the run can be continued."""
        return self._metrics is not None

    def metrics(self) -> dict[str, float]:
        """The metrics of the runner by name (`rollouts.observability.METRICS`); empty before it began."""
        return {} if self._metrics is None else dict(self._metrics.metrics())

    def missing_tasks(self) -> list[str]:
        """Tasks whose groups an earlier process wrote, the files have lost, and this process has not written again."""
        return [] if self._journal is None else sorted(self._journal.lost)

    async def _run(self, engine: Engine | ChatEngine | None) -> None:
        async with AsyncExitStack() as opened:
            sources: list[Source] = []
            if engine is not None:
                opened.push_async_callback(engine.close)
                await connect(self._parts.file, engine)
            if (teacher := self._parts.teacher) is not None:
                of_teacher = teacher.make_engine()
                opened.push_async_callback(of_teacher.close)
                await connect(teacher.file, of_teacher)
                await teacher.check(of_teacher, engine)
                self._score_episode = partial(teacher.scored, of_teacher)
            if engine is not None:
                if isinstance(engine, Engine):
                    sources.append(await opened.enter_async_context(EngineMonitor(engine)))
                if self._parts.renderer is not None:
                    sources.append(RendererStats(self._parts.renderer))
                place = await opened.enter_async_context(self._parts.place(engine, self._parts.renderer))
                await self._run_at(place, [*sources, *([place.metrics] if isinstance(place, Workers) else [])])
            elif self._make_workers is not None:
                workers = await opened.enter_async_context(self._make_workers())
                await self._run_at(workers, [workers.metrics])

    async def _run_at(self, place: Engine | ChatEngine | Workers, sources: list[Source]) -> None:
        parts, limit = self._parts, self._limit
        tasks = parts.tasks if limit is None else first_tasks(parts.tasks, limit)
        journal = Journal.open(self._output.journal, configuration=parts.journal_configuration())
        async with AsyncExitStack() as opened:
            opened.push_async_callback(journal.close)  # the runner closes it, if it comes to that
            again: frozenset[str] = frozenset()
            with self._console.status("reading the groups that are written"):  # 10,000 take some seconds
                if self._rerun_failed:
                    journal.run_failed_again()
                    again = await asyncio.to_thread(remove_failed_groups, self._output)
                stored = await asyncio.to_thread(StoredGroups, self._output)
            journal.count_as_delivered(stored.task_ids, lost=stored.without_record)
            self._journal = journal
            sinks = self._sinks()
            self._metrics = metrics = RunMetrics(sources=sources)
            runner = parts.make_runner(place, journal=journal, listeners=[metrics], score_episode=self._score_episode)
            progress = ProgressDisplay(metrics, total_groups=limit, console=self._console)
            history = MetricHistory(metrics, sinks, first_step=last_step(self._output.runner_metrics))
            with history, progress:
                async with runner:
                    await runner.resume()
                    if again:
                        print_note(f"{counted(len(again), 'task')} with failed episodes run again")
                    if lost := sorted(journal.lost - again):
                        named = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
                        print_note(
                            f"trajectories.mmr has lost the groups of {counted(len(lost), 'task')}, which are run "
                            f"again unless the journal still has them: {named}"
                        )
                    stored.remove_rows_without_record()
                    with GroupFiles(self._output) as files:
                        await _complete_rows(runner, parts.tasks, stored, files)
                        await _write_groups(runner, tasks, files)

    def _sinks(self) -> list[MetricSink]:
        """Where the metrics of the runner are written. Raises `MissingExtraError` and `RunConfigError`."""
        output = self._parts.file.config.output
        sinks: list[MetricSink] = []
        if output.tensorboard:
            sinks.append(TensorBoardSink(self._output.tensorboard))
        if output.wandb is not None:
            with self._parts.file.naming("output", "wandb"):
                sinks.append(WandbSink(**output.wandb.model_dump(), directory=self._output.path))
        return [JsonLinesSink(self._output.runner_metrics), *sinks]


async def _complete_rows(runner: Runner, tasks: TaskSource, stored: StoredGroups, files: GroupFiles) -> None:
    """Write the lines that `metrics.jsonl` has lost, or that a process was killed before it had written.

    The data of their tasks are those of the file of tasks; another source is not read twice.
    """
    found: dict[str, Task] = {}
    if stored.without_row and isinstance(tasks, FileTaskSource):
        found = {task.task_id: task async for task in tasks if task.task_id in stored.without_row}
    for task_id, episodes in stored.groups_without_row():
        files.write_row(await runner.group_of(found.get(task_id, Task(task_id)), episodes))
    if stored.without_row:
        count = counted(len(stored.without_row), "group")
        print_note(f"metrics.jsonl lacked the lines of {count}; they were computed from trajectories.mmr")


async def _write_groups(runner: Runner, tasks: TaskSource, files: GroupFiles) -> None:
    """Write the groups as they finish. A group counts as delivered when it has been written."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="group-files") as thread:
        async for group in runner.stream(tasks):
            await loop.run_in_executor(thread, files.write, group)


# `rollouts run --ray`: the workers of a run as actors of a Ray cluster.


class ConfiguredParts:
    """What a worker makes of a configuration file, in its own process.

    `path` is the file as the worker finds it. `configuration` is the digest of what worker and run must have alike.
    """

    def __init__(self, path: str, configuration: str) -> None:
        self._path = path
        self._configuration = configuration

    def make_environment(self, task: Task) -> Any:
        """An environment for one episode."""
        return self._parts.make_environment(task)

    async def make_engine(self) -> Engine | ChatEngine:
        """The engine, after it was asked what it is. Raises `RunConfigError`."""
        engine = self._parts.make_engine()
        try:
            await connect(self._file, engine)
        except BaseException:
            await engine.close()
            raise
        return engine

    def make_renderer(self) -> TemplateRenderer | None:
        """The renderer."""
        return self._parts.renderer

    @cached_property
    def _file(self) -> ConfigFile:
        if not Path(self._path).is_file():
            rule = "the nodes must have the file: use a shared directory, or `ray job submit --working-dir`"
            raise ArgumentError("CONFIG", self._path, f"there is no such file on this node, in {os.getcwd()}; {rule}")
        file = read_config(Path(self._path))
        if worker_configuration(file) != self._configuration:
            rule = "send the same file to all nodes"
            raise ArgumentError("CONFIG", self._path, f"its environment or renderer are not those of the run; {rule}")
        return file

    @cached_property
    def _parts(self) -> WorkerParts:
        return make_worker_parts(self._file)


def ray_workers_of_run(file: ConfigFile) -> MakeWorkers:
    """Connect to Ray, and return what makes the workers of a configuration.

    Raises `RolloutsError` and `MissingExtraError`.
    """
    check_processes(file)
    from rollouts.ray import RayWorkers, connect

    section = file.config.ray
    connect(section.address)
    parts = ConfiguredParts(_path_on_nodes(file.path), worker_configuration(file))
    options: dict[str, Any] = {"num_cpus": section.cpus, "num_gpus": section.gpus}
    if section.resources:
        options["resources"] = dict(section.resources)

    def make() -> AbstractAsyncContextManager[Workers]:
        return RayWorkers(
            parts.make_environment,
            parts.make_engine,
            parts.make_renderer,
            num_workers=section.workers,
            episodes_per_worker=section.episodes_per_worker or -(-file.config.concurrency // section.workers),
            actor_options=options,
            max_losses=section.max_losses,
            start_seconds=section.start_seconds,
        )

    return make


def _path_on_nodes(path: Path) -> str:
    """The path of a file for actors: relative in a job with a working directory, of which each node has a copy."""
    import ray

    absolute, here = path.resolve(), Path.cwd()
    has_copies = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    return str(absolute.relative_to(here) if has_copies and absolute.is_relative_to(here) else absolute)
