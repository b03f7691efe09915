"""An engine that is started with its first request."""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.lazy.server_process import ServerProcess
from rollouts.engines.protocol import Engine, GenerateRequest, GenerateResult, InFlight, TokenListener
from rollouts.engines.server_kinds import ServerKind, server_engine
from rollouts.errors import ArgumentError, EngineClosedError, EngineStartError, describe_exception


class LazyEngine(Engine):
    """Starts an engine with its first request, once, however many requests wait for it.

        engine = LazyEngine(lambda: LocalEngine.from_pretrained(directory))
        engine = LazyEngine.from_command(["vllm", "serve", directory, "--port", "8000"], "http://127.0.0.1:8000")

    A program that makes the engine and samples nothing, such as one that only trains, starts nothing. `start`, `async`
    or not, returns the engine; a start that fails raises `EngineStartError`, for every later request too, and so does a
    server that has ended: make another engine then.
    """

    def __init__(self, start: Callable[[], Engine | Awaitable[Engine]]) -> None:
        self._start_engine = start
        self._engine: Engine | None = None
        self._process: ServerProcess | None = None  # the server of the engine, where it is started here
        self._failure: EngineStartError | None = None  # of the start
        self._starting: SingleFlight[Engine] = SingleFlight()
        self._closed = False

    @classmethod
    def from_command(
        cls,
        command: Sequence[str],
        base_url: str,
        *,
        kind: ServerKind = "vllm",
        environment: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        start_seconds: float = 900.0,
        **options: Any,
    ) -> Self:
        """A server that `command` starts and that then serves `base_url`; `options` are those of `VLLMEngine`, or with
        kind="sglang" of `SGLangEngine`.

        `environment` is added to that of this process. The output of the server goes to `log_path`, else to a
        temporary file; its last lines are in the error of a failed start. The server ends with `close` and with this
        process, also if that is killed.
        """
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ArgumentError("command", command, "pass a list of texts: the program and its arguments")

        process = ServerProcess(command, environment=environment, log_path=log_path)

        async def start() -> Engine:
            engine = server_engine(kind, base_url, **options)
            try:
                if await engine.control.health():
                    name = type(engine).__name__
                    reason = f"a server runs at {engine.base_url} already; give it another port, or use {name}"
                    raise EngineStartError(" ".join(command), reason, "", None)
                await process.start(engine.control.health, start_seconds)
            except BaseException:
                await engine.close()
                raise
            return engine

        lazy = cls(start)
        lazy._process = process
        return lazy

    # The calls of an engine.

    @property
    def vocab_size(self) -> int | None:
        return None if self._engine is None else self._engine.vocab_size

    @property
    def max_model_len(self) -> int | None:
        return None if self._engine is None else self._engine.max_model_len

    @property
    def weight_version(self) -> str:
        """That of the engine; empty before it is started."""
        return "" if self._engine is None else self._engine.weight_version

    @property
    def streams(self) -> bool:
        """Whether the engine does; False before it is started."""
        return self._engine is not None and self._engine.streams

    @property
    def control(self) -> Any:
        """The control calls of the engine; None before it is started, and for an engine without any."""
        return None if self._engine is None else self._engine.control

    async def capabilities(self) -> Any:
        """What the server of the engine supports; None before it is started."""
        return None if self._engine is None else await self._engine.capabilities()

    async def context_length(self) -> int | None:
        """That of the engine, which is started the first time."""
        return await (await self.start()).context_length()

    async def check_health(self) -> None:
        """Raise why a request could not be served now; return if the engine runs, or was not started yet.

        Raises `EngineStartError` and what the check of its server raises.
        """
        if self._engine is not None:
            self._check_process()
            await self._engine.check_health()
        elif self._failure is not None:
            raise self._failure

    async def served_version(self) -> str | None:
        return "" if self._engine is None else await self._engine.served_version()

    async def start(self) -> Engine:
        """The engine, which is started the first time. Raises `EngineStartError`, `EngineClosedError`."""
        if self._engine is None:
            return await self._starting.run("start", self._start)
        self._check_process()
        return self._engine

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        """Sample, after starting the engine the first time. Raises what it raises, and what `start` raises."""
        engine = await self.start()
        return await (engine.generate(request) if listen is None else engine.generate(request, listen))

    async def update_weights(self, weights: Any, version: str, *, in_flight: InFlight = "abort") -> None:
        """Replace the weights of the engine, which is started the first time."""
        await (await self.start()).update_weights(weights, version, in_flight=in_flight)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests of the engine, if it runs."""
        if self._engine is not None:
            await self._engine.abort(request_ids)

    async def abort_all(self) -> None:
        """End every request of the engine, if it runs."""
        if self._engine is not None:
            await self._engine.abort_all()

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter into the engine, which is started the first time."""
        await (await self.start()).load_adapter(name, directory)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""
        await (await self.start()).unload_adapter(name)

    async def adapters(self) -> Mapping[str, str]:
        """The loaded adapters: the directory of each by its name."""
        return await (await self.start()).adapters()

    async def close(self) -> None:
        """Refuse further requests; close the engine and end its server.

        An engine that refuses to be closed, because it belongs to another event loop, stays in use.
        """
        if self._engine is not None:
            await self._engine.close()
        self._closed, self._engine = True, None
        if self._process is not None:  # also one that is starting
            await self._process.stop()

    def _check_process(self) -> None:
        if self._process is not None and not self._process.is_running:
            raise self._process.exit_error()

    async def _start(self) -> Engine:
        if self._closed:
            raise EngineClosedError("start", "the engine is closed")
        if self._failure is not None:
            raise self._failure
        engine = await self._started_engine()
        if self._closed:
            try:
                await engine.close()
            finally:
                if self._process is not None:
                    await self._process.stop()
            raise EngineClosedError("start", "the engine was closed while it started")
        self._engine = engine
        return engine

    async def _started_engine(self) -> Engine:
        try:
            engine = self._start_engine()
            return await engine if inspect.isawaitable(engine) else engine
        except EngineStartError as error:
            self._failure = error
            raise
        except Exception as error:
            self._failure = EngineStartError("start", f"it raised {describe_exception(error)}", "", None)
            raise self._failure from error
