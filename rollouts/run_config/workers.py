"""What a worker of a run makes of its configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from renderers import TemplateRenderer
from rollouts.engines.protocol import Engine
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.engines import engine_factory
from rollouts.run_config.environments import environment_factory
from rollouts.run_config.errors import ProblemList
from rollouts.run_config.renderers import make_renderer
from rollouts.task import MakeEnvironment


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker needs of a configuration. `make_engine` loads a local model."""

    make_environment: MakeEnvironment
    renderer: TemplateRenderer
    make_engine: Callable[[], Engine]


def make_worker_parts(file: ConfigFile) -> WorkerParts:
    """Make what a worker needs. Raises `RunConfigError` with every problem, and `MissingExtraError`."""
    problems = ProblemList(file.path)
    make_environment = problems.attempt(lambda: environment_factory(file))
    renderer = problems.attempt(lambda: make_renderer(file, offline=False))
    make_engine = problems.attempt(lambda: engine_factory(file, renderer))
    problems.check()
    assert make_environment is not None
    assert renderer is not None
    assert make_engine is not None
    return WorkerParts(make_environment, renderer, make_engine)


def worker_configuration(file: ConfigFile) -> str:
    """A digest of the tables that worker and run must have alike: those of the environment and the renderer."""
    values = file.config.model_dump(include={"environment", "renderer"})
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]
