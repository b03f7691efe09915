"""Requests that were accepted, and their results until the client has them; requests of a model in their order."""

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
#: A request that can be cancelled and runs is forgotten once nobody has asked for its result for as long:
#: clients ask all the time, and send it again where it was.
UNASKED_SECONDS: Final = 60.0
#: The same for one that is done: it costs only its place, and a client may be without its network for a
#: while.
UNASKED_RESULT_SECONDS: Final = 900.0

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


@dataclass(slots=True)
class _Accepted:
    """`asked`: until when somebody waited for its result. `share`: what it is counted for."""

    task: asyncio.Task[Outcome]
    can_end: bool
    share: str
    asked: float


class Futures:
    """Accepted requests by id. A request that is sent twice runs once."""

    def __init__(self) -> None:
        self._accepted: dict[str, _Accepted] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()
        self._fetched_bytes = 0
        self._unfetched: Counter[str] = Counter()  # by share; all others of `_accepted` are in `_fetched`

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._accepted

    def unfetched(self, share: str | None = None) -> int:
        """How many run, or have results that no client has fetched: those of a share, or all."""
        return len(self._accepted) - len(self._fetched) if share is None else self._unfetched[share]

    def submit(
        self, request_id: str, work: Callable[[], Awaitable[Outcome]], *, can_end: bool = False, share: str = ""
    ) -> None:
        """Start a request of a new id; `can_end`: it may be cancelled, and forgotten if not asked for."""
        if request_id not in self._accepted:
            task = asyncio.create_task(_outcome(work))
            self._accepted[request_id] = _Accepted(task, can_end, share, time.monotonic())
            self._unfetched[share] += 1

    async def result(self, request_id: str, seconds: float) -> Outcome | None:
        """The outcome; None while there is none after `seconds`. Raises `RequestError` 410 for an id that is gone."""
        accepted = self._accepted.get(request_id)
        if accepted is None:
            raise RequestError(410, f"there is no request {request_id!r} here; send it again")
        # While somebody waits, it is never one that nobody asks for.
        task, accepted.asked = accepted.task, math.inf
        try:
            await asyncio.wait([task], timeout=seconds)
        finally:
            accepted.asked = time.monotonic()
        if not task.done():
            return None
        outcome = failure(asyncio.CancelledError()) if task.cancelled() else task.result()
        # It may have been forgotten, or sent again, while this call waited.
        if self._accepted.get(request_id) is accepted:
            self._note_fetched(request_id, outcome)
        return outcome

    def cancel(self, request_id: str) -> None:
        """End and forget a request that can be cancelled; who waits for its result is told. Another one stays."""
        accepted = self._accepted.get(request_id)
        if accepted is not None and accepted.can_end:
            self._forget(request_id)

    def forget(self, prefix: str, *, only_done: bool = False) -> None:
        """End and forget the requests whose ids begin with `prefix`; `only_done`: those that run go on."""
        for request_id, accepted in [*self._accepted.items()]:
            # The loop goes over a copy, because forgetting changes the dict.
            if request_id.startswith(prefix) and (accepted.task.done() or not only_done):
                self._forget(request_id)

    def forget_unasked(self) -> None:
        """End and forget those not asked for (`UNASKED_SECONDS`); what was fetched has its own bound."""
        now = time.monotonic()
        for request_id, accepted in [*self._accepted.items()]:
            seconds = UNASKED_RESULT_SECONDS if accepted.task.done() else UNASKED_SECONDS
            if accepted.can_end and accepted.asked < now - seconds and request_id not in self._fetched:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        accepted = self._accepted.pop(request_id)
        accepted.task.cancel()
        if (size := self._fetched.pop(request_id, None)) is None:
            self._count_out(accepted.share)
        else:
            self._fetched_bytes -= size

    def _count_out(self, share: str) -> None:
        self._unfetched[share] -= 1
        if not self._unfetched[share]:
            del self._unfetched[share]

    async def close(self) -> None:
        tasks = [each.task for each in self._accepted.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _note_fetched(self, request_id: str, outcome: Outcome) -> None:
        if request_id in self._fetched:
            return
        self._count_out(self._accepted[request_id].share)
        size = len(outcome) if isinstance(outcome, bytes) else 1000
        self._fetched[request_id] = size
        self._fetched_bytes += size
        while self._fetched_bytes > KEPT_BYTES or len(self._fetched) > KEPT_RESULTS:
            oldest, size = self._fetched.popitem(last=False)
            self._fetched_bytes -= size
            del self._accepted[oldest]


async def _outcome(work: Callable[[], Awaitable[Outcome]]) -> Outcome:
    try:
        return await work()
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - every failure is the answer of its request
        return failure(error)
