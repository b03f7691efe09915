"""Sends messages over a link in the order in which they are put, from code that cannot wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from transport import EncodeError
from transport.link import LinkClosedError, LinkRefusedError, MessageTooLargeError, PeerLostError

log = logging.getLogger("rollouts.workers")

#: Called with the error of a message that cannot be sent; the link stays usable.
OnError = Callable[[Exception], object]


class Outbox:
    """Messages to one peer. They are dropped when its connection has ended: what waits for their effect learns of that
    by other means.
    """

    def __init__(self, send: Callable[[object], Awaitable[None]]) -> None:
        self._send = send
        self._messages: asyncio.Queue[tuple[object, OnError | None]] = asyncio.Queue()
        self._sending = asyncio.ensure_future(self._run())

    @property
    def is_empty(self) -> bool:
        """Whether no message waits. One that was put before may be waiting for room in the queue of the link."""
        return self._messages.empty()

    def put(self, message: object, on_error: OnError | None = None) -> None:
        """Send a message after those before it. One that cannot be encoded, or is too large, is dropped.

        `on_error` is then called; without it the error is logged.
        """
        self._messages.put_nowait((message, on_error))

    async def flush(self) -> None:
        """Wait until what was put has been given to the link, or the connection has ended."""
        joining = asyncio.ensure_future(self._messages.join())
        try:
            await asyncio.wait([joining, self._sending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            joining.cancel()

    async def close(self) -> None:
        """Drop what was not sent."""
        self._sending.cancel()
        await asyncio.wait([self._sending])

    async def _run(self) -> None:
        while True:
            message, on_error = await self._messages.get()
            try:
                await self._send(message)
            except (PeerLostError, LinkRefusedError, LinkClosedError):
                return
            except (EncodeError, MessageTooLargeError, MemoryError) as error:
                if on_error is None:
                    log.warning("a %s is not sent: %s", type(message).__name__, error)
                else:
                    on_error(error)
            finally:
                self._messages.task_done()
