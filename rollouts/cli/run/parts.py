"""The objects of a run, made of its configuration before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from renderers import TemplateRenderer
from rollouts.engines.protocol import Engine
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.engines import engine_factory
from rollouts.run_config.environments import MakeEnvironment, environment_factory
from rollouts.run_config.renderers import make_renderer
from rollouts.run_config.tasks import TaskSource, make_tasks
from rollouts.runner.task import Task


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a configuration describes. `make_engine` loads a local model; nothing here has opened a connection."""

    file: ConfigFile
    tasks: TaskSource
    make_environment: MakeEnvironment
    renderer: TemplateRenderer
    make_engine: Callable[[], Engine]

    def environment_seed(self, task: Task) -> int:
        """The seed that `reset` of the task's environments gets."""
        raise NotImplementedError


def make_parts(file: ConfigFile, *, offline: bool) -> RunParts:
    """Check everything that a configuration refers to, and make what needs no connection.

    Raises `RunConfigError` for the first thing that cannot be used, and `MissingExtraError`.
    """
    tasks = make_tasks(file)
    make_environment = environment_factory(file)
    renderer = make_renderer(file, offline=offline)
    return RunParts(file, tasks, make_environment, renderer, engine_factory(file, renderer))
