"""The engine of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

from rollouts.engines.protocol import Engine
from rollouts.errors import ApiKeyError, EngineError
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.sections import LocalEngineSection, ScriptedEngineSection, VLLMEngineSection
from rollouts.terminal.interrupts import defer_interrupts


def engine_factory(file: ConfigFile, renderer: Any) -> Callable[[], Engine]:
    """Check the engine of a configuration; return the function that makes it.

    Neither opens a connection; the function loads a local model. Both raise `RunConfigError`, the function also
    `MissingExtraError`.
    """
    section = file.config.engine
    if isinstance(section, VLLMEngineSection):
        return _vllm_engine(file, section)
    if isinstance(section, LocalEngineSection):
        return _local_engine(file, section)
    return _scripted_engine(section, renderer)


def _vllm_engine(file: ConfigFile, section: VLLMEngineSection) -> Callable[[], Engine]:
    from rollouts.engines.vllm.http.server_address import parse_address

    api_key = _api_key(file, section.api_key_env)
    try:
        _, credentials = parse_address(section.base_url, api_key=None)
    except ValueError as error:
        raise file.error(("engine", "base_url"), str(error)) from None
    if credentials is not None:
        reason = "it has a user name or a password; remove them, and name the variable with the key in api_key_env"
        raise file.error(("engine", "base_url"), reason)

    def make() -> Engine:
        from rollouts.engines.vllm import VLLMEngine
        from rollouts.engines.vllm.http.limits import HttpLimits

        limits = HttpLimits(concurrency=file.config.concurrency)
        with file.naming("engine"):
            return VLLMEngine(
                section.base_url, model=section.model, api_key=api_key, media=section.media, limits=limits
            )

    return make


def _api_key(file: ConfigFile, variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        # The value is not repeated: someone may have written the key itself.
        reason = "the environment variable of this name is not set; put the server's key in it"
        raise file.error(("engine", "api_key_env"), reason)
    return key


def _local_engine(file: ConfigFile, section: LocalEngineSection) -> Callable[[], Engine]:
    directory = file.resolve(section.directory)
    if not (directory / "config.json").is_file():
        reason = f"there is no {directory / 'config.json'}; write a model directory, relative to {file.directory}"
        raise file.error(("engine", "directory"), reason)

    def make() -> Engine:
        with defer_interrupts():
            from rollouts.engines.local import LocalEngine

        with file.naming("engine", "directory"):
            return LocalEngine.from_pretrained(directory)

    return make


def _scripted_engine(section: ScriptedEngineSection, renderer: Any) -> Callable[[], Engine]:
    def make() -> Engine:
        from rollouts.testing import ScriptedEngine

        return ScriptedEngine(cycle(section.completions), renderer=renderer)

    return make


async def connect(file: ConfigFile, engine: Engine) -> None:
    """Ask a server what it is, so that one that cannot be used is an error before the run begins.

    Raises `RunConfigError`.
    """
    section = file.config.engine
    if not isinstance(section, VLLMEngineSection):
        return
    from rollouts.engines.vllm import VLLMEngine

    assert isinstance(engine, VLLMEngine)
    try:
        await engine.capabilities()
    except ApiKeyError as error:
        if section.api_key_env is None:
            reason = 'the server requires an API key; put it in an environment variable and add api_key_env = "NAME"'
            raise file.error(("engine", "base_url"), reason) from error
        reason = "the server refuses the key in this environment variable; set it to the key of `vllm serve --api-key`"
        raise file.error(("engine", "api_key_env"), reason) from error
    except EngineError as error:
        raise file.error(("engine", "base_url"), f"{error}; start the server, or correct the address") from error
