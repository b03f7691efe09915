"""`rollouts run --ray`: the workers of a run as actors of a Ray cluster."""

import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from renderers import TemplateRenderer
from rollouts.cli.run.execution import MakeWorkers
from rollouts.engines.protocol import ChatEngine, Engine
from rollouts.errors import ArgumentError
from rollouts.run_config.config_file import Change, ConfigFile, read_config
from rollouts.run_config.engines import connect, engine_factory
from rollouts.run_config.parts import environment_factory, make_renderer, worker_configuration
from rollouts.run_config.sections import VerifiersSection
from rollouts.task import MakeEnvironment, Task
from rollouts.workers.worker_pool import WorkerPool


class ConfiguredParts:
    """What a worker makes of a configuration file, in its own process.

    `path` is the file as the worker finds it, and `changes` what options change in it. `configuration` is the
    digest of what worker and run must have alike.
    """

    def __init__(self, path: str, configuration: str, changes: Sequence[Change] = ()) -> None:
        self._path = path
        self._changes = changes
        self._configuration = configuration

    def make_environment(self, task: Task) -> Any:
        """An environment for one episode."""
        return self._make_environment(task)

    async def make_engine(self) -> Engine | ChatEngine:
        """The engine, after it was asked what it is. Raises `RunConfigError`."""
        engine = engine_factory(self._file, self._renderer)()
        try:
            await connect(self._file, engine)
        except BaseException:
            await engine.close()
            raise
        return engine

    def make_renderer(self) -> TemplateRenderer | None:
        """The renderer."""
        return self._renderer

    @cached_property
    def _make_environment(self) -> MakeEnvironment:
        return environment_factory(self._file)

    @cached_property
    def _renderer(self) -> TemplateRenderer | None:
        return make_renderer(self._file, offline=False)

    @cached_property
    def _file(self) -> ConfigFile:
        if not Path(self._path).is_file():
            rule = "the nodes must have the file: use a shared directory, or `ray job submit --working-dir`"
            raise ArgumentError("CONFIG", self._path, f"there is no such file on this node, in {os.getcwd()}; {rule}")
        file = read_config(Path(self._path), self._changes)
        if worker_configuration(file) != self._configuration:
            rule = "send the same file to all nodes"
            raise ArgumentError("CONFIG", self._path, f"its environment or renderer are not those of the run; {rule}")
        return file


def ray_workers_of_run(file: ConfigFile) -> MakeWorkers:
    """What makes the workers, after connecting to Ray. Raises `RolloutsError`, `MissingExtraError`."""
    if isinstance(file.config.environment, VerifiersSection):
        reason = "environments of verifiers run in the process of the run; leave out --ray"
        raise file.error(("environment", "kind"), reason)
    from rollouts.ray import RayWorkers, connect

    section = file.config.ray
    connect(section.address)
    parts = ConfiguredParts(_path_on_nodes(file.path), worker_configuration(file), file.changes)
    options: dict[str, Any] = {"num_cpus": section.cpus, "num_gpus": section.gpus}
    if section.resources:
        options["resources"] = dict(section.resources)

    def make() -> AbstractAsyncContextManager[WorkerPool]:
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
