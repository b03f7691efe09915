"""The requests of a local engine that wait and that run, and how they are interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rollouts.engines.protocol import Completion, GenerateRequest, GenerateResult, TokenListener
from rollouts.errors import EngineClosedError, EngineFailedError, RolloutsError, describe_exception

if TYPE_CHECKING:  # it imports torch, without which `LocalEngine` names the extra
    from rollouts.engines.local.adapters import LocalAdapter

#: Receives a position of a prompt and the log-probabilities (m, vocabulary) of the tokens behind it.
PromptObserver = Callable[[int, Any], None]


# A request inside the engine: what was asked for, who listens to its tokens, and whether it is to end early.


@dataclass(slots=True, eq=False)
class RunningRequest:
    """`listen` is called on the worker thread with each new token. `is_aborted` may be set by any thread.

    `observe` is called there with the log-probabilities in the places of the prompt, as
    `LocalEngine.generate` says. `adapter` samples it; None: the model alone. `runs_alone`: the model has
    failed in a batch with this request and others, one of which is the reason.
    """

    request: GenerateRequest
    listen: TokenListener | None = None
    adapter: LocalAdapter | None = None
    is_aborted: bool = False
    runs_alone: bool = False
    observe: PromptObserver | None = None


# The waiting requests, collected into batches.
#
# What one batch holds must depend on the requests alone, not on timing: rows of a batch influence each
# other's rounding.


class _Waiting(NamedTuple):
    running: RunningRequest
    result: asyncio.Future[GenerateResult]


class RequestQueue:
    """Collects requests into batches of at most `max_rows` completions and lets `run` generate them on `worker`.

    One event loop uses a queue. Requests are failed once `closed` is set.
    """

    def __init__(
        self,
        run: Callable[[Sequence[RunningRequest]], list[GenerateResult]],
        worker: ThreadPoolExecutor,
        closed: threading.Event,
        max_rows: int,
    ) -> None:
        self._run = run
        self._worker = worker
        self._closed = closed
        self._max_rows = max_rows
        self._arrived: list[_Waiting] = []  # since the last batch was collected
        self._collected: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None
        self._announced = 0
        self._none_announced = asyncio.Event()

    async def generate(self, running: RunningRequest) -> GenerateResult:
        """Wait for the batch that holds this request. A caller that is cancelled aborts it."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(running, loop.create_future())
        self._arrived.append(waiting)
        if self._task is None:
            self._task = loop.create_task(self._run_batches())
        try:
            return await waiting.result
        except asyncio.CancelledError:
            running.is_aborted = True
            raise
        finally:
            del waiting  # its result holds an error that refers to this frame

    def end_aborted(self) -> None:
        """Return aborted requests that are in no batch yet, without tokens."""
        for entry in (*self._collected, *self._arrived):
            if entry.running.is_aborted and not entry.result.done():
                request = entry.running.request
                completions = [Completion.aborted(number) for number in range(request.sampling.n)]
                entry.result.set_result(GenerateResult(request.request_id, completions))

    @contextmanager
    def expecting_request(self) -> Iterator[None]:
        """Announce a request that is made at the end of the block, if it is made; the next batch waits for it."""
        self._announced += 1
        try:
            yield
        finally:
            self._announced -= 1
            if not self._announced:
                self._none_announced.set()

    def fail_all(self, error: BaseException) -> None:
        """Raise `error` in every waiting call."""
        _fail(self._collected, error)
        _fail(self._arrived, error)

    async def _run_batches(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while await self._collect():
                if self._closed.is_set():
                    self.fail_all(closed_error("waiting"))
                    return
                batch = self._take_batch()
                if not batch:  # every caller was cancelled
                    continue
                running = loop.run_in_executor(self._worker, self._run, [entry.running for entry in batch])
                await asyncio.wait([running])
                if (error := running.exception()) is not None:
                    self._retry_or_fail(batch, error)
                    continue
                for entry, result in zip(batch, running.result(), strict=True):
                    if not entry.result.done():
                        entry.result.set_result(result)
        finally:
            self._task = None

    async def _collect(self) -> bool:
        """Wait until no request has arrived for some rounds of the loop; returns whether any request waits.

        New requests are sorted by their contents: which of several threads finished first must not decide the
        order of the rows of a batch.
        """
        quiet, count, wait_for_announced = 0, len(self._arrived), True
        # How many rounds of the event loop must pass without a new request before a batch starts, so that it does
        # not depend on timing: enough for a finished episode to end, and for one of the next group to begin and
        # request. This takes up to 8 rounds, and a round a few microseconds.
        while quiet < 32:
            await asyncio.sleep(0)
            if wait_for_announced and self._announced:
                wait_for_announced = await self._wait_for_announced()
                quiet = 0
            quiet = quiet + 1 if len(self._arrived) == count else 0
            count = len(self._arrived)
        self._collected += sorted(self._arrived, key=_sort_key)
        self._arrived.clear()
        return bool(self._collected)

    async def _wait_for_announced(self) -> bool:
        """Wait for announced requests; False if none has arrived for a while and some are still missing."""
        while self._announced:
            count = len(self._arrived)
            self._none_announced.clear()
            try:
                # A batch waits for announced requests until none has arrived for this long, more than a busy
                # machine leaves a thread waiting.
                await asyncio.wait_for(self._none_announced.wait(), 2)
            except TimeoutError:
                if len(self._arrived) == count:
                    return False
        return True

    def _retry_or_fail(self, batch: list[_Waiting], error: BaseException) -> None:
        """Run each request of a failed batch alone, so that only the one at fault fails."""
        if len(batch) > 1 and isinstance(error, Exception):
            for entry in batch:
                entry.running.runs_alone = True
            self._collected[:0] = batch
        elif isinstance(error, Exception) and not isinstance(error, RolloutsError):
            request_id = batch[0].running.request.request_id
            failure = EngineFailedError(request_id, f"the model failed on this request: {describe_exception(error)}")
            failure.__cause__ = error
            _fail(batch, failure)
        else:
            _fail(batch, error)

    def _take_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        rows = 0
        while self._collected:
            entry = self._collected[0]
            count = entry.running.request.sampling.n
            is_alone = entry.running.runs_alone or (batch and batch[0].running.runs_alone)
            has_other_adapter = batch and batch[0].running.adapter is not entry.running.adapter
            if batch and (is_alone or has_other_adapter or rows + count > self._max_rows):
                break
            self._collected.pop(0)
            if not entry.result.done():  # aborted, or its caller was cancelled
                batch.append(entry)
                rows += count
        return batch


def closed_error(request_id: str) -> EngineClosedError:
    return EngineClosedError(request_id, "the engine is closed")


def _fail(entries: list[_Waiting], error: BaseException) -> None:
    for entry in entries:
        if not entry.result.done():
            entry.result.set_exception(error)
    entries.clear()


def _sort_key(entry: _Waiting) -> tuple[str, bytes, tuple[str, ...], int]:
    """A sort key of what a request asks for. Requests with the same key are alike, or have no seed."""
    request = entry.running.request
    hashes = tuple(item.mm_hash for item, _ in request.media)
    seed = request.sampling.seed
    ids = np.asarray(request.prompt_ids, np.int64).tobytes()
    return request.adapter or "", ids, hashes, -1 if seed is None else seed
