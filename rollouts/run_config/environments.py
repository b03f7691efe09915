"""The environment of a run: the function that makes one for each episode, by the kind of the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

from rollouts.episodes.environment import ThreadedEnvironment
from rollouts.error_texts import describe_exception
from rollouts.errors import MissingExtraError
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.import_paths import check_call, imported_function, imported_object
from rollouts.run_config.rewards import make_rewards
from rollouts.run_config.sections import GymnasiumSection, ImportedEnvironment, ScoredPromptSection, ToolsSection
from rollouts.task import Task

#: Makes the environment of one episode; it may be `async`.
MakeEnvironment: TypeAlias = Callable[[Task], Any]


def environment_factory(file: ConfigFile) -> MakeEnvironment:
    """The `make_environment` of a configuration. Raises `RunConfigError`; no environment is made."""
    section = file.config.environment
    return _FACTORIES[type(section)](file, section)


def _imported(file: ConfigFile, section: ImportedEnvironment) -> MakeEnvironment:
    key = ("environment", "factory")
    factory = imported_function(file, key, section.factory)
    arguments_key = ("environment", "arguments") if section.arguments else key
    check_call(file, arguments_key, factory, ["task"], section.arguments)
    if section.threaded:
        return lambda task: ThreadedEnvironment(factory(task, **section.arguments))
    return lambda task: factory(task, **section.arguments)


def _scored_prompt(file: ConfigFile, section: ScoredPromptSection) -> MakeEnvironment:
    from rollouts.environments import ScoredPrompt

    messages = _messages(file, section.messages)
    rewards = make_rewards(file, ("environment", "rewards"), section.rewards, ["completion", "task"])
    return lambda task: ScoredPrompt(task, messages, rewards)


def _tools(file: ConfigFile, section: ToolsSection) -> MakeEnvironment:
    from rollouts.environments import Tool, ToolEnvironment

    tools: list[Tool] = []
    for index, import_path in enumerate(section.tools):
        key = ("environment", "tools", index)
        found = imported_object(file, key, import_path)
        if not isinstance(found, Tool) and not callable(found):
            raise file.error(key, f"{import_path} is a {type(found).__name__}; name a typed function or a Tool")
        with file.naming(*key):
            tools.append(found if isinstance(found, Tool) else Tool.from_function(found))
    messages = _messages(file, section.messages)
    rewards = make_rewards(file, ("environment", "rewards"), section.rewards, ["conversation", "task"])

    def make(task: Task) -> ToolEnvironment:
        return ToolEnvironment(task, tools=tools, messages=messages, score=rewards, call_seconds=section.call_seconds)

    with file.naming("environment", "tools"):
        make(Task("0"))  # refuses two tools of one name
    return make


def _gymnasium(file: ConfigFile, section: GymnasiumSection) -> MakeEnvironment:
    from rollouts.environments import GymnasiumEnvironment

    if find_spec("gymnasium") is None:
        raise MissingExtraError("an environment of Gymnasium", "gym", "gymnasium")
    import gymnasium

    try:
        gymnasium.spec(section.id)
    except Exception as error:
        # The module of an id may raise anything.
        reason = f"gymnasium does not know {section.id!r} ({describe_exception(error)}); correct the id"
        raise file.error(("environment", "id"), reason) from error
    parse_action = None
    if section.parse_action is not None:
        key = ("environment", "parse_action")
        parse_action = imported_function(file, key, section.parse_action)
        check_call(file, key, parse_action, ["text"])
    arguments = (
        section.arguments if section.observation == "text" else {"render_mode": "rgb_array", **section.arguments}
    )

    def make(task: Task) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(
            lambda: gymnasium.make(section.id, **arguments),
            instructions=section.instructions,
            action_names=section.action_names,
            parse_action=parse_action,
            observation=section.observation,
            on_invalid_action=section.on_invalid_action,
            invalid_action_reward=section.invalid_action_reward,
        )

    return make


def _messages(file: ConfigFile, import_path: str) -> Callable[..., Any]:
    key = ("environment", "messages")
    messages = imported_function(file, key, import_path)
    check_call(file, key, messages, ["task"])
    return messages


_FACTORIES: Mapping[type, Callable[[ConfigFile, Any], MakeEnvironment]] = {
    ImportedEnvironment: _imported,
    ScoredPromptSection: _scored_prompt,
    ToolsSection: _tools,
    GymnasiumSection: _gymnasium,
}
