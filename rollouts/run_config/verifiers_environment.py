"""The environment of a run that verifiers plays, with its tasks."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from rollouts.errors import describe_exception
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.import_paths import make_importable
from rollouts.run_config.sections import TasksOfVerifiers, VerifiersSection
from rollouts.run_config.tasks import TaskSource


def load_verifiers(file: ConfigFile) -> tuple[Any, TaskSource]:
    """The environment of a configuration, and its tasks, of which the first is loaded. Its table is of that kind.

    Raises `RunConfigError`, and `UnsupportedVersionError` without verifiers 0.4.
    """
    section = file.config.environment
    assert isinstance(section, VerifiersSection)
    if not isinstance(file.config.tasks, TasksOfVerifiers):
        reason = 'an environment of verifiers has its own tasks; write kind = "verifiers" and no other key'
        raise file.error(("tasks", "kind"), reason)
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    from rollouts.environments.verifiers import VerifiersTasks

    make_importable(file.directory)
    taskset = section.arguments.get("taskset", {})
    if not isinstance(taskset, dict) or "id" in taskset:
        reason = "write a table with options of the taskset; its id is that of [environment]"
        raise file.error(("environment", "arguments", "taskset"), reason)
    try:
        config = resolve_env_config({**section.arguments, "taskset": {**taskset, "id": section.id}})
        env = load_environment(config)
        tasks = VerifiersTasks(env)
        is_empty = next(iter(tasks), None) is None
    except ValidationError as error:
        # Without the values, which may be secrets.
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        raise file.error(("environment", "arguments"), f"verifiers refuses {'; '.join(found)}") from None
    except (Exception, SystemExit) as error:
        # A module of a user may raise anything, and call sys.exit.
        reason = f"verifiers cannot load {section.id!r}: {describe_exception(error)}"
        raise file.error(("environment", "id"), reason) from error
    if is_empty:
        raise file.error(("environment", "id"), f"the taskset {section.id!r} has no task")
    return env, tasks
