"""An engine that is started with its first request, and again after it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.lazy.server_process import ServerProcess
from rollouts.engines.protocol import Engine, GenerateRequest, GenerateResult, InFlight
from rollouts.engines.server_kinds import ServerKind, server_engine
from rollouts.errors import ArgumentError, EngineClosedError, EngineStartError, RolloutsError, describe_exception

log = logging.getLogger("rollouts.engines.lazy")

_LONGEST_BACKOFF_SECONDS = 60.0


class LazyEngine:
    """Starts an engine with its first request, once, however many requests wait for it.

        engine = LazyEngine(lambda: LocalEngine.from_pretrained(directory))
        engine = LazyEngine.from_command(["vllm", "serve", directory, "--port", "8000"], "http://127.0.0.1:8000")

    A program that makes the engine and samples nothing, such as one that only trains, starts nothing. `start`, `async`
    or not, returns the engine; a start that fails raises `EngineStartError` for the requests that wait, and the next
    request tries again. A server that has ended is started again with the next request, and gets the weights of the
    last update, where they came from a directory, and its adapters again. Before start number n in a row without a
    completion there is a wait of `backoff_seconds` * 2**(n - 2), and after `restarts` failed starts every request
    raises the last error.
    """

    def __init__(
        self, start: Callable[[], Engine | Awaitable[Engine]], *, restarts: int = 3, backoff_seconds: float = 1.0
    ) -> None:
        if not callable(start):
            rule = "pass a function that returns an Engine, or use LazyEngine.from_command"
            raise ArgumentError("start", start, rule)
        self._start_engine = start
        self._restarts = restarts
        self._backoff_seconds = backoff_seconds
        self._starts = 0  # in a row, without a completion
        self._engine: Engine | None = None
        self._process: ServerProcess | None = None  # the server of the engine, where it is started here
        self._last_error: EngineStartError | None = None
        self._last_update: tuple[str | os.PathLike[str], str] | None = None
        self._adapters: dict[str, str | os.PathLike[str]] = {}  # by name: the directories of what is loaded
        self._starting: SingleFlight[Engine] = SingleFlight()
        self._restart: asyncio.Future[None] | None = None  # kept, so that it is not collected while it runs
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
        restarts: int = 3,
        backoff_seconds: float = 1.0,
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

        lazy = cls(start, restarts=restarts, backoff_seconds=backoff_seconds)
        lazy._process = process
        return lazy

    # The engine protocol.

    @property
    def is_started(self) -> bool:
        return self._engine is not None

    @property
    def vocab_size(self) -> int | None:
        return getattr(self._engine, "vocab_size", None)

    @property
    def weight_version(self) -> str:
        """That of the engine; before it is started, that of the last update, else empty."""
        if self._engine is None:
            return "" if self._last_update is None else self._last_update[1]
        return str(getattr(self._engine, "weight_version", ""))

    @property
    def control(self) -> Any:
        """The control calls of the engine; None before it is started, and for an engine without any."""
        return getattr(self._engine, "control", None)

    @property
    def capabilities(self) -> Any:
        """The call of the engine that asks what its server is; None before it is started, and for one without it."""
        return getattr(self._engine, "capabilities", None)

    async def check_health(self) -> None:
        """Raise why a request could not be served now; return if the engine runs, or was not started yet.

        An engine that ran and has ended, or failed to start, is started again meanwhile: a fleet gives it no request
        before it runs. Raises `EngineStartError` and what the check of its server raises.
        """
        if self._is_running:
            check_health = getattr(self.control, "check_health", None)
            if check_health is not None:
                await check_health()
        elif self._starts or self._engine is not None:
            self._restart = asyncio.ensure_future(self._start_quietly())
            raise self._last_error or EngineStartError("start", "it is being started", "", None)

    async def start(self) -> Engine:
        """The engine, which is started if it does not run. Raises `EngineStartError`, `EngineClosedError`."""
        engine = self._engine
        if engine is None or not self._is_running:
            engine = await self._starting.run("start", self._start)
        return engine

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample, after starting the engine if it does not run. Raises what it raises, and what `start` raises."""
        engine = await self.start()
        result = await engine.generate(request)
        self._starts = 0
        return result

    async def update_weights(self, weights: Any, version: str, *, in_flight: InFlight = "abort") -> None:
        """Replace the weights of the engine, which is started if it does not run."""
        engine: Any = await self.start()
        await engine.update_weights(weights, version, in_flight=in_flight)
        self._last_update = (weights, version) if isinstance(weights, str | os.PathLike) else None

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests of the engine, if it runs and can."""
        abort = getattr(self._engine, "abort", None)
        if abort is not None:
            await abort(request_ids)

    async def abort_all(self) -> None:
        """End every request of the engine, if it runs and can."""
        abort_all = getattr(self._engine, "abort_all", None)
        if abort_all is not None:
            await abort_all()

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter into the engine, which is started if it does not run; again after each restart."""
        engine: Any = await self.start()
        await engine.load_adapter(name, directory)
        self._adapters[name] = directory

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""
        engine: Any = await self.start()
        await engine.unload_adapter(name)
        self._adapters.pop(name, None)

    async def adapters(self) -> Mapping[str, str]:
        """The loaded adapters: the directory of each by its name."""
        engine: Any = await self.start()
        found: Mapping[str, str] = await engine.adapters()
        return found

    async def close(self) -> None:
        """Refuse further requests; close the engine and end its server.

        An engine that refuses to be closed, because it belongs to another event loop, stays in use.
        """
        if self._engine is not None:
            await self._engine.close()
        self._closed, self._engine = True, None
        if self._process is not None:  # also one that is starting
            await self._process.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def _is_running(self) -> bool:
        return self._engine is not None and (self._process is None or self._process.is_running)

    async def _start_quietly(self) -> None:
        with contextlib.suppress(RolloutsError):  # the next check and the next request raise it
            await self.start()

    async def _start(self) -> Engine:
        if self._closed:
            raise EngineClosedError("start", "the engine is closed")
        if self._engine is not None and self._process is not None:  # its server has ended
            self._last_error = self._process.exit_error()
            ended, self._engine = self._engine, None
            await self._end(ended)
        if self._last_error is not None and self._starts > self._restarts:
            raise self._last_error
        if self._starts:
            wait = min(_LONGEST_BACKOFF_SECONDS, self._backoff_seconds * 2.0 ** (self._starts - 1))
            log.warning("the engine is started again in %.1f s: %s", wait, self._last_error)
            await asyncio.sleep(wait)
        self._starts += 1
        engine = await self._started_engine()
        if self._closed:
            await self._end(engine)
            raise EngineClosedError("start", "the engine was closed while it started")
        await self._load_last_weights(engine)
        self._engine = engine
        return engine

    async def _started_engine(self) -> Engine:
        try:
            engine = self._start_engine()
            return await engine if inspect.isawaitable(engine) else engine
        except EngineStartError as error:
            self._last_error = error
            raise
        except Exception as error:
            self._last_error = EngineStartError("start", f"it raised {describe_exception(error)}", "", None)
            raise self._last_error from error

    async def _load_last_weights(self, engine: Any) -> None:
        try:
            if self._last_update is not None:
                await engine.update_weights(*self._last_update)
            for name, directory in self._adapters.items():
                await engine.load_adapter(name, directory)
        except RolloutsError:
            await self._end(engine)
            raise

    async def _end(self, engine: Engine) -> None:
        try:
            await engine.close()
        finally:
            if self._process is not None:
                await self._process.stop()
