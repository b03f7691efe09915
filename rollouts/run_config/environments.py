"""The environment of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from rollouts.episodes.environment import ThreadedEnvironment
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.import_paths import check_call, imported_function
from rollouts.run_config.sections import ImportedEnvironment
from rollouts.runner.task import Task

#: Makes the environment of one episode; it may be `async`.
MakeEnvironment: TypeAlias = Callable[[Task], Any]

_ANY_TASK = Task("0")


def environment_factory(file: ConfigFile) -> MakeEnvironment:
    """The `make_environment` of a configuration. Raises `RunConfigError`; no environment is made."""
    section = file.config.environment
    return _imported_environment(file, section)


def _imported_environment(file: ConfigFile, section: ImportedEnvironment) -> MakeEnvironment:
    key = ("environment", "factory")
    factory = imported_function(file, key, section.factory)
    check_call(
        file, ("environment", "arguments") if section.arguments else key, factory, (_ANY_TASK,), section.arguments
    )
    if section.threaded:
        return lambda task: ThreadedEnvironment(factory(task, **section.arguments))
    return lambda task: factory(task, **section.arguments)
