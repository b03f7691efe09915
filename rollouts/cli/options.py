"""Options of several commands: those that give values of a configuration, and names and API keys of servers."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeVar

import typer

from renderers.process.files import read_json
from rollouts.engines.http.address import redacted
from rollouts.terminal.text import exit_with_error

if TYPE_CHECKING:
    from rollouts.run_config.config_file import Change

Command = TypeVar("Command", bound=Callable[..., Any])


class EngineKind(StrEnum):
    """What serves at a base URL; `local` is transformers in this process."""

    LOCAL = "local"
    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"


class ConfigOption(NamedTuple):
    """An option of a command for the value at `key`, or for several values (`model_changes`)."""

    name: str
    key: str
    kind: Any
    metavar: str | None
    help: str
    short: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


SET: Final = ConfigOption(
    "set",
    "",
    list[str],
    "KEY=VALUE",
    'A value of the configuration, a word or JSON: limits.max_turns=4, \'mode={"kind": "one_step_off_policy"}\'; '
    "several times.",
)
MODEL_OPTIONS: Final = (
    ConfigOption("model", "", str, "MODEL", "The directory (also of an adapter), repository, or name at an endpoint."),
    ConfigOption("base_url", "", list[str], "URL", "A server or endpoint; several times for a fleet."),
    ConfigOption("engine", "", EngineKind, None, "What is at --base-url (default: vllm); local: run in this process."),
    ConfigOption(
        "api_key_env", "engine.api_key_env", str, "NAME", "The environment variable with the key of --base-url."
    ),
)
EPISODE_OPTIONS: Final = (
    ConfigOption(
        "score",
        "",
        str,
        "FILE.py:FUNCTION",
        "score(completion, task) of a file or module, for one answer to each task.",
    ),
    ConfigOption(
        "environment",
        "",
        str,
        "FILE.py:NAME",
        "A class or function that is called with a task for each episode.",
    ),
    ConfigOption("samples", "group_size", int, "N", "Episodes of each task; default: 1.", ("-n",)),
    ConfigOption("max_tokens", "sampling.max_tokens", int, "N", "Tokens of an answer; default: 2,048."),
    ConfigOption("temperature", "sampling.temperature", float, "T", "Of the sampling; default: 1."),
    ConfigOption("out", "output.directory", Path, "DIR", "The output directory; default: evaluations/TASKS-MODEL."),
)


def takes(*options: ConfigOption) -> Callable[[Command], Command]:
    """Give a command these options. It receives their values by name, None for those that are not passed."""

    def add(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    option.kind | None,
                    typer.Option(
                        option.flag,
                        *option.short,
                        metavar=option.metavar,
                        help=option.help,
                    ),
                ],
            )
            for option in options
        ]
        setattr(command, "__signature__", signature.replace(parameters=[*own, *added]))  # noqa: B010
        return command

    return add


def changes_of(options: tuple[ConfigOption, ...], values: Mapping[str, Any]) -> list[Change]:
    """What the options with a key, and --set after them, change in a configuration."""
    from rollouts.run_config.config_file import Change

    given = [(option, values[option.name]) for option in options if option.key and values[option.name] is not None]
    changes = [
        Change(tuple(option.key.split(".")), str(value.absolute()) if isinstance(value, Path) else value, option.flag)
        for option, value in given
    ]
    for text in values["set"] or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            exit_with_error(f"--set: {text} is no KEY=VALUE, such as limits.max_turns=4")
        with contextlib.suppress(ValueError):  # a text without quotes stays one
            value = json.loads(value)
        changes.append(Change(tuple(key.split(".")), value, "--set"))
    return changes


def model_changes(values: Mapping[str, Any], *, configured: str | None) -> list[Change]:
    """What --model, --base-url and --engine change in a configuration with an engine of the kind `configured`.

    None: it has none, and a model must be named.
    """
    from rollouts.run_config.config_file import Change

    model, urls, engine = values["model"], values["base_url"] or [], values["engine"]
    check_engine(engine or ("vllm" if urls else "local"), urls[0] if urls else None)
    if model is None:
        if urls or configured is None:
            exit_with_error("--model: pass the model directory, or the name of the model at a server")
        return []
    if Path(model).is_dir():
        model = str(Path(model).absolute())
    if adapter := read_json(Path(model) / "adapter_config.json"):
        has_base = configured is not None and not urls and engine is None
        base = None if has_base else adapter.get("base_model_name_or_path")
        changes = model_changes({**values, "model": base}, configured=configured)
        return [*changes, Change(("engine", "adapter"), model, "--model")]
    renderer: dict[str, Any] | None = {"model": model}
    if not urls and engine is None and configured is not None:
        keys = {"openai": ["engine.model"], "local": ["engine.directory", "renderer.model"]}
        return [Change(tuple(key.split(".")), model, "--model") for key in keys.get(configured, ["renderer.model"])]
    if not urls:
        table: dict[str, Any] = {"kind": "local", "directory": model}
    elif engine is EngineKind.OPENAI:
        table, renderer = {"kind": "openai", "base_url": urls[0] if len(urls) == 1 else urls, "model": model}, None
    elif len(urls) == 1:
        table = {"kind": str(engine or "vllm"), "base_url": urls[0]}
    else:
        table = {"kind": "fleet", "server_kind": str(engine or "vllm"), "urls": urls}
    option = "--base-url" if urls else "--model"
    return [Change(("engine",), table, option), Change(("renderer",), renderer, "--model")]


def check_engine(engine: str, base_url: str | None) -> None:
    """Exit with an error where an engine that is a server has no URL, and where the local one has one."""
    if (engine != "local") != bool(base_url):
        kind = "vllm" if engine == "local" else engine
        exit_with_error(f"--base-url URL and --engine {kind} belong together: the engine is the server at that URL")


def api_key_from_environment(variable: str | None, option: str = "--api-key-env") -> str | None:
    """Return the key; None without a variable. Exits with an error, which names the option, if it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        exit_with_error(f"{option} {variable}: this environment variable is not set; put the server's key in it")
    return key


def api_key_advice(url: str, variable: str | None) -> str:
    """Return what to do after a server has refused the key, or the request without a key."""
    if variable is None:
        return (
            f"{redacted(url)} requires an API key: put the key in an environment variable and pass the name of the "
            "variable, --api-key-env VLLM_API_KEY"
        )
    return f"{redacted(url)} refuses the API key in {variable}: set it to the key of `vllm serve --api-key`"
