"""Requests that were accepted, and their results until the client has them; requests of a model in their order."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from renderers import RendererError
from rollouts.errors import (
    ApiKeyError,
    ArgumentError,
    CapabilityError,
    InvalidRequestError,
    SampleError,
    UnsupportedModelError,
    as_unicode,
    describe_exception,
)
from rollouts.serve.errors import RequestError

log = logging.getLogger("rollouts.tinker")
#: Results that clients have fetched are kept within this bound, for those whose answer was lost on its way.
KEPT_BYTES: Final = 256 * 2**20
#: As many results, of any size.
KEPT_RESULTS: Final = 50_000

_USER_ERRORS: Final = (
    ArgumentError, CapabilityError, InvalidRequestError, RendererError, RequestError, SampleError,
    UnsupportedModelError,
)  # fmt: skip

#: A result: a JSON object, or the bytes of a protobuf message.
Outcome = dict[str, object] | bytes


def failure(error: BaseException) -> dict[str, object]:
    """The outcome of a request that failed: whether its sender or this server is the reason, and the cure."""
    by_user = isinstance(error, _USER_ERRORS) and not isinstance(error, ApiKeyError)
    if isinstance(error, asyncio.CancelledError):
        return {"error": "the request was cancelled", "category": "user"}
    if not by_user:
        log.error("a request failed", exc_info=error)
    text = as_unicode(str(error)) if by_user else describe_exception(error)
    return {"error": text, "category": "user" if by_user else "server"}


class Futures:
    """Accepted requests by id. A request that is sent twice runs once."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()
        self._fetched_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    @property
    def unfetched(self) -> int:
        """How many run, or have results that no client has fetched."""
        return len(self._tasks) - len(self._fetched)

    def submit(self, request_id: str, work: Callable[[], Awaitable[Outcome]]) -> None:
        """Start a request, unless one of this id was accepted before."""
        if request_id not in self._tasks:
            self._tasks[request_id] = asyncio.create_task(_outcome(work))

    async def result(self, request_id: str, seconds: float) -> Outcome | None:
        """The outcome; None while there is none after `seconds`. Raises `RequestError` 410 for an id that is gone."""
        task = self._tasks.get(request_id)
        if task is None:
            raise RequestError(410, f"there is no request {request_id!r} here; send it again")
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        outcome = failure(asyncio.CancelledError()) if task.cancelled() else task.result()
        self._note_fetched(request_id, outcome)
        return outcome

    def cancel(self, request_id: str) -> None:
        """End a request that runs; one that is unknown or has ended stays as it is."""
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def forget(self, prefix: str, *, only_done: bool = False) -> None:
        """End and forget the requests whose ids begin with `prefix`; `only_done`: those that run go on."""
        for request_id in [each for each in self._tasks if each.startswith(prefix)]:
            if not only_done or self._tasks[request_id].done():
                self._tasks.pop(request_id).cancel()
                self._fetched_bytes -= self._fetched.pop(request_id, 0)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _note_fetched(self, request_id: str, outcome: Outcome) -> None:
        if request_id not in self._tasks or request_id in self._fetched:
            return
        size = len(outcome) if isinstance(outcome, bytes) else 1000
        self._fetched[request_id] = size
        self._fetched_bytes += size
        while self._fetched_bytes > KEPT_BYTES or len(self._fetched) > KEPT_RESULTS:
            oldest, size = self._fetched.popitem(last=False)
            self._fetched_bytes -= size
            del self._tasks[oldest]


async def _outcome(work: Callable[[], Awaitable[Outcome]]) -> Outcome:
    try:
        return await work()
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - every failure is the answer of its request
        return failure(error)
