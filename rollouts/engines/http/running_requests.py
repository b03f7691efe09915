"""The running requests of an engine: under which ids the server runs each, who waits, and which were aborted."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from rollouts.errors import EngineError

#: A server ends an aborted request in less time. A request that has not ended after it never reached the
#: server.
_ABORT_EFFECT_SECONDS: Final = 1.0


class RunningRequests:
    """The requests of one engine by their ids."""

    def __init__(self) -> None:
        # Request id -> the ids under which the server runs it (its own, or those of the continuations of its
        # samples) -> the wait for the response.
        self._waits: dict[str, dict[str, asyncio.Timeout]] = {}
        self._aborted: set[str] = set()

    @contextmanager
    def running(self, request_id: str) -> Iterator[None]:
        """Register a request for a block. Raises `EngineError` where one of this id is running."""
        if request_id in self._waits:
            raise EngineError(request_id, "a request of this id is running already; give each its own")
        self._waits[request_id] = {}
        try:
            yield
        finally:
            del self._waits[request_id]
            self._aborted.discard(request_id)

    @contextmanager
    def waiting(self, request_id: str, server_id: str) -> Iterator[asyncio.Timeout]:
        """Register the wait for a response to `server_id`. Yields its timeout, which `expire` may end."""
        wait = self._waits[request_id][server_id] = asyncio.timeout(None)
        try:
            yield wait
        finally:
            del self._waits[request_id][server_id]

    def ids(self) -> list[str]:
        """The ids of all requests that run."""
        return list(self._waits)

    def is_aborted(self, request_id: str) -> bool:
        return request_id in self._aborted

    def mark_aborted(self, request_ids: Iterable[str]) -> list[str]:
        """Mark those of the requests that run as aborted; their ids."""
        running = [request_id for request_id in request_ids if request_id in self._waits]
        self._aborted.update(running)
        return running

    async def expire(self, request_ids: Iterable[str], *, at_once: bool = False) -> None:
        """End the waits of aborted requests, after the server's time to end them unless `at_once`."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + (0.0 if at_once else _ABORT_EFFECT_SECONDS)
        while (left := self.aborted_waits(request_ids)) and loop.time() < ends:  # noqa: ASYNC110  for one second
            await asyncio.sleep(_ABORT_EFFECT_SECONDS / 50)
        for wait in left.values():
            with suppress(RuntimeError):  # the wait has ended already
                wait.reschedule(0.0)

    def aborted_waits(self, request_ids: Iterable[str]) -> dict[str, asyncio.Timeout]:
        """By the ids under which the server still runs these requests, as far as they are aborted: their waits."""
        return {
            name: wait
            for request_id in request_ids
            if request_id in self._aborted
            for name, wait in self._waits[request_id].items()
        }
