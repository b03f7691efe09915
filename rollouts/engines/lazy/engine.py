"""An engine that is started with its first request."""

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.forwarding import ForwardingEngine, NoEngine
from rollouts.engines.lazy.server_process import ServerProcess
from rollouts.engines.protocol import Engine
from rollouts.engines.server_kinds import ServerKind, server_engine
from rollouts.errors import EngineClosedError, EngineStartError, describe_exception


class LazyEngine(ForwardingEngine):
    """Starts an engine with its first request, once, however many requests wait for it.

        engine = LazyEngine(lambda: LocalEngine.from_pretrained(directory))
        engine = LazyEngine.from_command(["vllm", "serve", directory, "--port", "8000"], "http://127.0.0.1:8000")

    A program that makes the engine and samples nothing, such as one that only trains, starts nothing.
    `start`, `async` or not, returns the engine; a start that fails raises `EngineStartError`, for every later
    request too, and so does a server that has ended: make another engine then.
    """

    def __init__(self, start: Callable[[], Engine | Awaitable[Engine]]) -> None:
        super().__init__(NoEngine())
        self._start_engine = start
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
        """A server that `command` starts and that then serves `base_url`; `options` are those of
        `VLLMEngine`, or with kind="sglang" of `SGLangEngine`.

        `environment` is added to that of this process. The output of the server goes to `log_path`, else to a
        temporary file; its last lines are in the error of a failed start. The server ends with `close` and
        with this process, also if that is killed.
        """
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

    async def check_health(self) -> None:
        """Raise why a request could not be served now; return if the engine runs, or was not started yet.

        Raises `EngineStartError` and what the check of its server raises.
        """
        if self._failure is not None:
            raise self._failure
        self._check_process()
        await super().check_health()

    async def start(self) -> Engine:
        """The engine, which is started the first time. Raises `EngineStartError`, `EngineClosedError`."""
        if isinstance(self.engine, NoEngine):
            return await self._starting.run("start", self._start)
        self._check_process()
        return self.engine

    async def close(self) -> None:
        """Close the engine and end its server; one that belongs to another event loop stays in use."""
        await super().close()
        self._closed, self.engine = True, NoEngine()
        if self._process is not None:  # also one that is starting
            await self._process.stop()

    def _check_process(self) -> None:
        if self._process is None or isinstance(self.engine, NoEngine) or self._process.is_running:
            return
        raise self._process.exit_error()

    async def _start(self) -> Engine:
        if self._closed:
            raise EngineClosedError("start", "the engine is closed")
        if self._failure is not None:
            raise self._failure
        try:
            started = self._start_engine()
            engine = await started if inspect.isawaitable(started) else started
        except EngineStartError as error:
            self._failure = error
            raise
        except Exception as error:
            self._failure = EngineStartError("start", f"it raised {describe_exception(error)}", "", None)
            raise self._failure from error
        if self._closed:
            try:
                await engine.close()
            finally:
                if self._process is not None:
                    await self._process.stop()
            raise EngineClosedError("start", "the engine was closed while it started")
        self.engine = engine
        return engine
