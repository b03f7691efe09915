"""The engine of a run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from renderers import MediaPolicy
from rollouts.engines.lora import LoRAEngine
from rollouts.engines.protocol import ChatEngine, Engine
from rollouts.errors import (
    ApiKeyError,
    CapabilityError,
    EngineError,
    EngineStartError,
    FleetMismatchError,
    describe_exception,
    text_with_notes,
)
from rollouts.run_config.config_file import EngineFile
from rollouts.run_config.errors import KeyPath
from rollouts.run_config.import_paths import imported_factory
from rollouts.run_config.sections import (
    EndpointEngineSection,
    FleetEngineSection,
    ImportedEngine,
    LocalEngineSection,
    MediaSection,
    ScriptedEngineSection,
    ServedSection,
    ServerSection,
    SGLangEngineSection,
    VLLMEngineSection,
    VLLMOptions,
)
from rollouts.terminal.interrupts import defer_interrupts

if TYPE_CHECKING:
    from rollouts.engines.server_kinds import ServerKind


def engine_factory(file: EngineFile, renderer: Any) -> Callable[[], Engine | ChatEngine]:
    """Check the engine of a configuration; return the function that makes it.

    Neither opens a connection; the function loads a local model. Both raise `RunConfigError`, the function
    also `MissingExtraError`.
    """
    make = _factory_without_adapter(file, renderer)
    if getattr(file.config.engine, "adapter", None) is None:
        return make
    # A name stands for one set of weights, and other runs may have theirs at the same servers.
    name = "adapter" if file.config.engine.kind == "local" else f"adapter-{uuid4().hex[:8]}"
    return lambda: _EngineOfAdapter(cast(Engine, make()), name)


class _EngineOfAdapter(LoRAEngine):
    """Samples with the adapter that `connect` loads, and closes the engine with it."""

    async def close(self) -> None:
        await super().close()
        await self.engine.close()


def _factory_without_adapter(file: EngineFile, renderer: Any) -> Callable[[], Engine | ChatEngine]:
    section = file.config.engine
    if isinstance(section, ScriptedEngineSection):
        from rollouts.testing import ScriptedEngine

        return lambda: ScriptedEngine(cycle(section.completions), renderer=renderer)
    return _FACTORIES[type(section)](file, section)


def server_kind(section: ServedSection) -> ServerKind:
    """What serves."""
    if isinstance(section, FleetEngineSection):
        return section.server_kind
    return "sglang" if isinstance(section, SGLangEngineSection) else "vllm"


def media_policy(file: EngineFile, section: MediaSection) -> MediaPolicy:
    """The policy of a table `media`. Raises as `MediaPolicy`."""
    return MediaPolicy(
        allowed_schemes=frozenset(section.allowed_schemes),
        allowed_hosts=tuple(section.allowed_hosts),
        allowed_networks=tuple(section.allowed_networks),
        allowed_directories=tuple(file.resolve(directory) for directory in section.allowed_directories),
    )


def _endpoint(file: EngineFile, section: EndpointEngineSection) -> Callable[[], ChatEngine]:
    key = _api_key(file, section.api_key_env)
    with file.naming("engine", "media"):
        policy = media_policy(file, section.media)

    def make() -> ChatEngine:
        from rollouts.engines.endpoint import ChatEndpoint

        with file.naming("engine"):
            return ChatEndpoint(
                section.base_url,
                section.model,
                api_key=key,
                concurrency=file.config.concurrency,
                timeout_seconds=section.request_seconds,
                max_retries=2,  # the runner begins the episode again, and waits for a server that is down
                max_tokens_field=section.max_tokens_field,
                omit=section.omit,
                tool_images=section.tool_images,
                return_token_ids=section.return_token_ids,
                policy=policy,
            )

    return make


def _served_engine(file: EngineFile, section: ServedSection) -> Callable[[], Engine]:
    kind = server_kind(section)
    options: dict[str, Any] = {"api_key": _api_key(file, section.api_key_env)}
    if kind == "vllm" and isinstance(section, VLLMOptions):
        options |= {"model": section.model, "media": section.media}

    def make() -> Engine:
        from rollouts.engines.fleet import EngineFleet
        from rollouts.engines.fleet.fleet import RETRIES_IN_FLEET
        from rollouts.engines.http.connection import HttpLimits

        with file.naming("engine"):
            if not isinstance(section, FleetEngineSection):
                limits = HttpLimits(concurrency=file.config.concurrency)
                return _server_engine(file, section, kind, {**options, "limits": limits})
            limits = HttpLimits(concurrency=file.config.concurrency, retries=RETRIES_IN_FLEET)
            if section.urls:
                return EngineFleet.from_urls(section.urls, kind=kind, http_limits=limits, **options)
            of_server = {**options, "limits": limits}
            return EngineFleet({one.base_url: _server_engine(file, one, kind, of_server) for one in section.servers})

    return make


def _server_engine(file: EngineFile, server: ServerSection, kind: ServerKind, options: Mapping[str, Any]) -> Engine:
    """The engine of one server, which it starts where the section has a command."""
    if server.start is None:
        from rollouts.engines.server_kinds import server_engine

        return server_engine(kind, server.base_url, **options)
    from rollouts.engines.lazy import LazyEngine

    return LazyEngine.from_command(
        server.start,
        server.base_url,
        kind=kind,
        environment=server.environment,
        log_path=None if server.log is None else file.resolve(server.log),
        start_seconds=server.start_seconds,
        **options,
    )


def _api_key(file: EngineFile, variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        # The value is not repeated: someone may have written the key itself.
        reason = "the environment variable of this name is not set; put the server's key in it"
        raise file.error(("engine", "api_key_env"), reason)
    return key


def local_directory(file: EngineFile, section: LocalEngineSection) -> Path:
    """The directory of the model that runs in this process. Raises `RunConfigError` unless it is a model's."""
    directory = file.resolve(section.directory)
    if not (directory / "config.json").is_file():
        reason = f"there is no {directory / 'config.json'}; write a model directory, relative to {file.directory}"
        raise file.error(("engine", "directory"), reason)
    return directory


def _local_engine(file: EngineFile, section: LocalEngineSection) -> Callable[[], Engine]:
    directory = local_directory(file, section)

    def make() -> Engine:
        with defer_interrupts():
            from rollouts.engines.local import LocalEngine

        with file.naming("engine", "directory"):
            return LocalEngine.from_pretrained(directory)

    return make


def _imported_engine(file: EngineFile, section: ImportedEngine) -> Callable[[], Engine]:
    factory = imported_factory(file, "engine", section, [])

    def make() -> Engine:
        try:
            engine = factory()
        except Exception as error:
            # A function of a user may raise anything.
            raise file.error(("engine", "factory"), f"{section.factory} raised {describe_exception(error)}") from error
        if not isinstance(engine, Engine):
            reason = f"{section.factory} gives a {type(engine).__name__}; give an object of a subclass of Engine"
            raise file.error(("engine", "factory"), reason)
        return engine

    return make


_FACTORIES: Mapping[type, Callable[[EngineFile, Any], Callable[[], Engine | ChatEngine]]] = {
    LocalEngineSection: _local_engine,
    EndpointEngineSection: _endpoint,
    ImportedEngine: _imported_engine,
    **dict.fromkeys((VLLMEngineSection, SGLangEngineSection, FleetEngineSection), _served_engine),
}


async def connect(file: EngineFile, engine: Engine | ChatEngine) -> None:
    """Start the servers that the run is to start, ask every server what it is, and load the adapter of the file.

    A server that cannot be used is then an error before the run begins. In a fleet, one server that can be
    used is enough: the others serve as soon as their checks pass. Raises `RunConfigError`.
    """
    section = file.config.engine
    if isinstance(engine, _EngineOfAdapter):
        adapter = file.resolve(cast(Any, section).adapter)
        await connect(file, engine.engine)
        with file.naming("engine", "adapter"):
            await engine.update_weights(adapter, f"{engine.name}@1")
    elif isinstance(section, VLLMEngineSection | SGLangEngineSection):
        with _naming_server(file, section, ("engine",)):
            await cast(Engine, engine).context_length()  # starts it where it is to be started, and asks what it is
    elif isinstance(section, FleetEngineSection):
        await _connect_fleet(file, section, engine)
    elif isinstance(section, EndpointEngineSection):
        with _naming_server(file, section, ("engine",)):
            await cast(Any, engine).check()


async def _connect_fleet(file: EngineFile, section: FleetEngineSection, engine: Any) -> None:
    key = "urls" if section.urls else "servers"
    engines: Mapping[str, Engine] = engine.engines
    probes = await asyncio.gather(*map(_probe_error, engines.values()))
    errors = {index: error for index, error in enumerate(probes) if error is not None}
    # Failures that do not pass with time.
    lasting = [index for index, error in errors.items() if isinstance(error, CapabilityError | EngineStartError)]
    for index in lasting or (errors if len(errors) == len(engines) else ()):
        path: KeyPath = ("engine", "servers", index) if key == "servers" else ("engine",)
        with _naming_server(file, section, path, key):
            raise errors[index]
    try:
        await engine.check()
    except FleetMismatchError as error:
        raise file.error(("engine", key), text_with_notes(error, str(error))) from error


async def _probe_error(engine: Engine) -> EngineError | None:
    try:
        await engine.context_length()
    except EngineError as error:
        return error
    return None


@contextmanager
def _naming_server(
    file: EngineFile,
    section: ServedSection | EndpointEngineSection,
    path: KeyPath,
    key_of_address: str = "base_url",
) -> Iterator[None]:
    """Turn an error of a server inside the block into one that names the key with its address, command or API key.

    `path` is the table of the server.
    """
    address: KeyPath = (*path, "base_url" if path[-1] != "engine" else key_of_address)
    try:
        yield
    except EngineStartError as error:
        raise file.error((*path, "start"), text_with_notes(error, str(error))) from error
    except ApiKeyError as error:
        if section.api_key_env is None:
            cure = 'add api_key_env = "NAME" (or --api-key-env NAME)'
            reason = f"the server requires an API key; put it in an environment variable and {cure}"
            raise file.error(address, reason) from error
        reason = "the server refuses the key in this environment variable; set it to the server's key"
        raise file.error(("engine", "api_key_env"), reason) from error
    except EngineError as error:
        reason = text_with_notes(error, str(error))
        raise file.error(address, reason) from error
