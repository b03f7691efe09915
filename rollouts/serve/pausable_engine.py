"""An engine whose requests can be paused, ended and continued, as those of a vLLM server, over any engine.

All routes that sample use one `PausableEngine`, so that a pause and an abort concern all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rollouts.engines.continuation import continuation, join_completions, restarts_from_prompt
from rollouts.engines.protocol import (
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    TokenDelta,
    TokenListener,
    is_abortable,
    is_streaming,
)
from rollouts.serve.errors import RequestError

PauseMode = Literal["abort", "wait", "keep"]

# How long a pause waits for the engine to end its requests before it asks again: a request may not have reached the
# part of the engine that ends it.
_ABORT_AGAIN_SECONDS = 0.25


@dataclass(eq=False)
class _Exchange:
    """A request in the engine. `is_kept`: a pause ended it, and it is to continue."""

    task: asyncio.Task[GenerateResult]
    is_kept: bool = False


@dataclass(eq=False)
class _Running:
    """A request of a client. `exchanges` are what the engine runs for it, by the id of each.

    `adapter` samples it. `continues`: no pause ends it.
    """

    request_id: str
    adapter: str | None = None
    continues: bool = False
    exchanges: dict[str, _Exchange] = field(default_factory=dict)
    is_aborted: bool = False
    is_waiting: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class PausableEngine:
    """`Engine` over another engine, with vLLM's pauses. To be used on one event loop.

    `max_model_len` bounds a prompt and its completion together. While paused, new requests wait. An engine that is no
    `AbortableEngine` loses the tokens of requests that are ended early.
    """

    def __init__(self, engine: Engine, *, max_model_len: int) -> None:
        self.engine = engine
        self.max_model_len = max_model_len
        self._requests: set[_Running] = set()
        self._open = True
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def vocab_size(self) -> int | None:
        """The limit of token ids, where the engine knows it."""
        size: int | None = getattr(self.engine, "vocab_size", None)
        return size

    @property
    def adapters(self) -> Callable[[], Awaitable[Mapping[str, str]]] | None:
        """The method of the engine that lists its LoRA adapters; None for an engine without any."""
        listing: Callable[[], Awaitable[Mapping[str, str]]] | None = getattr(self.engine, "adapters", None)
        return listing

    @property
    def is_paused(self) -> bool:
        return not self._open

    @property
    def running(self) -> int:
        """Requests that the engine has."""
        return sum(len(each.exchanges) for each in self._requests)

    @property
    def waiting(self) -> int:
        """Requests that wait for `resume`."""
        return sum(each.is_waiting for each in self._requests)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample `n` completions. Raises what the engine raises."""
        return await self._generate(request, None)

    async def generate_streamed(self, request: GenerateRequest, listen: TokenListener) -> GenerateResult:
        """As `generate`; `listen` receives tokens as they are sampled, or at the end where the engine streams none."""
        return await self._generate(request, listen)

    def continuing(self) -> ContinuingEngine:
        """This engine for requests that no pause ends: those of mode "abort" are for them as those of mode "keep"."""
        return ContinuingEngine(self)

    async def until_unused(self, adapter: str) -> None:
        """Wait until no request has the adapter. Raises `RequestError` (400) where a pause holds one.

        A request that a pause has cut off names its adapter again when it continues.
        """
        while users := [each for each in self._requests if each.adapter == adapter]:
            if self.is_paused:
                reason = f"{len(users)} requests that the pause holds use the adapter {adapter[:200]!r}; resume first"
                raise RequestError(400, reason, kind="InvalidUserInput")
            await users[0].ended.wait()

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()

    # Ending and pausing.

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by their ids: each returns the tokens that it has, with `FinishReason.ABORT`."""
        wanted = set(request_ids)
        await self._abort([each for each in self._requests if each.request_id in wanted])

    async def abort_all(self) -> int:
        """End every request; returns their number."""
        requests = list(self._requests)
        await self._abort(requests)
        return len(requests)

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests back, and return once the engine has none.

        Requests end with the tokens that they have ("abort"; also those that wait), are finished first ("wait"), or
        continue with `resume` ("keep"; also with "abort" those of `continuing`).
        """
        self._open = False
        if mode == "abort":
            await self._abort([each for each in self._requests if not each.continues])
        while self.is_paused and not self._idle.is_set():  # `resume` may be called meanwhile
            for each in self._requests:
                for exchange in each.exchanges.values():
                    exchange.is_kept |= mode == "keep" or (mode == "abort" and each.continues)
            if mode != "wait":
                await self._end(self._exchanges())
            with suppress(TimeoutError):
                async with asyncio.timeout(None if mode == "wait" else _ABORT_AGAIN_SECONDS):
                    await self._idle.wait()

    def resume(self) -> None:
        """Let all requests continue."""
        self._open = True
        for each in self._requests:
            each.changed.set()

    async def _abort(self, requests: Iterable[_Running]) -> None:
        exchanges: dict[str, _Exchange] = {}
        for each in requests:
            each.is_aborted = True
            each.changed.set()
            exchanges |= each.exchanges
        await self._end(exchanges)

    def _exchanges(self) -> dict[str, _Exchange]:
        return {name: exchange for each in self._requests for name, exchange in each.exchanges.items()}

    async def _end(self, exchanges: dict[str, _Exchange]) -> None:
        """Let the engine return the tokens so far of some of its requests."""
        if is_abortable(self.engine):
            await self.engine.abort(list(exchanges))
        else:
            for exchange in exchanges.values():
                exchange.task.cancel()

    # One request.

    async def _generate(
        self, request: GenerateRequest, listen: TokenListener | None, *, continues: bool = False
    ) -> GenerateResult:
        running = _Running(request.request_id, request.adapter, continues)
        self._requests.add(running)
        try:
            result, is_kept = await self._exchange(running, request, listen)
            if not is_kept or all(each.finish_reason is not FinishReason.ABORT for each in result.completions):
                return result
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._complete(running, request, partial, listen))
                    for partial in result.completions
                ]
            return replace(result, completions=[task.result() for task in tasks])
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._requests.discard(running)
            running.ended.set()

    async def _complete(
        self, running: _Running, request: GenerateRequest, partial: Completion, listen: TokenListener | None
    ) -> Completion:
        """A completion that a pause has cut off, continued as often as pauses of mode "keep" do so."""
        rounds, is_kept = 0, True
        while partial.finish_reason is FinishReason.ABORT and is_kept and not running.is_aborted:
            rounds += 1
            rest_request = continuation(request, partial, rounds, self.max_model_len)
            if rest_request is None:
                return replace(partial, finish_reason=FinishReason.LENGTH)
            rest_result, is_kept = await self._exchange(running, rest_request, _with_index(listen, partial.index))
            (rest,) = rest_result.completions
            if restarts_from_prompt(request):
                partial = replace(rest, index=partial.index)
            else:
                partial = join_completions(partial, rest)
        return partial

    async def _exchange(
        self, running: _Running, request: GenerateRequest, listen: TokenListener | None
    ) -> tuple[GenerateResult, bool]:
        """Run a request in the engine, once it is not paused; also whether a pause cut it off.

        The result has no tokens where the request was aborted before.
        """
        if not await self._wait_until_open(running):
            return _without_tokens(request), False
        name = self._free_name(request.request_id)
        task = asyncio.ensure_future(self._call(replace(request, request_id=name), listen))
        exchange = running.exchanges[name] = _Exchange(task)
        self._idle.clear()
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()  # of no effect on a task that has ended
            del running.exchanges[name]
            if not any(each.exchanges for each in self._requests):
                self._idle.set()
        if task.cancelled():  # by `_end`, of an engine that cannot return the tokens so far
            return _without_tokens(request), exchange.is_kept
        return replace(task.result(), request_id=request.request_id), exchange.is_kept

    async def _call(self, request: GenerateRequest, listen: TokenListener | None) -> GenerateResult:
        whole = listen is None or request.scores_prompt or restarts_from_prompt(request)
        if listen is not None and not whole and is_streaming(self.engine):
            return await self.engine.generate_streamed(request, listen)
        result = await self.engine.generate(request)
        if listen is not None:
            for completion in result.completions:
                listen(TokenDelta.of(completion))
        return result

    async def _wait_until_open(self, running: _Running) -> bool:
        """Wait while the engine is paused; False if the request is aborted."""
        running.is_waiting = True
        try:
            while self.is_paused and not running.is_aborted:
                running.changed.clear()
                await running.changed.wait()
        finally:
            running.is_waiting = False
        return not running.is_aborted

    def _free_name(self, request_id: str) -> str:
        """The id, with a number where the engine runs a request of that id already."""
        taken = self._exchanges()
        number, name = 1, request_id
        while name in taken:
            number += 1
            name = f"{request_id}#{number}"
        return name


class ContinuingEngine:
    """A `PausableEngine` whose requests continue after every pause; made by `PausableEngine.continuing`."""

    def __init__(self, pausable: PausableEngine) -> None:
        self._pausable = pausable

    @property
    def engine(self) -> Engine:
        """The engine that samples."""
        return self._pausable.engine

    @property
    def vocab_size(self) -> int | None:
        """The limit of token ids, where the engine knows it."""
        return self._pausable.vocab_size

    @property
    def adapters(self) -> Callable[[], Awaitable[Mapping[str, str]]] | None:
        """As `PausableEngine.adapters`."""
        return self._pausable.adapters

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """As `PausableEngine.generate`."""
        return await self._pausable._generate(request, None, continues=True)

    async def generate_streamed(self, request: GenerateRequest, listen: TokenListener) -> GenerateResult:
        """As `PausableEngine.generate_streamed`."""
        return await self._pausable._generate(request, listen, continues=True)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """As `PausableEngine.abort`."""
        await self._pausable.abort(request_ids)

    async def close(self) -> None:
        """Close the engine."""
        await self._pausable.close()


def _with_index(listen: TokenListener | None, index: int) -> TokenListener | None:
    """A listener for a continuation, whose only completion is completion `index` of the request."""
    return None if listen is None else lambda delta: listen(replace(delta, index=index))


def _without_tokens(request: GenerateRequest) -> GenerateResult:
    completions = [
        Completion(index, np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.ABORT)
        for index in range(request.sampling.n)
    ]
    return GenerateResult(request.request_id, completions)
